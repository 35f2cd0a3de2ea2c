"""The parts of an iteration: against counting every nanosecond, and against plain loops over the recorded traces."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.trace.activity import activity_of
from overlap_sweep.trace.breakdown import PartRow, breakdown, measure_groups
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.overlap import overlap_rows
from tests.trace import independent_check

some_events = st.lists(st.tuples(st.integers(-5, 30), st.integers(0, 10), st.integers(0, 3)), min_size=1, max_size=15)


@given(some_events, st.sampled_from([1, 2**62 // 50]))
def test_groups_against_counting_every_moment(events: list[tuple[int, int, int]], scale: int) -> None:
    running: dict[int, set[int]] = {}
    for start, duration, group in events:
        for moment in range(start, start + duration):
            running.setdefault(moment, set()).add(group)
    # Moments may lie so far apart that groups of them cannot be shifted apart as they are.
    intervals = np.array([[start, start + duration] for start, duration, _ in events], np.int64) * scale
    busy, total, alone = measure_groups(intervals, np.array(events)[:, 2], 4)
    for group in range(4):
        assert busy[group] == scale * sum(group in groups for groups in running.values())
        assert total[group] == scale * sum(duration for _, duration, which in events if which == group)
        assert alone[group] == scale * sum(groups == {group} for groups in running.values())


def parts_of(path: Path) -> list[PartRow]:
    trace = read_trace(path)
    return breakdown(activity_of(trace), str(path), trace.rank)


def test_h200_traces_are_those_of_the_independent_check(gpu_trace: Path) -> None:
    found: dict[str, dict[str, dict[str, list[int]]]] = {}
    for part in parts_of(gpu_trace):
        # The check knows kinds, not whose kernels they are: that is compared below.
        if part.by != "class":
            numbers = [part.num_events, *(in_ns(us) for us in (part.busy_us, part.total_us, part.alone_us))]
            of_phase = found.setdefault(f"{part.iteration} {part.phase}", {"kernel": {}, "stream": {}})
            of_phase[part.by][part.name] = numbers
    assert found == independent_check.check_parts(gpu_trace)


def test_groupings_agree_with_each_other_and_with_the_rows(gpu_trace: Path) -> None:
    trace = read_trace(gpu_trace)
    activity = activity_of(trace)
    rows = {(row.iteration, row.phase): row for row in overlap_rows(activity, "f", 0)}
    parts = breakdown(activity, "f", 0)
    phases = [(which, list(of_phase)) for which, of_phase in groupby(parts, lambda part: (part.iteration, part.phase))]
    assert [which for which, _ in phases] == list(rows)
    for which, of_phase in phases:
        row = rows[which]
        classes, kernels, streams = (
            [part for part in of_phase if part.by == by] for by in ("class", "kernel", "stream")
        )
        for kernel_class in classes:
            members = [k for k in kernels if (k.kind, k.library) == (kernel_class.kind, kernel_class.library)]
            assert sum(k.num_events for k in members) == kernel_class.num_events
            assert in_ns(*(k.total_us for k in members)) == in_ns(kernel_class.total_us)
            assert in_ns(*(k.busy_us for k in members)) >= in_ns(kernel_class.busy_us)
            assert in_ns(*(k.alone_us for k in members)) <= in_ns(kernel_class.alone_us)
        for grouping in (classes, kernels, streams):
            assert sum(part.num_events for part in grouping) == len(np.unique(activity_events(activity, which)))
            assert in_ns(*(part.total_us for part in grouping)) == in_ns(*(part.total_us for part in classes))
            # Something runs in all but the idle part of the span; alone can be no more than that.
            assert in_ns(*(part.alone_us for part in grouping)) <= in_ns(row.span_us, -row.idle_us)
            assert in_ns(*(part.busy_us for part in grouping)) >= in_ns(row.span_us, -row.idle_us)
            assert [part.busy_us for part in grouping] == sorted((part.busy_us for part in grouping), reverse=True)
        gemms = [part for part in classes if part.kind == "gemm"]
        assert [part.busy_us for part in gemms] == [row.gemm_busy_us]
        assert [part.library for part in gemms] == ["cublas"]
        # Kernels of one stream run one after the other.
        assert all(in_ns(part.total_us) == in_ns(part.busy_us) for part in streams)


def activity_events(activity: Any, which: tuple[int, str]) -> Any:
    iteration, phase = which
    passes = {"fwd": [0], "bwd": [1, 3], "recompute": [3], "all": [0, 1, 2, 3]}[phase]
    assigned = activity.assignment
    return np.flatnonzero((assigned.iteration == iteration) & np.isin(assigned.pass_, passes))


def in_ns(*microseconds: float) -> int:
    return sum(round(us * 1000) for us in microseconds)


def test_parts_on_one_page(trace: Any) -> None:
    """GEMMs 0-100 and 50-150 on two streams, all-gather 120-220, another kernel of the first stream 200-210."""
    trace.work("nvjet_a", 0, 1000, 1100)
    trace.work("nvjet_b", 1, 1050, 1150, stream=8)
    trace.work("ncclDevKernel_AllGather", 2, 1120, 1220, stream=9)
    trace.work("void at::native::gelu_kernel<float>(int)", 3, 1200, 1210)
    parts = [part for part in parts_of(trace.write(distributedInfo={"rank": 3})) if part.phase == "fwd"]
    assert {(part.file, part.rank, part.iteration) for part in parts} == {(str(trace.path), 3, 0)}
    assert [(p.by, p.kind, p.library, p.name, p.num_events, p.busy_us, p.total_us, p.alone_us) for p in parts] == [
        ("class", "gemm", "cublas", "cublas gemm", 2, 150.0, 200.0, 120.0),
        ("class", "comm", "nccl", "nccl comm", 1, 100.0, 100.0, 60.0),
        ("class", "compute", "aten", "aten compute", 1, 10.0, 10.0, 0.0),
        ("kernel", "gemm", "cublas", "nvjet_a", 1, 100.0, 100.0, 50.0),
        ("kernel", "gemm", "cublas", "nvjet_b", 1, 100.0, 100.0, 20.0),
        ("kernel", "comm", "nccl", "ncclDevKernel_AllGather", 1, 100.0, 100.0, 60.0),
        ("kernel", "compute", "aten", "void at::native::gelu_kernel<float>(int)", 1, 10.0, 10.0, 0.0),
        ("stream", "gemm+compute", "aten+cublas", "0 7", 2, 110.0, 110.0, 50.0),
        ("stream", "gemm", "cublas", "0 8", 1, 100.0, 100.0, 20.0),
        ("stream", "comm", "nccl", "0 9", 1, 100.0, 100.0, 60.0),
    ]
