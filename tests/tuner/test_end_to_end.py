"""+experiment=tp_overlap_tuner as a user runs it, and `tune` over the same directory: real processes on gloo."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import overlap_sweep
from overlap_sweep import overlap_cfg
from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import read_search_record, read_tuner_record
from overlap_sweep.tuner.api import CHECKOUT
from tests.search.tiny import QUICK, SIZES, analyze_py, arguments, assert_one_error, write_config
from tests.sweeps import Launch

pytestmark = pytest.mark.end_to_end

Done = subprocess.CompletedProcess[str]
TUNER = ("-m", "+experiment=tp_overlap_tuner")
SPACE = ("operator=fc1,fc2", "method=ring_exchange,pipeline", "num_sm=1,4", "aggregate=false", "num_splits=2")
PRESET = "fc2_fprop: {method: ring_exchange, num_sm: 2}\nfc2_dgrad: {method: ring_exchange, num_sm: 2}\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("presets") / "theirs.yaml"
    path.write_text(PRESET)
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, model: Path, preset: Path) -> tuple[Launch, Done]:
    # A path as people have them.
    launch = Launch(tmp_path_factory.mktemp("tuned") / "12-00-00")
    done = launch.run(*TUNER, *arguments(model), *SPACE, "max_tp_size=4", f"tuner.presets=[{preset}]")
    assert done.returncode == 0, done.stderr
    return launch, done


def content(launch: Launch, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((launch.directory / name).read_text())
    return found


def tp_sizes(launch: Launch) -> list[int]:
    """Those that were not dropped."""
    return sorted({search.tp_size for search in read_search_record(launch.directory / "search.json").searches})


def test_every_tp_size_is_searched_or_dropped_with_its_reason(tuned: tuple[Launch, Done], model: Path) -> None:
    launch, done = tuned
    record = read_tuner_record(launch.directory / "tuner.json")
    dropped = {what: why for what, why in record.dropped.items() if what == f"{model} TP=4"}
    assert tp_sizes(launch) == ([2] if dropped else [2, 4])
    assert record.dropped == dropped
    for why in dropped.values():
        assert why.startswith("even with all communication hidden it would take ")
        assert f"{model} TP=4 is not searched: {why}" in done.stdout
    # Its operators were measured without overlap in any case.
    assert {result.point["tp_size"] for result in launch.results().values()} == {2, 4}


def test_every_search_says_why_it_ended(tuned: tuple[Launch, Done]) -> None:
    record = read_search_record(tuned[0].directory / "search.json")
    assert {(one.operator, one.pass_name) for one in record.searches} == {
        (operator, pass_name) for operator in ("fc1", "fc2") for pass_name in ("fwd", "bwd")
    }
    for one in record.searches:
        assert one.stopped.startswith("nothing left that could be faster than ")
        assert one.time_us is not None
        assert one.none_us is not None
        assert one.time_us <= one.none_us
        assert len(one.tried) <= one.exhaustive


def test_the_whole_layer_is_proven_side_by_side(tuned: tuple[Launch, Done]) -> None:
    launch, _ = tuned
    proofs = {proof["tp_size"]: proof for proof in content(launch, "proof.json")["proofs"]}
    record = read_tuner_record(launch.directory / "tuner.json")
    assert sorted(trial.tp_size for trial in record.proofs) == tp_sizes(launch)
    for trial in record.proofs:
        assert list(trial.variants) == ["none", "default", "tuned", "preset theirs"]
        result = launch.results()[trial.point]
        assert result.status == "ok", result.error
        assert result.point["workload"] | {"name": "layer", "tokens": 64, "repeats": 3} == result.point["workload"]
        proof = proofs[trial.tp_size]
        assert proof["proven"]
        assert {"none", "tuned", "preset theirs", "floor"} <= set(proof["variants"])
        # Plain torch has none.
        assert set(proof["left_out"]) == {"default"}
        assert proof["recommended"] in ("none", "tuned", "preset theirs")
    assert set(proofs) == {2, 4}


def test_every_file_is_there_and_can_be_read(tuned: tuple[Launch, Done]) -> None:
    launch, done = tuned
    names = ["summary.txt", "tuning_report.json", "proof.json", "points.csv", "points.parquet", "layers.csv"]
    for tp_size in tp_sizes(launch):
        path = launch.directory / f"optimal_tp_comm_overlap_cfg_tp{tp_size}.yaml"
        slots = yaml.safe_load(path.read_text()) or {}
        assert overlap_cfg.read(path).slots == slots
        ub_cfgs = content(launch, f"ub_cfgs_tp{tp_size}.json")
        assert isinstance(ub_cfgs, dict)
        compile((launch.directory / f"megatron_bridge_preset_tp{tp_size}.py").read_text(), "preset", "exec")
        names += [path.name, f"ub_cfgs_tp{tp_size}.json", f"megatron_bridge_preset_tp{tp_size}.py"]
    for name in names:
        assert (launch.directory / name).stat().st_size > 0
        assert name in done.stdout
    assert "TP=2" in (launch.directory / "summary.txt").read_text()
    assert content(launch, "tuning_report.json")["best"]


def test_analysis_says_the_same(tuned: tuple[Launch, Done]) -> None:
    launch, _ = tuned
    before = content(launch, "proof.json")["proofs"]
    slots = {path.name: yaml.safe_load(path.read_text()) for path in launch.directory.glob("optimal*.yaml")}
    answer = analyze_py(launch.directory)
    assert answer.returncode == 0, answer.stderr
    verdicts = [proof["verdict"] for proof in content(launch, "proof.json")["proofs"]]
    assert verdicts == [proof["verdict"] for proof in before]
    assert {path.name: yaml.safe_load(path.read_text()) for path in launch.directory.glob("optimal*.yaml")} == slots


def test_again_from_python_nothing_is_measured_and_the_answer_is_a_report(
    tuned: tuple[Launch, Done], model: Path, preset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Over the same directory, where everything is measured already."""
    launch, _ = tuned
    search, proofs = content(launch, "search.json"), content(launch, "proof.json")["proofs"]
    times = {path: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")}
    report = overlap_sweep.tune(
        str(model),
        max_tp_size=4,
        operators=["fc1", "fc2"],
        max_token_len=64,
        device="cpu",
        presets=[preset],
        output_dir=launch.directory,
        overrides=["workload.repeats=3", "profile=none", *SPACE[1:]],
        quiet=True,
    )
    assert isinstance(report, overlap_sweep.Report)
    assert {path: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")} == times
    assert capfd.readouterr().out == ""
    after = content(launch, "search.json")
    assert after["reused"] == after["points"] == search["points"]
    assert after["searches"] == search["searches"]
    assert [proof["variants"] for proof in report.proof.values()] == [proof["variants"] for proof in proofs]
    assert {(entry["tp_size"], entry["slot"]) for entry in report.best} >= {(2, "fc1_fprop"), (2, "fc2_dgrad")}
    assert set(report.proof) == {2, 4}
    assert report.proof[2]["verdict"] in report.recommendations[0]
    assert any("fc1 fwd" in sentence for sentence in report.recommendations)
    assert report.tp_scaling == content(launch, "tuning_report.json")["tp_scaling"]
    frame = report.to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert set(frame["operator"]) == {"fc1", "fc2"}
    written = yaml.safe_load((launch.directory / "optimal_tp_comm_overlap_cfg_tp2.yaml").read_text()) or {}
    assert report.ub_cfgs(2) == written
    with pytest.raises(UserError, match="TP=8 was not searched"):
        report.ub_cfgs(8)
    saved = report.save(tmp_path / "results" / "tiny")
    assert {path.name for path in saved} >= {
        *("summary.txt", "proof.json", "search.json", "tuner.json", "tuning_report.json", "points.parquet"),
        *("optimal_tp_comm_overlap_cfg_tp2.yaml", "megatron_bridge_preset_tp2.py", "ub_cfgs_tp2.json"),
    }
    assert all(path.parent == tmp_path / "results" / "tiny" and path.stat().st_size for path in saved)
    assert overlap_sweep.Report(tmp_path / "results" / "tiny").best == report.best


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("tuner.presets=[/nowhere/theirs.yaml]",), "/nowhere/theirs.yaml cannot be read"),
        (("max_tp_size=1",), "max_tp_size=1 leaves nothing that communicates; give 2 or more."),
        (("operator=fc2", "method=bulk"), "there is nothing to search"),
    ],
)
def test_what_cannot_be_tuned_is_one_line_and_starts_nothing(tmp_path: Path, wrong: tuple[str, ...], says: str) -> None:
    done = Launch(tmp_path).run(*TUNER, *SIZES, *QUICK, *wrong)
    assert_one_error(done, says)
    assert list(tmp_path.iterdir()) == []


