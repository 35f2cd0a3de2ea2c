from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from overlap_sweep.report.page.lanes import at_once_us, lanes
from overlap_sweep.report.page.timeline import (
    MOST_SPANS,
    layer_timeline,
)
from overlap_sweep.run_directory import trace_file
from overlap_sweep.trace.kernel_classes import Kind
from overlap_sweep.trace.spans import Span
from tests.analysis.reading import layer_point
from tests.golden.made_report import BEST_TRACE, NONE_TRACE
from tests.made_sweeps import rounds
from tests.make_point import layer_config, make_point


def span(start_us: float, end_us: float, kind: Kind = "gemm", stream: str = "7") -> Span:
    return Span(start_us, end_us, "0", stream, kind, "cublas", "gemm", "bwd")


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
