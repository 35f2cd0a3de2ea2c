"""The tuner from the first point to the last file, with a launcher that makes the results up."""

import io
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.report import files
from overlap_sweep.results.records import LayerTrial, TunerRecord
from overlap_sweep.results.run_directory import Result
from overlap_sweep.tuner import workflow
from overlap_sweep.tuner.report import Report
from overlap_sweep.tuner.workflow import cannot_scale, tune
from overlap_sweep.workloads.operator.result import OperatorTimes
from tests.make_point import operator_config, pass_times, timing_of
from tests.search import stand_in
from tests.search.stand_in import Answer, Settings, StandIn, layer_result, operator_result, results

SPACE = ("operator=fc1,fc2", "method=ring_exchange,pipeline", "num_sm=8", "num_splits=2", "aggregate=false")
"""With max_tp_size=4: TP=2 and 4."""
FC2 = ("operator=fc2", SPACE[1], "num_sm=4,8", *SPACE[3:])


def operator_ratio(pass_name: str, settings: Settings) -> float:
    """Ring exchange is best, pipelines are nearly as good; 8 SMs are better than 4."""
    (setting,) = settings.values()
    return (0.80 if setting["method"] == "ring_exchange" else 0.81) + 0.02 * (setting["num_sm"] == 4)


def layer_ratio(config: OverlapConfig) -> float:
    """Every slot that overlaps gains; a pipeline in fc2's output gains more, beside all else."""
    return 0.95 - 0.02 * len(config.slots) - 0.05 * (config.slots.get("fc2_fprop", {}).get("method") == "pipeline")


def answered(
    of_operator: Callable[[str, Settings], float] = operator_ratio,
    of_layer: Callable[[OverlapConfig], float] = layer_ratio,
    **operator_fields: Any,
) -> Answer:
    def answer(point: Mapping[str, Any]) -> Result:
        if point["workload"]["name"] == "layer":
            return layer_result(point, of_layer)
        return operator_result(point, of_operator, **operator_fields)

    return answer


def tuned(directory: Path, *overrides: str, answer: Answer | None = None, space: tuple[str, ...] = FC2) -> StandIn:
    """Run to the end, without the page, whose charts take seconds."""
    given = ("+experiment=tp_overlap_tuner", *stand_in.ON_CPU)
    more = [override for override in overrides if not override.startswith("tp_size=")]
    with (
        stand_in.sweep_of(directory, *given, *more, answer=answer or answered()) as launcher,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(files, "page_files", lambda *_, **__: [])
        tune(launcher.inputs(*given, *space, *overrides))
        return launcher


def record(directory: Path) -> TunerRecord:
    return TunerRecord.read(directory / "tuner.json")


def proofs(directory: Path) -> dict[int, dict[str, Any]]:
    return {proof["tp_size"]: proof for proof in json.loads((directory / "tuning_report.json").read_text())["proof"]}


def search_of(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "search.json").read_text()))


def layers(launcher: StandIn) -> list[dict[str, Any]]:
    return [point for point in launcher.points if point["workload"]["name"] == "layer"]


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One file per TP size."""
    directory = tmp_path_factory.mktemp("presets")
    for tp_size in (2, 4):
        (directory / f"theirs_tp{tp_size}.yaml").write_text("fc1_fprop: {method: ring_exchange, num_sm: 4}\n")
    return f"tuner.presets={override_value([str(directory / 'theirs_tp{tp}.yaml')])}"


Done = tuple[Path, StandIn, str]
"""Both TP sizes, and what was printed."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, preset: str) -> Done:
    directory = tmp_path_factory.mktemp("tuned")
    with redirect_stdout(io.StringIO()) as printed:
        launcher = tuned(directory, "max_tp_size=4", preset, space=SPACE)
    return directory, launcher, printed.getvalue()


@pytest.fixture(scope="module")
def searched_fc2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("searched")
    assert layers(tuned(directory, "tp_size=2", "tuner.prove=false")) == []
    return directory


@pytest.fixture
def copied(searched_fc2: Path, tmp_path: Path) -> Path:
    """One operator at one TP size, without a proof: only layers are left to measure."""
    return shutil.copytree(searched_fc2, tmp_path / "copy")


