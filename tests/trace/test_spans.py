"""The one iteration that stands for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.trace import analyse_trace
from overlap_sweep.trace.spans import Span, typical_iteration


def iterations(trace: Any, *lengths: int) -> None:
    """Iterations of a forward GEMM and a backward one, as long as given; copies between them belong to neither pass."""
    for number, length in enumerate(lengths):
        start = 10_000 * number
        trace.backward(start + 100, start + 200)
        trace.annotation("Optimizer.step#SGD.step", start + 300, start + 400)
        trace.work("nvjet_fwd", start + 50, start + 1000, start + 1010)
        trace.work("nvjet_bwd", start + 150, start + 1005, start + 1000 + length, thread=2, stream=9)
        trace.launch(start + 350, number)
        trace.copy("Memset (Device)", start + 1008, start + 1009, number)


@pytest.mark.parametrize(
    ("lengths", "number"), [((30,), 0), ((50, 30), 1), ((20, 90, 40), 2), ((20, 90, 40, 30), 3), ((30, 30, 30), 1)]
)
def test_the_lower_median(trace: Any, lengths: tuple[int, ...], number: int) -> None:
    iterations(trace, *lengths)
    found = typical_iteration(trace.write(distributedInfo={"rank": 3}))
    assert (found.rank, found.number) == (3, number)


def test_spans_are_what_ran_by_start(trace: Any) -> None:
    iterations(trace, 50, 30, 70)
    found = typical_iteration(trace.write())
    assert found.spans == [
        Span(0.0, 10.0, "0", "7", "gemm", "cublas", "nvjet_fwd", "fwd"),
        Span(5.0, 50.0, "0", "9", "gemm", "cublas", "nvjet_bwd", "bwd"),
        Span(8.0, 9.0, "0", "7", "memory", "copy", "Memset (Device)", ""),
    ]


def test_recorded_traces(gpu_trace: Path) -> None:
    found = typical_iteration(gpu_trace)
    rows = {row.phase: row for row in analyse_trace(gpu_trace) if row.iteration == found.number}
    assert max(span.end_us for span in found.spans) == rows["all"].span_us
    assert sum(span.kind == "gemm" for span in found.spans) == rows["all"].num_gemm_events
    assert sum(span.kind == "comm" and span.phase == "bwd" for span in found.spans) == rows["bwd"].num_comm_events
    assert [span.start_us for span in found.spans] == sorted(span.start_us for span in found.spans)


def test_recomputation_has_a_phase_of_its_own(trace: Any) -> None:
    trace.backward(100, 300)
    trace.forward_op("aten::mm", 110, 130, thread=2)
    for at in (120, 200):
        trace.work("nvjet", at, thread=2)
    assert [span.phase for span in typical_iteration(trace.write()).spans] == ["recompute", "bwd"]


def test_a_cpu_trace_has_operators_on_threads(trace: Any) -> None:
    trace.op("aten::linear", 0, 100)
    trace.op("aten::mm", 10, 90)
    trace.annotation("gloo:all_gather", 50, 110, thread=5)
    assert typical_iteration(trace.write()).spans == [
        Span(0.0, 80.0, "100", "1", "gemm", "aten", "aten::mm", "fwd"),
        Span(40.0, 100.0, "100", "5", "comm", "gloo", "gloo:all_gather", "fwd"),
    ]


def test_nothing_to_show(trace: Any) -> None:
    trace.copy("Memcpy DtoH (Device -> Pageable)", 0, 10, 1)
    with pytest.raises(UserError, match="holds no work"):
        typical_iteration(trace.write())