def test_from_python_what_went_wrong_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="the tuner ended with 1; its message is above"):
        overlap_sweep.tune("qwen3_0_6b", max_tp_size=1, device="cpu", output_dir=tmp_path / "tuned")
    assert capfd.readouterr().err == "error: max_tp_size=1 leaves nothing that communicates; give 2 or more.\n"


def test_a_directory_without_a_report_is_an_error(tmp_path: Path) -> None:
    report = overlap_sweep.Report(tmp_path)
    with pytest.raises(UserError, match=r"holds no tuning_report\.json"):
        report.best  # noqa: B018
    assert report.proof == {}


class Command:
    """In place of launch.py: keeps what it was asked to do."""

    def __init__(self, returncode: int = 0) -> None:
        self.returncode, self.arguments = returncode, list[str]()

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == [str(CHECKOUT / "launch.py"), *TUNER]
        self.arguments = command[4:]
        return subprocess.CompletedProcess(command, self.returncode)


def test_every_argument_is_one_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command()
    monkeypatch.setattr("overlap_sweep.tuner.api.subprocess.run", command)
    report = overlap_sweep.tune(
        "llama3_8b",
        tp_size=[2, 4],
        max_token_len=4096,
        operators=["fc1", "qkv"],
        methods=["bulk"],
        min_num_sm=2,
        max_num_sm=16,
        max_points=50,
        max_minutes=2.5,
        precision="fp8_delayed",
        backend="torch",
        presets=["a b.yaml", Path("c_tp{tp}.yaml")],
        prove=False,
        overlap_threshold=0.6,
        tp_scaling_tolerance=0.1,
        output_dir="out/here",
        overrides=["profile=none"],
    )
    assert report.directory == Path("out/here")
    assert command.arguments == [
        "model=llama3_8b",
        "max_tp_size=8",
        "tuner.prove=false",
        "tp_size=2,4",
        "operator=fc1,qkv",
        "method=bulk",
        "workload.tokens=4096",
        "search.min_num_sm=2",
        "search.max_num_sm=16",
        "search.max_points=50",
        "search.max_minutes=2.5",
        "precision=fp8_delayed",
        "backend=torch",
        "tuner.overlap_threshold=0.6",
        "tuner.tp_scaling_tolerance=0.1",
        'tuner.presets=["a b.yaml","c_tp{tp}.yaml"]',
        'hydra.sweep.dir="out/here"',
        "profile=none",
    ]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen3_0_6b", ["model=qwen3_0_6b"]),
        ("Qwen/Qwen3-0.6B", ["model=hf", 'model.name="Qwen/Qwen3-0.6B"']),
        ("/my models, (é)/config.json", ["model=hf", 'model.name="/my models, (é)/config.json"']),
    ],
)
def test_a_model_is_one_of_ours_or_of_hugging_face(
    monkeypatch: pytest.MonkeyPatch, model: str, said: list[str]
) -> None:
    command = Command()
    monkeypatch.setattr("overlap_sweep.tuner.api.subprocess.run", command)
    report = overlap_sweep.tune(model, tp_size=4)
    assert command.arguments[: len(said)] == said
    assert "tp_size=4" in command.arguments
    # What is left open is the experiment's to say.
    assert command.arguments[len(said) :] == [
        *("max_tp_size=8", "tuner.prove=true", "tp_size=4", f'hydra.sweep.dir="{report.directory}"')
    ]
    assert report.directory.parts[0] == "multirun"


def test_what_is_exported_is_offered() -> None:
    assert set(overlap_sweep.__all__) == {"Report", "tune"}
    with pytest.raises(AttributeError, match="no attribute tuner_of_pianos"):
        overlap_sweep.tuner_of_pianos  # noqa: B018
