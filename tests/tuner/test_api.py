"""`tune` and its report: how the command line is made of arguments, and a whole run of it in real processes on gloo."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import overlap_sweep
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.results.records import TunerRecord
from overlap_sweep.results.run_directory import read_result
from overlap_sweep.tuner import EXPERIMENT
from tests.analyze import analyze
from tests.search.tiny import SIZES


def test_a_directory_without_a_report_is_an_error(tmp_path: Path) -> None:
    report = overlap_sweep.Report(tmp_path)
    with pytest.raises(UserError, match=r"holds no tuning_report\.json"):
        report.best  # noqa: B018
    with pytest.raises(UserError):
        report.proof  # noqa: B018


def test_the_report_of_a_directory_without_operators_is_empty(tmp_path: Path) -> None:
    (tmp_path / "tuning_report.json").write_text('{"kernels": []}')
    report = overlap_sweep.Report(tmp_path)
    assert (report.best, report.recommendations, report.proof, report.unmeasured_slots) == ([], [], {}, [])
    assert report.tp_scaling is None


def test_answers_come_before_what_could_not_be_proven(tmp_path: Path) -> None:
    recommended = [{"recommendation": "fc1 fwd: use ring_agg0"}]
    proofs = [
        {"tp_size": 2, "point": "layer", "proven": False, "verdict": "not proven on the whole layer: it was skipped."},
        {"tp_size": 4, "point": "layer", "proven": True, "verdict": "tuned is 4% faster than none: use tuned."},
    ]
    whole = {"recommendations": recommended, "proof": proofs}
    (tmp_path / "tuning_report.json").write_text(json.dumps(whole))
    *answers, last = overlap_sweep.Report(tmp_path).recommendations
    assert answers == ["TP=4: tuned is 4% faster than none: use tuned.", "fc1 fwd: use ring_agg0"]
    assert last == "TP=2: not proven on the whole layer: it was skipped."


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What launch.py was asked to do, which is not run."""
    found: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:6] == ["-m", "overlap_sweep", "launch", "-m", EXPERIMENT]
        found.extend(command[6:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("overlap_sweep.tuner.subprocess.run", run)
    return found


def test_every_argument_is_one_of_the_command_line(arguments: list[str]) -> None:
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
    assert arguments == [
        *("model=llama3_8b", "max_tp_size=8", "tuner.prove=false", "tp_size=2,4", "operator=fc1,qkv", "method=bulk"),
        *("workload.tokens=4096", "search.min_num_sm=2", "search.max_num_sm=16", "search.max_points=50"),
        *("search.max_minutes=2.5", 'precision="fp8_delayed"', 'backend="torch"', "tuner.overlap_threshold=0.6"),
        *("tuner.tp_scaling_tolerance=0.1", 'tuner.presets=["a b.yaml","c_tp{tp}.yaml"]'),
        *('hydra.sweep.dir="out/here"', "profile=none"),
    ]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen3_0_6b", ["model=qwen3_0_6b"]),
        ("Qwen/Qwen3-0.6B", ["model=hf", 'model.name="Qwen/Qwen3-0.6B"']),
        ("/my models, (é)/config.json", ["model=hf", 'model.name="/my models, (é)/config.json"']),
    ],
)
def test_a_model_is_one_of_ours_or_of_hugging_face(arguments: list[str], model: str, said: list[str]) -> None:
    report = overlap_sweep.tune(model, tp_size=4)
    # What is left open is the experiment's to say.
    where = f'hydra.sweep.dir="{report.directory}"'
    assert arguments == [*said, "max_tp_size=8", "tuner.prove=true", "tp_size=4", where]
    assert report.directory.parts[0] == "multirun"


def test_what_is_exported_is_offered() -> None:
    assert set(overlap_sweep.__all__) == {"Report", "tune"}
    with pytest.raises(AttributeError, match="no attribute tuner_of_pianos"):
        overlap_sweep.tuner_of_pianos  # noqa: B018


