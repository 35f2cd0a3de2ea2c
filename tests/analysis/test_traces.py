from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from overlap_sweep.analysis.points import read_points
from overlap_sweep.analysis.traces import METRICS, read_traces, summarise
from overlap_sweep.trace.overlap import analyse_trace
from tests.analysis.reading import choices, trace_row
from tests.make_point import make_point, operator_config, pass_times

TRACES = Path(__file__).parent.parent / "data" / "traces"


def test_slowest_rank_of_each_iteration_then_median_over_iterations() -> None:
    rows = []
    for iteration, spans in enumerate([(100.0, 900.0), (120.0, 80.0), (90.0, 160.0)]):
        for rank, span_us in enumerate(spans):
            rows += [
                trace_row(rank, iteration, phase, span_us, num_gemm_events=4 + rank) for phase in ("fwd", "bwd", "all")
            ]
    metrics = summarise(rows)
    # Slowest: 900 (rank 1), 120 (rank 0), 160 (rank 1).
    assert metrics["operator_e2e_time_us"] == 160.0
    assert metrics["forward_gemm_time_us"] == 80.0
    assert metrics["backward_comm_time_us"] == 40.0
    assert metrics["num_gemm_events"] == 5
    assert metrics.keys() == METRICS.keys()


def test_what_no_iteration_has_is_left_out() -> None:
    metrics = summarise([trace_row(0, 0, phase, 100.0, overlap_ratio=None) for phase in ("all", "fwd")])
    assert "forward_overlap_ratio" not in metrics
    assert "backward_e2e_time_us" not in metrics
    assert summarise([]) == {}


def test_traces_of_a_run_directory(tmp_path: Path) -> None:
    directory = make_point(
        "operator",
        tmp_path,
        operator_config(),
        traces=["trace_rank0.json.gz", "trace_rank1.json.gz", "trace_rank2.json"],
    )
    shutil.copy(TRACES / "h200x4_llama3_70b_layer_te_default.json.gz", directory / "trace_rank0.json.gz")
    (directory / "trace_rank2.json").write_text('{"traceEvents": [')
    reading = read_traces(read_points(tmp_path).points)[directory]
    assert reading.missing == ["trace_rank1.json.gz"]
    assert len(reading.problems) == 1
    assert str(directory / "trace_rank2.json") in reading.problems[0]
    forward = [r.span_us for r in analyse_trace(directory / "trace_rank0.json.gz") if r.phase == "fwd"]
    assert reading.metrics["forward_e2e_time_us"] == pytest.approx(sum(forward) / 2)


def test_a_trace_that_was_read_in_part_counts_with_a_warning(tmp_path: Path) -> None:
    directory = make_point("operator", tmp_path, operator_config(), traces=["trace_rank0.json.gz"])
    whole = (TRACES / "h200x4_llama3_70b_layer_none.json.gz").read_bytes()
    (directory / "trace_rank0.json.gz").write_bytes(whole[:-1000])
    reading = read_traces(read_points(tmp_path).points)[directory]
    assert (reading.missing, reading.problems) == ([], [])
    assert len(reading.warnings) == 1
    assert str(directory / "trace_rank0.json.gz") in reading.warnings[0]
    assert "is cut short" in reading.warnings[0]
    assert reading.metrics["forward_gemm_time_us"] > 0


def test_objective_overlap_ratio_takes_the_highest_ratio_whatever_its_time(tmp_path: Path) -> None:
    for num_sm, time_us, trace in (
        (1, 90.0, "h200x4_llama3_70b_layer_none.json.gz"),
        (2, 120.0, "h200x4_llama3_70b_layer_ring_rs.json.gz"),
        (4, 80.0, None),
    ):
        asked = operator_config(method="ring_exchange", phase="fprop", num_sm=num_sm)
        directory = make_point(
            "operator", tmp_path, asked, fwd=pass_times(time_us), traces=["trace_rank0.json.gz"] if trace else []
        )
        if trace:
            shutil.copy(TRACES / trace, directory / "trace_rank0.json.gz")
    assert choices(tmp_path, "time")[2, "fc1", "fwd"].chosen.name == "ring_sm4"
    by_ratio = choices(tmp_path, "overlap_ratio")
    assert by_ratio[2, "fc1", "fwd"].chosen.name == "ring_sm2"
    assert by_ratio[2, "fc1", "fwd"].reason == "highest overlap ratio of 2"
    assert by_ratio[2, "fc1", "bwd"].chosen.name == "none"


def test_objective_overlap_ratio_without_traces(tmp_path: Path) -> None:
    make_point("operator", tmp_path, operator_config(method="ring_exchange", phase="fprop"), fwd=pass_times(90.0))
    choice = choices(tmp_path, "overlap_ratio")[2, "fc1", "fwd"]
    assert (choice.chosen.name, choice.reason) == ("none", "no trace gives an overlap ratio")
