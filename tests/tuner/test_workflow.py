"""The tuner from the first point to the last file, with a launcher that makes the results up."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from overlap_sweep import overlap_cfg
from overlap_sweep.errors import UserError
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.run_directory import Result, TunerRecord, read_tuner_record
from overlap_sweep.search.measured import override_value
from overlap_sweep.tuner import workflow
from overlap_sweep.tuner.workflow import tune
from tests.search.stand_in import ON_CPU, Answer, Settings, StandIn, operator_result, results, sweep_of
from tests.tuner.layers import layer_result

SPACE = ("operator=fc1,fc2", "method=ring_exchange,pipeline", "num_sm=4,8", "num_splits=2", "aggregate=false")
"""With max_tp_size=4: TP=2 and 4."""


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


def tuned(directory: Path, *overrides: str, answer: Answer | None = None, space: tuple[str, ...] = SPACE) -> StandIn:
    """Run to the end."""
    given = ("+experiment=tp_overlap_tuner", *ON_CPU)
    more = [override for override in overrides if not override.startswith("tp_size=")]
    with sweep_of(directory, *given, *more, answer=answer or answered()) as launcher:
        tune(launcher.config, launcher.context, launcher, {}, [*given, *space, *overrides])
        return launcher


def record(directory: Path) -> TunerRecord:
    return read_tuner_record(directory / "tuner.json")


def proofs(directory: Path) -> dict[int, dict[str, Any]]:
    return {proof["tp_size"]: proof for proof in json.loads((directory / "proof.json").read_text())["proofs"]}


def layers(launcher: StandIn) -> list[dict[str, Any]]:
    return [point for point in launcher.points if point["workload"]["name"] == "layer"]


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One file per TP size."""
    directory = tmp_path_factory.mktemp("presets")
    for tp_size in (2, 4):
        (directory / f"theirs_tp{tp_size}.yaml").write_text("fc1_fprop: {method: ring_exchange, num_sm: 4}\n")
    return str(directory / "theirs_tp{tp}.yaml")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, preset: str) -> tuple[Path, StandIn, str]:
    """Both TP sizes, and what was printed."""
    directory = tmp_path_factory.mktemp("tuned")
    with redirect_stdout(io.StringIO()) as printed:
        launcher = tuned(directory, "max_tp_size=4", f"tuner.presets={override_value([preset])}")
    return directory, launcher, printed.getvalue()


def test_one_tp_size_after_the_other_is_searched_and_proven(done: tuple[Path, StandIn, str]) -> None:
    _, launcher, _ = done
    steps = [(point["tp_size"], point["workload"]["name"]) for point in launcher.points]
    assert [step for step, before in zip(steps, [None, *steps], strict=False) if step != before] == [
        *((2, "operator"), (2, "layer"), (4, "operator"), (4, "layer"))
    ]
    assert len(layers(launcher)) == 4


def test_the_record_says_what_belongs_to_what(done: tuple[Path, StandIn, str]) -> None:
    directory, launcher, _ = done
    found = record(directory)
    assert found.points == len(launcher.points) - 4
    assert found.dropped == {}
    assert 0.0 < found.search_s <= found.wall_s
    assert [trial.tp_size for trial in found.together] == [trial.tp_size for trial in found.proofs] == [2, 4]
    written = results(directory)
    for trial in (*found.together, *found.proofs):
        result = written[trial.point]
        assert result.point["tp_size"] == trial.tp_size
        # What the backend cannot do is asked for all the same: the layer says why it was not measured.
        assert set(trial.variants.values()) == set(result.point["layer"]["variants"])
    proof = found.proofs[0].variants
    assert list(proof) == ["none", "default", "tuned", "preset theirs_tp2"]
    assert found.together[0].variants["none"] == "none"
    assert list(found.together[0].variants)[1] == "best of each slot"


def test_the_combination_that_is_fastest_on_the_layer_is_proven(done: tuple[Path, StandIn, str]) -> None:
    directory, _, _ = done
    for trial in record(directory).proofs:
        config = overlap_cfg.read(Path(trial.variants["tuned"].removeprefix("file:")))
        # Alone, ring exchange is faster there.
        assert config.slots["fc2_fprop"]["method"] == "pipeline"
        assert config.slots["fc2_dgrad"] == {"method": "ring_exchange", "num_sm": 8, "aggregate": False}
    for proof in proofs(directory).values():
        assert proof["proven"]
        assert proof["recommended"] == "tuned"
        assert set(proof["variants"]) >= {"none", "tuned", "floor"}
        assert proof["variants"]["tuned"]["to_reference"]["ratio"] < 1.0
        assert "default" in proof["left_out"]


def test_presets_are_proven_against(done: tuple[Path, StandIn, str]) -> None:
    for tp_size, proof in proofs(done[0]).items():
        assert f"preset theirs_tp{tp_size}" in proof["variants"]