@pytest.mark.end_to_end
def test_a_model_is_tuned_and_the_answer_is_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # A path as people have them.
    directory = tmp_path / "tuned" / "12-00-00"
    preset = tmp_path / "theirs.yaml"
    preset.write_text("fc2_fprop: {method: ring_exchange, num_sm: 2}\nfc2_dgrad: {method: ring_exchange, num_sm: 2}\n")
    space = ("method=ring_exchange,pipeline", "num_sm=1", "aggregate=false", "num_splits=2")
    report = overlap_sweep.tune(
        "qwen3_0_6b",
        max_tp_size=2,
        operators=["fc2"],
        max_token_len=64,
        device="cpu",
        presets=[preset],
        output_dir=directory,
        overrides=[*SIZES, "workload.repeats=3", "profile=none", *space],
        quiet=True,
    )
    assert capfd.readouterr().out == ""
    # The whole layer is proven side by side.
    (trial,) = TunerRecord.read(directory / "tuner.json").proofs
    assert list(trial.variants) == ["none", "default", "tuned", "preset theirs"]
    result = read_result(directory / trial.point / "result.json")
    assert (result.status, result.point["tp_size"]) == ("ok", 2), result.error
    assert result.point["workload"] | {"name": "layer", "tokens": 64, "repeats": 3} == result.point["workload"]
    proof = report.proof[2]
    assert proof["proven"]
    assert {"none", "tuned", "preset theirs", "floor"} <= set(proof["variants"])
    # Plain torch has none.
    assert "default" not in proof["variants"]
    assert proof["recommended"] in ("none", "tuned", "preset theirs")
    # The report says what the files say.
    assert {(entry["tp_size"], entry["slot"]) for entry in report.best} >= {(2, "fc2_fprop"), (2, "fc2_dgrad")}
    assert proof["verdict"] in report.recommendations[0]
    assert any("fc2 fwd" in sentence for sentence in report.recommendations)
    assert report.tp_scaling == json.loads((directory / "tuning_report.json").read_text())["tp_scaling"]
    assert set(report.to_frame()["operator"]) == {"fc2"}
    slots = yaml.safe_load((directory / "optimal_tp_comm_overlap_cfg_tp2.yaml").read_text()) or {}
    config = overlap_cfg.read(directory / "optimal_tp_comm_overlap_cfg_tp2.yaml")
    assert report.ub_cfgs(2) == (slots if config.switches["tp_comm_overlap"] else None)
    with pytest.raises(UserError, match="TP=8 was not searched"):
        report.ub_cfgs(8)
    saved = report.save(tmp_path / "results" / "tiny")
    files = {"summary.txt", "tuning_report.json", "points.parquet", "search.json", "tuner.json"}
    files |= {"optimal_tp_comm_overlap_cfg_tp2.yaml", "ub_cfgs_tp2.json", "megatron_bridge_preset_tp2.py"}
    assert {path.name for path in saved} >= files
    assert all(path.parent == tmp_path / "results" / "tiny" and path.stat().st_size for path in saved)
    assert (directory / "report.html").stat().st_size > 0
    compile((directory / "megatron_bridge_preset_tp2.py").read_text(), "preset", "exec")
    assert overlap_sweep.Report(tmp_path / "results" / "tiny").best == report.best
    # Analysis says the same.
    assert analyze(directory).returncode == 0
    after = overlap_sweep.Report(directory)
    assert (after.proof[2]["verdict"], after.ub_cfgs(2)) == (proof["verdict"], report.ub_cfgs(2))


@pytest.mark.end_to_end
def test_what_went_wrong_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="the tuner ended with 1"):
        overlap_sweep.tune("qwen3_0_6b", max_tp_size=1, device="cpu", output_dir=tmp_path / "tuned")
    assert capfd.readouterr().err == "error: max_tp_size=1 leaves nothing that communicates; give 2 or more.\n"
    assert not (tmp_path / "tuned").exists()
