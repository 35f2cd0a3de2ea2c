"""The two commands of the README, one after the other, on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.sweeps import ROOT, SMALL, Launch


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A date's directory with one sweep in it, and what analyze.py printed about it."""
    date = tmp_path_factory.mktemp("multirun") / "2026-01-31"
    sizes = ("workload.tokens=256", "model.hidden_size=512", "model.ffn_hidden_size=1024")
    done = Launch(date / "12-00-00").run(
        "-m", "tp_size=1,2", "operator=fc1,proj", "method=none,bulk,ring_exchange,pipeline", *SMALL, *sizes
    )
    assert done.returncode == 0, done.stderr
    answer = subprocess.run([sys.executable, "analyze.py", str(date)], cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return date, answer.stdout


def frame(date: Path) -> pd.DataFrame:
    return pd.read_parquet(date / "points.parquet")


def test_every_file_is_there(analysed: tuple[Path, str]) -> None:
    date, printed = analysed
    for name in ("summary.txt", "tuning_report.json", "points.csv", "points.parquet"):
        assert (date / name).stat().st_size > 0
        assert name in printed
    for name in ("optimal_tp_comm_overlap_cfg.yaml", "optimal_tp_comm_overlap_cfg_tp2.yaml"):
        given = yaml.safe_load((date / name).read_text())
        assert set(given) <= {"fc1_fprop", "fc1_dgrad", "fc1_wgrad", "proj_fprop", "proj_dgrad"}
    assert not (date / "optimal_tp_comm_overlap_cfg_tp1.yaml").exists()


def test_one_row_per_point_and_phase(analysed: tuple[Path, str]) -> None:
    rows = frame(analysed[0])
    ok = rows[rows["status"] == "ok"]
    assert not ok.duplicated(["point", "phase"]).any()
    assert set(ok[(ok["method"] == "bulk")]["slot"]) == {"fc1_dgrad", "fc1_wgrad"}
    assert set(ok[(ok["method"] == "ring_exchange")]["slot"]) == {"fc1_fprop", "fc1_dgrad", "proj_fprop", "proj_dgrad"}
    assert set(rows[rows["status"] == "skipped"]["method"]) == {"bulk", "ring_exchange", "pipeline"}
    assert ok[["time_us", "none_us", "floor_us", "tp1_us", "operator_e2e_time_us"]].gt(0).all().all()


def test_the_traces_show_what_overlaps_and_what_does_not(analysed: tuple[Path, str]) -> None:
    rows = frame(analysed[0]).query("status == 'ok' and tp_size == 2").set_index(["operator", "method", "phase"])
    plain = rows.loc[("fc1", "none", "dgrad")]
    assert plain["backward_comm_time_us"] > 0
    assert plain["backward_overlap_time_us"] < 0.05 * plain["backward_comm_time_us"]
    for case in (("fc1", "bulk", "dgrad"), ("fc1", "ring_exchange", "fprop"), ("proj", "pipeline", "fprop")):
        row = rows.loc[case]
        pass_name = "forward" if case[2] == "fprop" else "backward"
        assert row[f"{pass_name}_overlap_time_us"] > 0.1 * row[f"{pass_name}_comm_time_us"], case


def test_the_report_scales_from_tp1(analysed: tuple[Path, str]) -> None:
    report = json.loads((analysed[0] / "tuning_report.json").read_text())
    assert report["counts"]["ok"] > 0
    assert set(report["tp_scaling"]["results"]) == {"fc1", "proj"}
    for result in report["tp_scaling"]["results"].values():
        assert result["scaling_ratios"]["1"] == 1.0
        assert set(result["e2e_times"]) == {"1", "2"}


def test_a_sweep_and_a_single_point_can_be_analysed_too(analysed: tuple[Path, str]) -> None:
    sweep = analysed[0] / "12-00-00"
    point = next(path.parent for path in sweep.glob("*tp2_fc1_bulk*/result.json"))
    for directory in (sweep, point):
        command = [sys.executable, "analyze.py", str(directory)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "fc1_dgrad" in done.stdout
