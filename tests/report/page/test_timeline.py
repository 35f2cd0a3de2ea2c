from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from overlap_sweep.report.page.lanes import at_once_us, lanes
from overlap_sweep.report.page.timeline import INDEPENDENT, MOST_SPANS, chart, layer_timeline, pass_timelines
from overlap_sweep.run_directory import trace_file
from overlap_sweep.trace.kernel_classes import Kind
from overlap_sweep.trace.spans import Span
from tests.analysis.reading import layer_point
from tests.made_sweeps import rounds
from tests.make_point import layer_config, make_point, operator_config, pass_times
from tests.report.page.reports import analysis_of, files_of
from tests.report.page.sweep_of_300 import BEST_TRACE, NONE_TRACE

BULK = operator_config(2, "fc1", "all", "bulk", num_sm=4)


def span(start_us: float, end_us: float, kind: Kind = "gemm", stream: str = "7") -> Span:
    return Span(start_us, end_us, "0", stream, kind, "cublas", "gemm", "bwd")


def write_traced(directory: Path, none_beside: bool = True) -> Path:
    traces = [trace_file(0), *(["trace_none_rank0.json.gz"] if none_beside else [])]
    written = make_point("operator", directory, BULK, bwd=pass_times(80.0), traces=traces)
    shutil.copy(BEST_TRACE, written / traces[0])
    if none_beside:
        shutil.copy(NONE_TRACE, written / traces[1])
    return written


def test_few_streams_have_a_lane_each() -> None:
    spans = [span(0, 5), span(5, 9), span(1, 4, "comm", "20"), span(4, 6, "comm", "21"), span(0, 1, "ignore", "30")]
    found = lanes(spans)
    assert [lane.name for lane in found] == [
        "GEMM, stream 7",
        "communication, stream 20",
        "communication 2, stream 21",
    ]
    assert [len(lane.spans) for lane in found] == [2, 1, 1]


def test_many_streams_are_packed() -> None:
    spans = [span(i, i + 1.5, "comm", str(i)) for i in range(40)]
    found = lanes(spans)
    assert [lane.name for lane in found] == ["communication", "communication 2"]
    for lane in found:
        pairs = zip(lane.spans, lane.spans[1:], strict=False)
        assert all(earlier.end_us <= later.start_us for earlier, later in pairs)


def test_what_overlaps_within_a_stream_is_not_drawn_over_each_other() -> None:
    assert [len(lane.spans) for lane in lanes([span(0, 5), span(1, 4)])] == [1, 1]


def test_a_gemm_beside_communication() -> None:
    assert at_once_us([span(0, 5), span(4, 9, "comm"), span(6, 8), span(20, 30, "comm")]) == 3.0
    assert at_once_us([span(0, 5), span(5, 9, "comm"), span(0, 9, "wait")]) == 0.0


def test_none_above_the_best(tmp_path: Path) -> None:
    write_traced(tmp_path)
    (case,) = analysis_of(tmp_path).cases
    ((operator, panel),) = pass_timelines(case, 2)
    assert (operator, panel.name, panel.title, panel.notes) == ("fc1", "fc1_bwd", "fc1 backward, TP=2", [INDEPENDENT])
    assert [half.title for half in panel.halves] == ["no overlap", "bulk_sm4 (chosen)"]
    chart(panel).to_dict(validate=True)
    none, best = panel.halves
    assert [extent.text for extent in none.extents] == ["backward 19,399.0 us"]
    assert min(bar.start_us for bar in none.bars) == 0.0
    assert {bar.kind for bar in best.bars} >= {"gemm", "comm", "wait", "compute"}
    assert all(bar.row in half.rows for half in panel.halves for bar in half.bars)


def test_the_trace_of_a_point_without_overlap_will_do(tmp_path: Path) -> None:
    write_traced(tmp_path, none_beside=False)
    written = make_point("operator", tmp_path, operator_config(2, "fc1"), traces=[trace_file(0)])
    shutil.copy(NONE_TRACE, written / trace_file(0))
    (case,) = analysis_of(tmp_path).cases
    ((_, panel),) = pass_timelines(case, 2)
    assert [half.title for half in panel.halves] == ["no overlap", "bulk_sm4 (chosen)"]


def test_only_the_best(tmp_path: Path) -> None:
    write_traced(tmp_path, none_beside=False)
    (case,) = analysis_of(tmp_path).cases
    ((_, panel),) = pass_timelines(case, 2)
    assert [half.title for half in panel.halves] == ["bulk_sm4 (chosen)"]
    assert panel.notes == ["Of no overlap there is no trace to draw beside it."]


def test_where_no_overlap_is_chosen_the_fastest_is_shown(tmp_path: Path) -> None:
    written = make_point("operator", tmp_path, BULK, bwd=pass_times(120.0), traces=[trace_file(0)])
    shutil.copy(BEST_TRACE, written / trace_file(0))
    (case,) = analysis_of(tmp_path).cases
    ((_, panel),) = pass_timelines(case, 2)
    assert [half.title for half in panel.halves] == ["bulk_sm4 (not chosen)"]


def test_without_any_trace(tmp_path: Path) -> None:
    make_point("operator", tmp_path, BULK, bwd=pass_times(80.0))
    (case,) = analysis_of(tmp_path).cases
    assert list(pass_timelines(case, 2)) == []
    assert "No trace shows fc1 at TP=2" in files_of(tmp_path)["report.html"].decode()


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    written = write_traced(tmp_path)
    (written / "trace_none_rank0.json.gz").write_bytes(b"\x1f\x8bbroken")
    (case,) = analysis_of(tmp_path).cases
    ((_, panel),) = pass_timelines(case, 2)
    assert panel.notes == ["trace_none_rank0.json.gz of no overlap cannot be read."]


def test_of_a_layer(tmp_path: Path) -> None:
    variants = {"none": rounds(1.0), "default": rounds(0.97), "floor": rounds(0.8)}
    traces = {trace_file(0, "none"): NONE_TRACE, trace_file(0, "default"): BEST_TRACE}
    written = make_point("layer", tmp_path, layer_config(), variants=variants, traces=list(traces))
    for name, path in traces.items():
        shutil.copy(path, written / name)
    panel = layer_timeline("layer", "layer", layer_point(tmp_path), (("none", "none"), ("default", "default")))
    assert panel
    assert [[extent.text.split()[0] for extent in half.extents] for half in panel.halves] == [
        ["forward", "backward"]
    ] * 2
    none, best = (half.extents[-1].end_us for half in panel.halves)
    assert none == pytest.approx(34076.02)
    assert best < none
    assert all(len(half.bars) <= MOST_SPANS for half in panel.halves)
    assert layer_timeline("layer", "layer", layer_point(tmp_path), (("none", "none"), ("floor", "floor"))) is None
