"""Rows, parts and spans of traces: against numbers worked out by hand, and counted moment by moment."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.report.iterations import Span, typical_iteration
from overlap_sweep.trace import TraceRow, summarise
from overlap_sweep.trace.files import read_trace_file
from overlap_sweep.trace.iterations import measure_groups
from tests.timeline import Timeline
from tests.trace.conftest import analyse_trace


def test_rows_and_parts_on_one_page(trace: Timeline) -> None:
    """GEMM 0-100 and 50-150; NCCL 120-220; computation 200-210; wait 230-250; copy 205-270."""
    trace.work("nvjet_a", 0, 1000, 1100)
    trace.work("nvjet_b", 1, 1050, 1150, stream=8)
    trace.work("ncclDevKernel_AllGather", 2, 1120, 1220, stream=9)
    trace.work("void at::native::gelu_kernel<float>(int)", 3, 1200, 1210)
    trace.work("kuserbuffers_pushrecv(int)", 4, 1230, 1250)
    trace.launch(5, 5)
    trace.on_device("Memcpy DtoD (Device -> Device)", 1205, 1270, 5, cat="gpu_memcpy")
    trace.info = {"rank": 3, "world_size": 8}
    found = read_trace_file(trace.write(), with_parts=True)
    fwd, whole = found.rows
    assert fwd == TraceRow(
        file=str(trace.path),
        rank=3,
        iteration=0,
        phase="fwd",
        span_us=270.0,
        gemm_us=150.0,
        comm_us=100.0,
        wait_us=20.0,
        overlap_us=30.0,
        exposed_comm_us=60.0,
        idle_us=0.0,
        overlap_ratio=0.3,
        num_gemm_events=2,
        num_comm_events=1,
        num_wait_events=1,
        num_compute_events=1,
    )
    assert msgspec.structs.replace(whole, phase="fwd") == fwd
    parts = [part for part in found.parts if part.phase == "fwd"]
    assert {(part.file, part.rank, part.iteration) for part in parts} == {(str(trace.path), 3, 0)}
    # The longest busy first; of those that are as busy, the first in the trace.
    assert [(p.by, p.kind, p.library, p.name, p.num_events, p.busy_us, p.total_us, p.alone_us) for p in parts] == [
        ("class", "gemm", "cublas", "cublas gemm", 2, 150.0, 200.0, 120.0),
        ("class", "comm", "nccl", "nccl comm", 1, 100.0, 100.0, 50.0),
        ("class", "memory", "copy", "copy memory", 1, 65.0, 65.0, 30.0),
        ("class", "wait", "userbuffers", "userbuffers wait", 1, 20.0, 20.0, 0.0),
        ("class", "compute", "aten", "aten compute", 1, 10.0, 10.0, 0.0),
        ("kernel", "gemm", "cublas", "nvjet_a", 1, 100.0, 100.0, 50.0),
        ("kernel", "gemm", "cublas", "nvjet_b", 1, 100.0, 100.0, 20.0),
        ("kernel", "comm", "nccl", "ncclDevKernel_AllGather", 1, 100.0, 100.0, 50.0),
        ("kernel", "memory", "copy", "Memcpy DtoD (Device -> Device)", 1, 65.0, 65.0, 30.0),
        ("kernel", "wait", "userbuffers", "kuserbuffers_pushrecv(int)", 1, 20.0, 20.0, 0.0),
        ("kernel", "compute", "aten", "void at::native::gelu_kernel<float>(int)", 1, 10.0, 10.0, 0.0),
        ("stream", "gemm+wait+compute+memory", "aten+copy+cublas+userbuffers", "0 7", 4, 170.0, 195.0, 100.0),
        ("stream", "gemm", "cublas", "0 8", 1, 100.0, 100.0, 20.0),
        ("stream", "comm", "nccl", "0 9", 1, 100.0, 100.0, 50.0),
    ]


Drawn = list[tuple[int, int, int]]
"""Start, duration and number of the kind or group of events."""

some_events = st.lists(st.tuples(st.integers(-5, 30), st.integers(0, 10), st.integers(0, 4)), min_size=1)


def running_at(events: Drawn) -> dict[int, set[int]]:
    """What runs in each unit of time in which something does."""
    running: dict[int, set[int]] = {}
    for start, duration, which in events:
        for moment in range(start, start + duration):
            running.setdefault(moment, set()).add(which)
    return running


@given(some_events, st.sampled_from([1, 2**62 // 50]))
def test_groups_against_counting_every_moment(events: Drawn, scale: int) -> None:
    # Moments may lie so far apart that groups of them cannot be shifted apart as they are.
    intervals = np.array([[start, start + duration] for start, duration, _ in events], np.int64) * scale
    busy, total, alone = measure_groups(intervals, np.array(events)[:, 2], 5)
    running = running_at(events).values()
    for group in range(5):
        assert busy[group] == scale * sum(group in groups for groups in running)
        assert total[group] == scale * sum(duration for _, duration, which in events if which == group)
        assert alone[group] == scale * sum(groups == {group} for groups in running)


def test_summary_is_the_median_over_the_iterations(gpu_trace: Path) -> None:
    first, _, _, second, *_ = analyse_trace(gpu_trace)
    contaminated = msgspec.structs.replace(first, gemm_us=1e9)
    (summary,) = summarise([contaminated, first, second])
    assert (summary.phase, summary.iterations, summary.rank) == ("fwd", 3, 0)
    assert summary.gemm_us == max(first.gemm_us, second.gemm_us)
    assert summary.overlap_ratio == summary.overlap_us / min(summary.gemm_us, summary.comm_us)
    assert summary.num_gemm_events == second.num_gemm_events
    assert summarise([]) == []


def iterations(trace: Timeline, *lengths: int) -> None:
    """Iterations of a forward GEMM and a backward one, as long as given; copies between them belong to neither pass."""
    for number, length in enumerate(lengths):
        start = 10_000 * number
        trace.backward(start + 100, start + 200)
        trace.annotation("Optimizer.step#SGD.step", start + 300, start + 400)
        trace.work("nvjet_fwd", start + 50, start + 1000, start + 1010)
        trace.work("nvjet_bwd", start + 150, start + 1005, start + 1000 + length, thread=2, stream=9)
        trace.launch(start + 350, number)
        trace.on_device("Memset (Device)", start + 1008, start + 1009, number, cat="gpu_memcpy")


@pytest.mark.parametrize(
    ("lengths", "number"), [((30,), 0), ((50, 30), 1), ((20, 90, 40), 2), ((20, 90, 40, 30), 3), ((30, 30, 30), 1)]
)
def test_the_typical_iteration_is_the_lower_median(trace: Timeline, lengths: tuple[int, ...], number: int) -> None:
    iterations(trace, *lengths)
    trace.info = {"rank": 3}
    found = typical_iteration(trace.write())
    assert (found.rank, found.number) == (3, number)


def test_spans_are_what_ran_by_start(trace: Timeline) -> None:
    iterations(trace, 50, 30, 70)
    assert typical_iteration(trace.write()).spans == [
        Span(0.0, 10.0, "0", "7", "gemm", "cublas", "nvjet_fwd", "fwd"),
        Span(5.0, 50.0, "0", "9", "gemm", "cublas", "nvjet_bwd", "bwd"),
        Span(8.0, 9.0, "0", "7", "memory", "copy", "Memset (Device)", ""),
    ]


def on_cpu(trace: Timeline) -> list[tuple[float, float, str, str, str]]:
    """Start, end, thread, kind and name of the operators that count."""
    spans = typical_iteration(trace.write()).spans
    return [(span.start_us, span.end_us, span.stream, span.kind, span.name) for span in spans]


def test_a_gemm_counts_once_however_deep_the_call_and_of_other_operators_the_outermost(trace: Timeline) -> None:
    for name, start, end in (
        *(("linear", 0, 100), ("t", 1, 5), ("addmm", 10, 90), ("copy_", 12, 20), ("resolve_conj", 21, 22)),
        *(("mm", 100, 150), ("softmax", 200, 250), ("_softmax", 202, 248), ("copy_", 203, 210), ("gelu", 260, 290)),
        *(("scaled_dot_product_attention", 300, 400), ("bmm", 320, 350)),
    ):
        trace.operator(f"aten::{name}", start, end)
    assert on_cpu(trace) == [
        (0.0, 80.0, "1", "gemm", "aten::addmm"),
        (90.0, 140.0, "1", "gemm", "aten::mm"),
        (190.0, 240.0, "1", "compute", "aten::softmax"),
        (250.0, 280.0, "1", "compute", "aten::gelu"),
        (290.0, 390.0, "1", "compute", "aten::scaled_dot_product_attention"),
        (310.0, 340.0, "1", "gemm", "aten::bmm"),
    ]


def test_operators_inside_a_gloo_span_are_part_of_the_communication_and_launching_is_none(trace: Timeline) -> None:
    trace.operator("c10d::_allgather_base_", 0, 5)
    trace.annotation("gloo:all_gather", 10, 110, thread=5)
    trace.operator("aten::copy_", 90, 95, thread=5)
    trace.operator("aten::add_", 95, 100, thread=5)
    trace.operator("aten::add_", 30, 50, thread=1)
    assert on_cpu(trace) == [(0.0, 100.0, "5", "comm", "gloo:all_gather"), (20.0, 40.0, "1", "compute", "aten::add_")]


def test_point_to_point_spans_on_the_calling_thread_hide_nothing(trace: Timeline) -> None:
    trace.annotation("gloo:send", 10, 110)
    trace.annotation("gloo:recv", 12, 112)
    trace.operator("aten::mm", 20, 70)
    assert on_cpu(trace) == [
        (0.0, 100.0, "1", "comm", "gloo:send"),
        (2.0, 102.0, "1", "comm", "gloo:recv"),
        (10.0, 60.0, "1", "gemm", "aten::mm"),
    ]