def test_all_files_are_there(done: tuple[Path, StandIn, str]) -> None:
    directory, _, printed = done
    for name in ("summary.txt", "tuning_report.json", "proof.json", "points.parquet", "points.csv"):
        assert (directory / name).stat().st_size > 0
        assert name in printed
    for tp_size in (2, 4):
        path = directory / f"optimal_tp_comm_overlap_cfg_tp{tp_size}.yaml"
        config = overlap_cfg.read(path)
        assert yaml.safe_load(path.read_text()) == config.slots
        assert config.slots["fc2_fprop"] == {"method": "pipeline", "num_sm": 8, "num_splits": 2}
        assert json.loads((directory / f"ub_cfgs_tp{tp_size}.json").read_text())
        compile((directory / f"megatron_bridge_preset_tp{tp_size}.py").read_text(), "preset", "exec")


def test_again_nothing_is_measured_and_the_answer_is_the_same(
    done: tuple[Path, StandIn, str], preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, launcher, _ = done
    before, search = proofs(directory), json.loads((directory / "search.json").read_text())
    again = tuned(directory, "max_tp_size=4", f"tuner.presets={override_value([preset])}")
    assert again.points == []
    after = json.loads((directory / "search.json").read_text())
    assert after["searches"] == search["searches"]
    assert after["reused"] == after["points"] == len(launcher.points) - 4
    assert f"{after['points']} points, {after['points']} of them measured before" in capsys.readouterr().out
    for tp_size, proof in proofs(directory).items():
        assert proof["variants"] == before[tp_size]["variants"]


def test_a_new_preset_needs_no_new_search(done: tuple[Path, StandIn, str], tmp_path: Path) -> None:
    directory = shutil.copytree(done[0], tmp_path / "copy")
    again = tuned(directory, "tp_size=2", "tuner.presets=null")
    # The files of the combinations lie elsewhere now, so that both layers are new.
    assert [point["workload"]["name"] for point in again.points] == ["layer", "layer"]
    (proof,) = [trial for trial in record(directory).proofs if trial.tp_size == 2]
    assert list(proof.variants) == ["none", "default", "tuned"]


def floors(point: Mapping[str, Any]) -> Result:
    """At TP=4 the GEMMs alone take as long as at TP=2: tp1_us grows with the TP size in the stand-in."""
    result = answered()(point)
    if point["tp_size"] == 4:
        for times in result.times.values():
            times.floor.median_us *= 2.5
    return result


@pytest.mark.parametrize("drop", [True, False])
def test_a_tp_size_that_cannot_scale_is_dropped_with_the_reason(
    tmp_path: Path, drop: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    space = ("operator=fc2", *SPACE[1:])
    limits = ("max_tp_size=4", "tuner.prove=false", f"tuner.drop_tp_sizes={str(drop).lower()}")
    launcher = tuned(tmp_path, *limits, answer=floors, space=space)
    at_4 = [point for point in launcher.points if point["tp_size"] == 4]
    search = json.loads((tmp_path / "search.json").read_text())
    if not drop:
        assert len(at_4) > 1
        assert record(tmp_path).dropped == search["dropped"] == {}
        return
    # One baseline is what it takes to know.
    assert len(at_4) == 1
    (label,) = record(tmp_path).dropped
    assert label == "qwen3_0_6b TP=4"
    assert record(tmp_path).dropped[label].startswith("even with all communication hidden it would take 2.50 times")
    assert search["dropped"] == record(tmp_path).dropped
    assert f"{label} is not searched: even with all communication hidden" in capsys.readouterr().out
    assert {one["tp_size"] for one in search["searches"]} == {2}


def test_the_smallest_tp_size_is_never_dropped(tmp_path: Path) -> None:
    launcher = tuned(tmp_path, "tp_size=4", "tuner.prove=false", answer=floors, space=("operator=fc2", *SPACE[1:]))
    assert len(launcher.points) > 1
    assert record(tmp_path).dropped == {}


def test_without_a_proof_no_layer_is_run(tmp_path: Path) -> None:
    launcher = tuned(tmp_path, "tp_size=2", "tuner.prove=false", space=("operator=fc2", *SPACE[1:]))
    assert layers(launcher) == []
    assert (record(tmp_path).together, record(tmp_path).proofs) == ([], [])
    assert overlap_cfg.read(tmp_path / "optimal_tp_comm_overlap_cfg_tp2.yaml").slots


@pytest.mark.parametrize(("together", "tried"), [(0, None), (1, None), (2, 2), (9, 4)])
def test_as_many_combinations_as_asked_for_are_tried_together(tmp_path: Path, together: int, tried: int | None) -> None:
    launcher = tuned(tmp_path, "tp_size=2", f"tuner.together={together}", space=("operator=fc2", *SPACE[1:]))
    if tried is None:
        assert record(tmp_path).together == []
        assert len(layers(launcher)) == 1
    else:
        (trial,) = record(tmp_path).together
        assert len(trial.variants) == 1 + tried
    (proof,) = record(tmp_path).proofs
    best = overlap_cfg.read(Path(proof.variants["tuned"].removeprefix("file:"))).slots["fc2_fprop"]["method"]
    assert best == ("pipeline" if tried else "ring_exchange")


def test_where_no_overlap_is_best_that_is_proven(tmp_path: Path) -> None:
    """Plain torch has no default overlap, so that there is nothing to run beside `none` but the floor."""
    slow = answered(of_operator=lambda pass_name, settings: 1.5)
    launcher = tuned(tmp_path, "tp_size=2", answer=slow, space=("operator=fc2", *SPACE[1:]))
    (layer,) = layers(launcher)
    assert layer["layer"]["variants"] == ["none"]
    (trial,) = record(tmp_path).proofs
    assert trial.variants == {"none": "none", "default": "default", "tuned": "none"}
    proof = proofs(tmp_path)[2]
    assert proof["proven"]
    assert proof["verdict"] == "no overlap that was found pays: don't overlap."
    assert overlap_cfg.read(tmp_path / "optimal_tp_comm_overlap_cfg_tp2.yaml").switches["tp_comm_overlap"] is False


def test_where_no_overlap_is_best_presets_are_run_all_the_same(tmp_path: Path, preset: str) -> None:
    slow = answered(of_operator=lambda pass_name, settings: 1.5, of_layer=lambda config: 1.2)
    tuned(
        tmp_path,
        "tp_size=2",
        f"tuner.presets={override_value([preset])}",
        answer=slow,
        space=("operator=fc2", *SPACE[1:]),
    )
    assert "preset theirs_tp2" in proofs(tmp_path)[2]["variants"]
    assert proofs(tmp_path)[2]["recommended"] == "none"


def test_where_nothing_can_be_measured_the_tuner_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def out_of_memory(point: Mapping[str, Any]) -> Result:
        return operator_result(point, status="failed", times={}, error="out of memory\nmore")

    launcher = tuned(tmp_path, "tp_size=2", answer=out_of_memory)
    assert layers(launcher) == []
    assert record(tmp_path).dropped == {
        f"qwen3_0_6b TP=2 {operator}": "it cannot be measured without overlap: out of memory"
        for operator in ("fc1", "fc2")
    }
    assert "out of memory" in capsys.readouterr().out


def test_times_that_say_nothing_prove_nothing(tmp_path: Path) -> None:
    """All points are launch-bound."""
    launcher = tuned(tmp_path, "tp_size=2", answer=answered(launch_bound=True), space=("operator=fc2", *SPACE[1:]))
    assert layers(launcher) == []
    assert record(tmp_path).proofs == []
    assert "Launch-bound, left out of the choice" in (tmp_path / "summary.txt").read_text()


def test_a_layer_that_fails_leaves_the_operators_answer(tmp_path: Path) -> None:
    def no_layers(point: Mapping[str, Any]) -> Result:
        if point["workload"]["name"] == "layer":
            return Result(name="", point=dict(point), status="failed", error="out of memory\nmore")
        return answered()(point)

    tuned(tmp_path, "tp_size=2", answer=no_layers, space=("operator=fc2", *SPACE[1:]))
    proof = proofs(tmp_path)[2]
    assert not proof["proven"]
    assert "out of memory" in proof["verdict"]
    slots = overlap_cfg.read(tmp_path / "optimal_tp_comm_overlap_cfg_tp2.yaml").slots
    assert slots["fc2_fprop"]["method"] == "ring_exchange"


def test_a_budget_ends_the_search_not_the_proof(tmp_path: Path) -> None:
    launcher = tuned(tmp_path, "tp_size=2", "search.max_points=2", space=("operator=fc2", *SPACE[1:]))
    assert len(launcher.points) - len(layers(launcher)) == 2
    assert record(tmp_path).points == 2
    assert len(record(tmp_path).proofs) == 1


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("max_tp_size=1",), "max_tp_size=1 leaves nothing that communicates"),
        (("tuner.presets=[/nowhere.yaml]",), "/nowhere.yaml cannot be read"),
        (("method=bulk", "operator=fc2"), "there is nothing to search"),
        (("num_sm=0",), "num_sm=0 is out of range"),
    ],
)
def test_what_cannot_be_tuned_is_said_before_anything_is_launched(
    tmp_path: Path, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UserError) as raised:
        tuned(tmp_path / "sweep", *overrides)
    assert says in str(raised.value)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("device", "gpus", "sizes", "notice"),
    [
        ("cpu", 0, ["2", "4", "8"], None),
        ("auto", 0, ["2", "4", "8"], None),
        ("auto", 4, ["2", "4"], "TP=8 left out: 4 GPUs are visible"),
        ("cuda", 8, ["2", "4", "8"], None),
    ],
)
def test_tp_sizes_follow_the_machine(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, sizes: list[str], notice: str | None
) -> None:
    monkeypatch.setattr(workflow, "visible_gpus", lambda: gpus)
    config = OmegaConf.create({"runtime": {"device": device}, "max_tp_size": 8})
    assert workflow._with_tp_sizes({"operator": ["fc1"]}, config) == (
        {"operator": ["fc1"], "tp_size": sizes},
        notice,
    )
    # Those that were named are searched, whatever the machine: a point says what it lacks.
    assert workflow._with_tp_sizes({"tp_size": ["8"]}, config) == ({"tp_size": ["8"]}, None)
