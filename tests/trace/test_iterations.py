"""Iterations on the device's timeline: each moment belongs to one of them, and `trace` and `diagnose` agree on it."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.diagnosis.facts import facts_of
from overlap_sweep.diagnosis.findings import diagnosis_of
from overlap_sweep.trace import TraceRow
from overlap_sweep.trace.activity import COMM, COMPUTE, GEMM, NO_ITERATION, WAIT, Activity, Assignment
from overlap_sweep.trace.columns import Events
from overlap_sweep.trace.iterations import iteration_spans, overlap_rows
from overlap_sweep.trace.kineto import read_trace
from tests.timeline import Timeline
from tests.trace.conftest import TRACES, analyse_trace

RECORDED = sorted([*TRACES.glob("*.json.gz"), *TRACES.parent.glob("h200x2_fsdp/*/*.json.gz")])


def whole(rows: list[TraceRow]) -> dict[int, TraceRow]:
    return {row.iteration: row for row in rows if row.phase == "all"}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_steps_of_trace_and_diagnose_agree(path: Path) -> None:
    trace = read_trace(path)
    rows = whole(analyse_trace(path))
    facts = facts_of(trace)
    steps = {step.step: step for step in diagnosis_of("run", [facts]).steps}
    assert {number: step.step_us for number, step in steps.items()} == {n: row.span_us for n, row in rows.items()}
    assert {number: step.idle_us for number, step in steps.items()} == pytest.approx(
        {number: row.idle_us for number, row in rows.items()}
    )
    assert all(first.end_ns <= second.start_ns for first, second in pairwise(facts.steps))


def test_kernels_of_the_neighbours_are_neither_idle_nor_expose(trace: Timeline) -> None:
    """The host is ahead: it launches each step's communication while the GPU still computes the step before.

    GEMMs take 100 us and follow each other; the communication of 60 us runs from the middle of the GEMM before.
    """
    for step in range(4):
        trace.step(step, 10 * step, 10 * step + 10)
        start = 1000 + 100 * step
        if step:
            trace.work("ncclDevKernel_AllGather", 10 * step + 1, start - 50, start + 10, stream=9)
        trace.work("nvjet_a", 10 * step + 2, start, start + 100)
    rows = whole(analyse_trace(trace.write()))
    assert [(row.span_us, row.idle_us, row.exposed_comm_us) for row in rows.values()] == [(100, 0, 0)] * 4
    # Of each call 50 us are in the iteration before; it is counted where it starts.
    assert [(row.comm_us, row.num_comm_events) for row in rows.values()] == [(50, 1), (60, 1), (60, 1), (10, 0)]


def test_an_iteration_starts_with_its_communication_once_the_one_before_has_computed(trace: Timeline) -> None:
    for step in range(2):
        trace.step(step, 10 * step, 10 * step + 10)
        start = 1000 + 200 * step
        # 50 us of it are exposed, before the GEMM that needs it.
        trace.work("ncclDevKernel_AllGather", 10 * step + 1, start - 80, start, stream=9)
        trace.work("nvjet_a", 10 * step + 2, start, start + 150)
    rows = whole(analyse_trace(trace.write()))
    assert [(row.span_us, row.exposed_comm_us) for row in rows.values()] == [(230, 80), (200, 50)]


def test_what_only_runs_beside_the_iteration_before_is_no_iteration(trace: Timeline) -> None:
    """The recording ended when only the first communication of the last step had run."""
    for step in range(3):
        trace.step(step, 10 * step, 10 * step + 10)
    trace.work("nvjet_a", 1, 1000, 1100)
    trace.work("nvjet_a", 11, 1100, 1200)
    trace.work("ncclDevKernel_AllGather", 21, 1120, 1150, stream=9)
    rows = whole(analyse_trace(trace.write()))
    assert [(row.iteration, row.span_us, row.num_comm_events) for row in rows.values()] == [(0, 100, 0), (1, 100, 1)]


@st.composite
def activities(draw: st.DrawFn) -> Activity:
    """Work of some iterations on three streams, in order on each; what is in no iteration comes first or between."""
    rows = []
    for lane in range(3):
        now = draw(st.integers(0, 20))
        iterations = sorted(draw(st.lists(st.integers(0, 4), max_size=8)))
        for iteration in iterations:
            now += draw(st.integers(0, 12))
            length = draw(st.integers(0, 15))
            number = draw(st.sampled_from([iteration] * 9 + [NO_ITERATION]))
            rows.append((lane, now, now + length, draw(st.sampled_from([GEMM, COMM, COMPUTE, WAIT])), number))
            now += length
    lane, start, end, kind, iteration = np.array(rows or [(0, 0, 1, GEMM, 0)], np.int64).T
    nothing = np.zeros(len(lane), np.int64)
    events = Events(
        kind.astype(np.int32), lane.astype(np.int32), start, end, nothing, nothing, nothing.astype(np.int32)
    )
    assignment = Assignment(iteration, np.zeros(len(lane), np.int8))
    return Activity(events, kind.astype(np.int8), assignment, [], {}, [("0", str(number)) for number in range(3)])


@given(activities())
def test_iterations_share_the_time_out(activity: Activity) -> None:
    spans = iteration_spans(activity)
    assert all(span.start_ns <= span.end_ns for span in spans)
    assert all(first.end_ns <= second.start_ns for first, second in pairwise(spans))
    events, kind = activity.events, activity.kind
    assert sum(span.end_ns - span.start_ns for span in spans) <= events.end_ns.max() - events.start_ns.min()
    if not spans:
        return
    rows = whole(overlap_rows(activity, "trace", 0))
    for span in spans:
        row, moments = rows[span.number], range(span.start_ns, span.end_ns)
        running = [set(kind[(events.start_ns <= at) & (at < events.end_ns)].tolist()) for at in moments]
        counted = {
            "span_us": len(running),
            "idle_us": sum(not kinds for kinds in running),
            "gemm_us": sum(GEMM in kinds for kinds in running),
            "comm_us": sum(COMM in kinds for kinds in running),
            "wait_us": sum(WAIT in kinds for kinds in running),
            "overlap_us": sum({GEMM, COMM} <= kinds for kinds in running),
            "exposed_comm_us": sum(COMM in kinds and not kinds & {GEMM, COMPUTE} for kinds in running),
        }
        assert {name: 1000 * getattr(row, name) for name in counted} == pytest.approx(counted)
        shorter_us = min(row.gemm_us, row.comm_us)
        assert row.overlap_ratio == (pytest.approx(row.overlap_us / shorter_us) if shorter_us else None)