def test_one_tp_size_after_the_other_is_searched_and_proven(done: Done) -> None:
    directory, launcher, _ = done
    steps = [(point["tp_size"], point["workload"]["name"]) for point in launcher.points]
    assert list(dict.fromkeys(steps)) == [(2, "operator"), (2, "layer"), (4, "operator"), (4, "layer")]
    assert (steps == sorted(steps, key=lambda step: step[0]), len(layers(launcher))) == (True, 4)
    found, written = record(directory), results(directory)
    assert (found.points, found.dropped) == (len(launcher.points) - 4, {})
    assert 0.0 < found.search_s <= found.wall_s
    assert [trial.tp_size for trial in found.together] == [trial.tp_size for trial in found.proofs] == [2, 4]
    for trial in (*found.together, *found.proofs):
        point = written[trial.point].recorded
        # What the backend cannot do is asked for all the same: the layer says why it was not measured.
        assert (point["tp_size"], set(point["layer"]["variants"])) == (trial.tp_size, set(trial.variants.values()))
    assert list(found.proofs[0].variants) == ["none", "default", "tuned", "preset theirs_tp2"]
    assert list(found.together[0].variants)[:2] == ["none", "best of each slot"]


def slots_of(trial: LayerTrial) -> dict[str, Any]:
    """Of the tuned variant."""
    return overlap_cfg.read(Path(trial.variants["tuned"].removeprefix("file:"))).slots


def test_the_combination_that_is_fastest_on_the_layer_is_proven_and_written(done: Done) -> None:
    directory, _, printed = done
    # Alone, ring exchange is faster forward.
    forward = {"method": "pipeline", "num_sm": 8, "num_splits": 2}
    backward = {"method": "ring_exchange", "num_sm": 8, "aggregate": False}
    for trial in record(directory).proofs:
        name, proof = f"optimal_tp_comm_overlap_cfg_tp{trial.tp_size}.yaml", proofs(directory)[trial.tp_size]
        assert (slots_of(trial)["fc2_fprop"], slots_of(trial)["fc2_dgrad"]) == (forward, backward)
        assert yaml.safe_load((directory / name).read_text()) == slots_of(trial)
        assert name in printed
        assert (proof["proven"], proof["recommended"]) == (True, "tuned")
        assert set(proof["variants"]) == {"none", "tuned", f"preset theirs_tp{trial.tp_size}", "floor"}
        assert proof["variants"]["tuned"]["ratio"] < 1.0
    # What somebody else found may be the fastest, and is tried like the tuner's own.
    assert all(f"preset theirs_tp{trial.tp_size}" in trial.variants for trial in record(directory).together)


