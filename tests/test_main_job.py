"""The two commands of the README, one after the other, on real processes."""

import json
from pathlib import Path

import pandas as pd
import pytest
import yaml

from overlap_sweep.trace import TraceRow
from tests.analyze import analyze
from tests.sweeps import SMALL, Launch
from tests.trace.conftest import analyse_trace


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A date's directory with one sweep in it, and what analyze.py printed about it."""
    date = tmp_path_factory.mktemp("multirun") / "2026-01-31"
    sizes = ("workload.tokens=256", "model.hidden_size=512", "model.ffn_hidden_size=1024", "workload.profiled=5")
    done = Launch(date / "12-00-00").run(
        "-m", "tp_size=1,2", "operator=fc1,proj", "method=none,bulk,ring_exchange,pipeline", *SMALL, *sizes
    )
    assert done.returncode == 0, done.stderr
    answer = analyze(date)
    assert answer.returncode == 0, answer.stderr
    return date, answer.stdout


def test_every_file_is_there_and_the_report_scales_from_tp1(analysed: tuple[Path, str]) -> None:
    date, printed = analysed
    for name in ("summary.txt", "tuning_report.json", "points.csv", "points.parquet"):
        assert (date / name).stat().st_size > 0
        assert name in printed
    for name in ("optimal_tp_comm_overlap_cfg.yaml", "optimal_tp_comm_overlap_cfg_tp2.yaml"):
        given = yaml.safe_load((date / name).read_text())
        assert set(given) <= {"fc1_fprop", "fc1_dgrad", "fc1_wgrad", "proj_fprop", "proj_dgrad"}
    assert not (date / "optimal_tp_comm_overlap_cfg_tp1.yaml").exists()
    report = json.loads((date / "tuning_report.json").read_text())
    assert report["counts"]["ok"] > 0
    assert report["cases"][0]["sizes"]["num_layers"] == 28
    assert set(report["tp_scaling"]["results"]) == {"fc1", "proj"}
    for result in report["tp_scaling"]["results"].values():
        assert (result["scaling_ratios"]["1"], set(result["e2e_times"])) == (1.0, {"1", "2"})


def test_one_row_per_point_and_phase(analysed: tuple[Path, str]) -> None:
    rows = pd.read_parquet(analysed[0] / "points.parquet")
    ok = rows[rows["status"] == "ok"]
    assert not ok.duplicated(["point", "phase"]).any()
    assert set(ok[(ok["method"] == "bulk")]["slot"]) == {"fc1_dgrad", "fc1_wgrad"}
    assert set(ok[(ok["method"] == "ring_exchange")]["slot"]) == {"fc1_fprop", "fc1_dgrad", "proj_fprop", "proj_dgrad"}
    assert set(rows[rows["status"] == "skipped"]["method"]) == {"bulk", "ring_exchange", "pipeline"}
    assert ok[["time_us", "none_us", "floor_us", "tp1_us", "total_span_us"]].gt(0).all().all()


def trace_rows(date: Path, point: str, phase: str) -> list[TraceRow]:
    """Of both ranks and all profiled repeats."""
    (directory,) = date.glob(f"12-00-00/*{point}*")
    rows = [row for trace in sorted(directory.glob("trace_rank*")) for row in analyse_trace(trace)]
    assert {row.rank for row in rows} == {0, 1}
    of_phase = [row for row in rows if row.phase == phase]
    assert len(of_phase) == 10
    return of_phase


# GEMMs and transfers: an all-gather forward, another one and a reduce-scatter backward, which bulk cuts in four.
EVENTS = {
    "tp2_fc1_none": {"fwd": (1, 1), "bwd": (2, 2), "all": (3, 3)},
    "tp2_fc1_bulk": {"fwd": (1, 1), "bwd": (2, 8), "all": (3, 9)},
}


@pytest.mark.parametrize("phase", ["fwd", "bwd", "all"])
@pytest.mark.parametrize("point", EVENTS)
def test_the_traces_hold_every_gemm_and_transfer(analysed: tuple[Path, str], point: str, phase: str) -> None:
    for row in trace_rows(analysed[0], point, phase):
        assert (row.num_gemm_events, row.num_comm_events) == EVENTS[point][phase]
        assert 0 <= row.overlap_us <= min(row.gemm_us, row.comm_us)
        assert row.overlap_us + row.exposed_comm_us <= row.comm_us + 1e-6
        assert row.comm_us < row.span_us


@pytest.mark.parametrize(
    ("point", "phase", "overlaps"),
    [
        *(("tp2_fc1_bulk", "bwd", True), ("tp2_fc1_ring", "fwd", True), ("tp2_fc1_pipeline", "bwd", True)),
        *(("tp2_proj_pipeline", "fwd", True), ("tp2_proj_ring", "bwd", True)),
        *((f"tp2_{operator}_none", phase, False) for operator in ("fc1", "proj") for phase in ("fwd", "bwd", "all")),
    ],
)
def test_the_traces_show_what_overlaps_and_what_does_not(
    analysed: tuple[Path, str], point: str, phase: str, overlaps: bool
) -> None:
    """Overlapped over all communication, summed over ranks and iterations: single ones depend on the scheduler. While
    others use the cores, transfers take so long that little of them is hidden; without overlap none is."""
    rows = trace_rows(analysed[0], point, phase)
    share = sum(row.overlap_us for row in rows) / sum(row.comm_us for row in rows)
    assert (share > 0.005) == overlaps


def test_a_sweep_and_a_single_point_can_be_analysed_too(analysed: tuple[Path, str]) -> None:
    sweep = analysed[0] / "12-00-00"
    point = next(path.parent for path in sweep.glob("*tp2_fc1_bulk*/result.json"))
    for directory in (sweep, point):
        assert "fc1_dgrad" in analyze(directory).stdout
