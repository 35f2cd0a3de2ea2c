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
from overlap_sweep.run_directory import read_tuner_record
from tests.analyze import analyze
from tests.search.tiny import QUICK, SIZES
from tests.sweeps import Launch

pytestmark = pytest.mark.end_to_end

Done = subprocess.CompletedProcess[str]
TUNER = ("-m", "+experiment=tp_overlap_tuner", *SIZES, *QUICK)
SPACE = ("operator=fc2", "method=ring_exchange,pipeline", "num_sm=1", "aggregate=false", "num_splits=2")
PRESET = "fc2_fprop: {method: ring_exchange, num_sm: 2}\nfc2_dgrad: {method: ring_exchange, num_sm: 2}\n"
OVERLAP_CFG = "optimal_tp_comm_overlap_cfg_tp2.yaml"
FILES = {
    *("summary.txt", "tuning_report.json", "proof.json", "points.parquet"),
    *(OVERLAP_CFG, "ub_cfgs_tp2.json", "megatron_bridge_preset_tp2.py"),
}


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("presets") / "theirs.yaml"
    path.write_text(PRESET)
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, preset: Path) -> tuple[Launch, Done]:
    # A path as people have them.
    launch = Launch(tmp_path_factory.mktemp("tuned") / "12-00-00")
    done = launch.run(*TUNER, *SPACE, "max_tp_size=2", f"tuner.presets=[{preset}]")
    assert done.returncode == 0, done.stderr
    return launch, done


def content(launch: Launch, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((launch.directory / name).read_text())
    return found


def test_the_whole_layer_is_proven_side_by_side(tuned: tuple[Launch, Done]) -> None:
    launch, _ = tuned
    (trial,) = read_tuner_record(launch.directory / "tuner.json").proofs
    assert list(trial.variants) == ["none", "default", "tuned", "preset theirs"]
    result = launch.results()[trial.point]
    assert (result.status, result.point["tp_size"]) == ("ok", 2), result.error
    assert result.point["workload"] | {"name": "layer", "tokens": 64, "repeats": 3} == result.point["workload"]
    (proof,) = content(launch, "proof.json")["proofs"]
    assert proof["proven"]
    assert {"none", "tuned", "preset theirs", "floor"} <= set(proof["variants"])
    # Plain torch has none.
    assert set(proof["left_out"]) == {"default"}
    assert proof["recommended"] in ("none", "tuned", "preset theirs")


def test_every_file_is_there_and_analysis_says_the_same(tuned: tuple[Launch, Done]) -> None:
    launch, done = tuned
    for name in FILES:
        assert (launch.directory / name).stat().st_size > 0
        assert name in done.stdout
    path = launch.directory / OVERLAP_CFG
    slots = overlap_cfg.read(path).slots
    assert (yaml.safe_load(path.read_text()) or {}) == slots
    compile((launch.directory / "megatron_bridge_preset_tp2.py").read_text(), "preset", "exec")
    (before,) = content(launch, "proof.json")["proofs"]
    assert analyze(launch.directory).returncode == 0
    (after,) = content(launch, "proof.json")["proofs"]
    assert after["verdict"] == before["verdict"]
    assert overlap_cfg.read(path).slots == slots


def test_again_from_python_nothing_is_measured_and_the_answer_is_a_report(
    tuned: tuple[Launch, Done], preset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Over the same directory, where everything is measured already."""
    launch, _ = tuned
    search, proofs = content(launch, "search.json"), content(launch, "proof.json")["proofs"]
    times = {path: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")}
    report = overlap_sweep.tune(
        "qwen3_0_6b",
        max_tp_size=2,
        operators=["fc2"],
        max_token_len=64,
        device="cpu",
        presets=[preset],
        output_dir=launch.directory,
        overrides=[*SIZES, "workload.repeats=3", "profile=none", *SPACE[1:]],
        quiet=True,
    )
    assert isinstance(report, overlap_sweep.Report)
    assert {path: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")} == times
    assert capfd.readouterr().out == ""
    after = content(launch, "search.json")
    assert after["reused"] == after["points"] == search["points"]
    assert after["searches"] == search["searches"]
    assert [proof["variants"] for proof in report.proof.values()] == [proof["variants"] for proof in proofs]
    assert {(entry["tp_size"], entry["slot"]) for entry in report.best} >= {(2, "fc2_fprop"), (2, "fc2_dgrad")}
    assert report.proof[2]["verdict"] in report.recommendations[0]
    assert any("fc2 fwd" in sentence for sentence in report.recommendations)
    assert report.tp_scaling == content(launch, "tuning_report.json")["tp_scaling"]
    frame = report.to_frame()
    assert isinstance(frame, pd.DataFrame)
    assert set(frame["operator"]) == {"fc2"}
    assert report.ub_cfgs(2) == (yaml.safe_load((launch.directory / OVERLAP_CFG).read_text()) or {})
    with pytest.raises(UserError, match="TP=8 was not searched"):
        report.ub_cfgs(8)
    saved = report.save(tmp_path / "results" / "tiny")
    assert {path.name for path in saved} >= {*FILES, "search.json", "tuner.json"}
    assert all(path.parent == tmp_path / "results" / "tiny" and path.stat().st_size for path in saved)
    assert overlap_sweep.Report(tmp_path / "results" / "tiny").best == report.best


def test_from_python_what_went_wrong_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="the tuner ended with 1"):
        overlap_sweep.tune("qwen3_0_6b", max_tp_size=1, device="cpu", output_dir=tmp_path / "tuned")
    assert capfd.readouterr().err == "error: max_tp_size=1 leaves nothing that communicates; give 2 or more.\n"
    assert not (tmp_path / "tuned").exists()