def test_again_nothing_is_measured_and_the_answer_is_the_same(
    done: Done, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, launcher, _ = done
    before, search = proofs(directory), search_of(directory)
    assert tuned(directory, "max_tp_size=4", preset, space=SPACE).points == []
    after = search_of(directory)
    assert after["searches"] == search["searches"]
    assert after["reused"] == after["points"] == len(launcher.points) - 4
    assert f"{after['points']} points, {after['points']} of them measured before" in capsys.readouterr().out
    assert [proof["variants"] for proof in proofs(directory).values()] == [one["variants"] for one in before.values()]


def test_cudas_connections_are_tuned_and_proven_each_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can set them."""
    monkeypatch.setattr("overlap_sweep.runtime.point.visible_gpus", lambda: 8)
    on_gpus = ("runtime.device=cuda", "backend=torch", "precision=bf16", "runtime.max_connections=1,8", "tp_size=2")
    tuned(tmp_path, "tuner.together=0", space=(*FC2[:2], "num_sm=8", *FC2[3:], *on_gpus))
    points = [trial.point for trial in record(tmp_path).proofs]
    assert points == [points[0], points[0] + "_CUDA_DEVICE_MAX_CONNECTIONS-8"]
    assert len(list(tmp_path.rglob("optimal_tp_comm_overlap_cfg_tp2.yaml"))) == 2
    proven = {
        proof["case"]: proof["proven"] for proof in json.loads((tmp_path / "tuning_report.json").read_text())["proof"]
    }
    assert list(proven.values()) == [True, True]


@pytest.mark.parametrize(("together", "tried"), [(0, None), (2, 2), (9, 4)])
def test_as_many_combinations_as_asked_for_are_tried_together(copied: Path, together: int, tried: int | None) -> None:
    """For a proof, or a new preset, no new search is needed."""
    assert (record(copied).together, record(copied).proofs) == ([], [])
    assert overlap_cfg.read(copied / "optimal_tp_comm_overlap_cfg_tp2.yaml").slots
    launcher = tuned(copied, "tp_size=2", f"tuner.together={together}")
    assert [point["workload"]["name"] for point in launcher.points] == ["layer"] * (2 if tried else 1)
    assert [len(trial.variants) for trial in record(copied).together] == ([1 + tried] if tried else [])
    (proof,) = record(copied).proofs
    assert list(proof.variants) == ["none", "default", "tuned"]
    assert slots_of(proof)["fc2_fprop"]["method"] == ("pipeline" if tried else "ring_exchange")


@pytest.mark.parametrize(("profile", "of_proof"), [("best", "all"), ("none", "none")])
def test_the_proof_is_traced_unless_nothing_is(copied: Path, profile: str, of_proof: str) -> None:
    """Its traces show what ran in the slots of the file."""
    launcher = tuned(copied, "tp_size=2", "tuner.together=2", f"profile={profile}")

    assert [point["profile"] for point in layers(launcher)] == ["none", of_proof]


def test_a_layer_that_fails_leaves_the_operators_answer_and_is_run_without_the_tuned_one(copied: Path) -> None:
    def no_layers(point: Mapping[str, Any]) -> Result:
        assert point["workload"]["name"] == "layer"
        return Result(name="", recorded=dict(point), status="failed", error="out of memory\nmore")

    tuned(copied, "tp_size=2", answer=no_layers)
    run = [list(trial.variants) for trial in record(copied).proofs]
    assert run == [["none", "default", "tuned"], ["none", "default"]]
    proof = proofs(copied)[2]
    assert not proof["proven"]
    assert "out of memory" in proof["verdict"]
    slots = overlap_cfg.read(copied / "optimal_tp_comm_overlap_cfg_tp2.yaml").slots
    assert slots["fc2_fprop"]["method"] == "ring_exchange"


def traced(point: Mapping[str, Any], result: Result, by_chance: Collection[str] = ()) -> Result:
    """As it is with profile=all; before, only the methods that were the fastest so far have traces."""
    methods = {asked["method"] for asked in (point["phases"] or {}).values()}
    profiled = point["profile"] == "all" or (point["profile"] == "best" and methods & set(by_chance))
    result.traces = ["trace_rank0.json.gz", "trace_rank1.json.gz"] if profiled else []
    return result


Profiled = list[dict[str, str]]


def profiled_last(launcher: StandIn) -> Profiled:
    """By phase the methods of the points that were asked for only to be profiled."""
    last = [point for point in launcher.points if point["profile"] == "all"]
    assert {point["workload"]["name"] for point in last} <= {"operator"}
    return [{phase: asked["method"] for phase, asked in point["phases"].items()} for point in last]


RING, PIPELINE, NO_OVERLAP = "ring_exchange", "pipeline", {"fprop": "none"}


@pytest.mark.parametrize(
    ("by_chance", "last"),
    [
        ((), [NO_OVERLAP, {"fprop": RING, "dgrad": RING}]),
        (["none"], [{"fprop": RING, "dgrad": RING}]),
        ([RING], [NO_OVERLAP]),
        ([RING, "none"], []),
    ],
)
def test_what_is_chosen_is_profiled_in_a_last_step_unless_it_was(
    tmp_path: Path, by_chance: list[str], last: Profiled
) -> None:
    def answer(point: Mapping[str, Any]) -> Result:
        return traced(point, answered()(point), by_chance)

    given = ("tp_size=2", "tuner.prove=false", "profile=best")
    launcher = tuned(tmp_path, *given, answer=answer)
    assert profiled_last(launcher) == last
    # They are no part of the search, and what they measured is kept.
    assert record(tmp_path).points == len(launcher.points) - len(last)
    assert tuned(tmp_path, *given, answer=answer).points == []
    best = json.loads((tmp_path / "tuning_report.json").read_text())["configurations"]
    assert {row["profiled"] for row in best} <= {True, False}


def test_where_no_overlap_is_best_nothing_is_proven_and_presets_are_run(tmp_path: Path, preset: str) -> None:
    """Plain torch has no default overlap, so that there is nothing to run beside `none` but the floor."""
    slow = answered(of_operator=lambda pass_name, settings: 1.5, of_layer=lambda config: 1.2)
    (layer,) = layers(tuned(tmp_path, "tp_size=2", answer=slow))
    assert layer["layer"]["variants"] == ["none"]
    (trial,) = record(tmp_path).proofs
    assert trial.variants == {"none": "none", "default": "default", "tuned": "none"}
    proof = proofs(tmp_path)[2]
    assert not proof["proven"]
    assert "keep overlap off" in proof["verdict"]
    assert overlap_cfg.read(tmp_path / "optimal_tp_comm_overlap_cfg_tp2.yaml").switches["tp_comm_overlap"] is False

    tuned(tmp_path, "tp_size=2", preset, answer=slow)
    assert "preset theirs_tp2" in proofs(tmp_path)[2]["variants"]
    assert proofs(tmp_path)[2]["recommended"] == "none"


def floors(point: Mapping[str, Any]) -> Result:
    """At TP=4 the GEMMs alone take as long as at TP=2: tp1_us grows with the TP size in the stand-in."""
    result = answered()(point)
    if point["tp_size"] == 4 and isinstance(result.measured, OperatorTimes):
        for times in result.measured.times.values():
            times.floor = timing_of([2.5 * sample_us for sample_us in times.floor.samples_us])
    return result


def test_a_tp_size_that_cannot_scale_is_dropped_with_the_reason_unless_it_may_not_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    label, limits = "qwen3_0_6b TP=4", ("tuner.prove=false", "search.max_points=8")
    launcher = tuned(tmp_path, "max_tp_size=4", *limits, answer=floors)
    search = search_of(tmp_path)
    # One baseline is what it takes to know.
    assert sum(point["tp_size"] == 4 for point in launcher.points) == 1
    assert search["dropped"] == record(tmp_path).dropped
    assert list(search["dropped"]) == [label]
    assert search["dropped"][label].startswith("even with all communication hidden it would take 2.50 times")
    assert f"{label} not searched: even with" in capsys.readouterr().out
    assert {one["tp_size"] for one in search["searches"]} == {2}

    again = tuned(tmp_path, "max_tp_size=4", *limits, "tuner.drop_tp_sizes=false", answer=floors)
    assert {point["tp_size"] for point in again.points} == {4}
    assert record(tmp_path).dropped == search_of(tmp_path)["dropped"] == {}


def test_the_smallest_tp_size_is_never_dropped_and_a_budget_ends_the_search_not_the_proof(tmp_path: Path) -> None:
    launcher = tuned(tmp_path, "tp_size=4", "search.max_points=2", answer=floors)
    assert len(launcher.points) - len(layers(launcher)) == record(tmp_path).points == 2
    assert len(record(tmp_path).proofs) == 1
    assert record(tmp_path).dropped == {}


def test_where_nothing_can_be_measured_or_times_say_nothing_the_tuner_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(point: Mapping[str, Any]) -> Result:
        return operator_result(point, status="failed", measured=None, error="out of memory\nmore")

    assert layers(tuned(tmp_path, "tp_size=2", answer=out_of_memory, space=SPACE)) == []
    assert list(record(tmp_path).dropped) == ["qwen3_0_6b TP=2 fc1", "qwen3_0_6b TP=2 fc2"]
    assert all(why.endswith("without overlap failed: out of memory") for why in record(tmp_path).dropped.values())
    assert "out of memory" in capsys.readouterr().out
    assert layers(tuned(tmp_path / "fast", "tp_size=2", answer=answered(launch_bound=True))) == []
    assert record(tmp_path / "fast").proofs == []
    assert "Launch-bound points are left out" in (tmp_path / "fast" / "summary.txt").read_text()


def test_a_preset_that_cannot_be_read_is_said_before_anything_is_launched(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/nowhere\.yaml cannot be read"):
        tuned(tmp_path / "sweep", "tuner.presets=[/nowhere.yaml]")
    assert not any((tmp_path / "sweep").iterdir())


@pytest.mark.parametrize(
    ("device", "gpus", "most", "sizes", "notice"),
    [
        ("cpu", 0, 8, "2 4 8", None),
        ("auto", 0, 8, "2 4 8", None),
        ("auto", 4, 8, "2 4", "TP=8 left out: only 4 GPUs are visible"),
        ("cuda", 8, 16, "2 4 8", None),
        ("cuda", 3, 8, "2", "TP=4, TP=8 left out: only 3 GPUs are visible"),
        ("cuda", 9, 7, "2 4", None),
        ("cuda", 8, 1, None, "max_tp_size=1 leaves no communication to overlap"),
        ("cuda", 1, 8, None, "needs at least 2 GPUs; 1 visible"),
    ],
)
def test_tp_sizes_are_powers_of_two_up_to_what_was_asked_for_and_what_there_is(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, most: int, sizes: str | None, notice: str | None
) -> None:
    monkeypatch.setattr(workflow, "visible_gpus", lambda: gpus)
    config, operators = OmegaConf.create({"runtime": {"device": device}, "max_tp_size": most}), {"operator": ["fc1"]}
    # Those that were named are searched, whatever the machine: a point says what it lacks.
    assert workflow._with_tp_sizes({"tp_size": ["8"]}, config) == ({"tp_size": ["8"]}, None)
    if sizes:
        assert workflow._with_tp_sizes(operators, config) == ({**operators, "tp_size": sizes.split()}, notice)
        return
    with pytest.raises(UserError, match=notice):
        workflow._with_tp_sizes(operators, config)


def baseline(floor_us: float, tp1_us: float | None = 100.0) -> Result:
    """Of one operator at TP=4, forward and backward alike."""
    times = {name: pass_times(1e4, 1e4, floor_us, tp1_us=tp1_us) for name in ("fwd", "bwd")}
    return Result(name="none", recorded=dict(operator_config(4)), status="ok", measured=OperatorTimes(times=times))


@pytest.mark.parametrize(
    ("tolerance", "scales", "does_not", "times"),
    [(0.0, [25.0], [25.1], "1.00"), (0.2, [30.0], [30.5], "1.22"), (0.2, [40.0, 20.0], [40.0, 80.0], "2.40")],
)
def test_a_size_cannot_scale_whose_gemms_alone_take_too_long(
    tolerance: float, scales: list[float], does_not: list[float], times: str
) -> None:
    """All operators together, by their floors; where one rank has no time of one of them, nobody knows."""
    assert cannot_scale(list(map(baseline, scales)), tolerance) is None
    reason = cannot_scale(list(map(baseline, does_not)), tolerance)
    assert f"take {times} times TP=1's time / 4, more than the allowed {1 + tolerance:.2f}" in str(reason)
    assert cannot_scale([*map(baseline, does_not), baseline(500.0, None)], tolerance) is None


GIVEN = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_kv_heads")
"""What the stand-in's configuration sets."""
EVERYTHING = ("operator=qkv,proj,fc1,fc2", "method=ring_exchange", "num_sm=8", "aggregate=false", "max_tp_size=2")
MIXTURE = {"model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "moe_intermediate_size": 128}


def of_hugging_face(directory: Path, **fields: Any) -> tuple[str, ...]:
    directory.mkdir()
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 6}
    (directory / "config.json").write_text(json.dumps({**sizes, **fields}))
    return "model=hf", f"model.name={directory}", *(f"model.{name}=null" for name in GIVEN)


def test_of_a_mixture_of_experts_the_attention_is_tuned_and_proven(tmp_path: Path) -> None:
    found = tmp_path / "sweep"
    launcher = tuned(found, *EVERYTHING, *of_hugging_face(tmp_path / "moe", **MIXTURE), space=())
    refused = {label.rpartition(" ")[2]: why for label, why in record(found).dropped.items()}
    assert set(refused) == {"fc1", "fc2"}
    assert all("Megatron-Core runs the experts' GEMMs without overlap" in why for why in refused.values())
    assert {point.get("operator") for point in launcher.points[:2]} == {"qkv", "proj"}
    assert {point["layer"]["kind"] for point in layers(launcher)} == {"multihead_attention"}
    told = [line for line in (found / "summary.txt").read_text().splitlines() if line.startswith("dropped: ")]
    assert [line.count(name) for name, line in zip(("fc1", "fc2"), told, strict=True)] == [1, 1]
    (proof,) = proofs(found).values()
    # fc1 has no reduce-scatter whose switch qkv's could disagree with.
    assert (proof["proven"], set(proof["settings"])) == (True, {"qkv_fprop", "qkv_dgrad", "proj_fprop", "proj_dgrad"})
    report = Report(found)
    (case,) = report.cases
    assert case.applies_to[0] == "Applies to the attention (qkv, proj) of all 6 layers."
    assert [one.slot for one in report.unmeasured_slots] == ["qkv_wgrad"]
    assert "faster than no overlap in the attention" in str(report)
    assert case.applies_to[0] in str(report)
    assert case.applies_to[0] in report._repr_html_()
    assert "--tp-comm-overlap-rs-dgrad" in report.megatron_arguments(2)
    for name in ("optimal_tp_comm_overlap_cfg_tp2.yaml", "megatron_bridge_preset_tp2.py", "summary.txt"):
        assert all(sentence in (found / name).read_text() for sentence in case.applies_to)


@pytest.mark.parametrize(("dense", "kind"), [([0], "multihead_attention"), ([0, 1, 2], "transformer_layer")])
def test_a_mixture_with_dense_layers_is_proven_on_what_most_layers_have(
    tmp_path: Path, dense: list[int], kind: str
) -> None:
    model = of_hugging_face(tmp_path / "moe", **MIXTURE, mlp_only_layers=dense, intermediate_size=512)
    launcher = tuned(tmp_path / "sweep", *EVERYTHING, *model, space=())
    assert record(tmp_path / "sweep").dropped == {}
    assert {point["layer"]["kind"] for point in layers(launcher)} == {kind}
    (case,) = Report(tmp_path / "sweep").cases
    assert case.applies_to[1] == f"Applies to the dense MLP (fc1, fc2) of {len(dense)} of 6 layers."


def test_latent_attention_is_refused_for_every_operator_before_anything_is_measured(tmp_path: Path) -> None:
    latent = {"model_type": "deepseek_v3", "num_key_value_heads": 8, "first_k_dense_replace": 1, "v_head_dim": 32}
    with pytest.raises(UserError) as refused:
        tuned(tmp_path / "sweep", *EVERYTHING, *of_hugging_face(tmp_path / "mla", **latent), space=())
    reasons = str(refused.value).removeprefix("There is nothing to search: ").split("; ")
    assert [reason.partition(":")[0] for reason in reasons] == ["qkv", "proj", "fc1", "fc2"]
    assert not list(tmp_path.glob("sweep/*"))


def test_sizes_that_a_tp_size_does_not_divide_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    sizes = ("model.num_kv_heads=2", "max_tp_size=4")
    launcher = tuned(tmp_path / "sweep", *EVERYTHING[:4], *sizes, space=())
    assert {point["tp_size"] for point in launcher.points} == {2}
    (reason,) = set(record(tmp_path / "sweep").dropped.values())
    assert reason == "qkv: 2 key-value heads are not divisible by tp_size=4"
    with pytest.raises(UserError, match=r"nothing to search: workload\.tokens=64 is not divisible"):
        tuned(tmp_path / "batch", *EVERYTHING, "layer.micro_batch_size=3", space=())
    with pytest.raises(UserError, match="nothing to search: fc2: 509 inputs are not divisible by tp_size=2"):
        tuned(tmp_path / "odd", *EVERYTHING, "operator=fc2", "model.ffn_hidden_size=509", space=())
