"""What belongs to a step: the time between steps, and waits of the host at their ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.diagnosis import END_OF_STEP, Diagnosis
from overlap_sweep.diagnosis.facts import RankFacts, facts_of
from overlap_sweep.diagnosis.findings import diagnosis_of
from overlap_sweep.trace.kineto import read_trace
from tests.trace.conftest import HandMadeTrace

SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


@pytest.fixture
def trace(tmp_path: Path) -> HandMadeTrace:
    return HandMadeTrace(tmp_path / "trace.json")


def facts(trace: HandMadeTrace) -> RankFacts:
    path = trace.write()
    return facts_of(read_trace(path), path, [])


def diagnosed(trace: HandMadeTrace) -> Diagnosis:
    return diagnosis_of("run", [facts(trace)])


def add_steps(
    trace: HandMadeTrace, *, between: str = "", wait: str = "cudaDeviceSynchronize", last: bool = True
) -> None:
    """Adds three steps of 1000 us: a GEMM of 400 us, one of 300 us launched 100 us after the first had ended. The host
    waits at the end, or else in the middle."""
    for number in range(3):
        at = 2000 * number
        trace.annotation(f"ProfilerStep#{number}", at, at + 1000)
        trace.work("nvjet_a", at + 50, at + 60, at + 460)
        trace.work("nvjet_a", at + 550, at + 560, at + 860)
        start, end = (at + 600, at + 870) if last else (at + 100, at + 470)
        trace.launch(start, 50 + number, name=wait)
        trace.events[-1]["dur"] = end - start
        if between:
            trace.work(between, at + 1100, at + 1110, at + 1900)
        trace.annotation("other", at + 1000, at + 2000)


def test_the_next_step_begins_where_one_ends_unless_something_else_runs_between_them(trace: HandMadeTrace) -> None:
    add_steps(trace)
    assert [(step.start_ns, step.end_ns) for step in facts(trace).steps] == [
        (60_000, 2_060_000),
        (2_060_000, 4_060_000),
        (4_060_000, 4_860_000),
    ]


@pytest.mark.parametrize("kernel", [SPIN, "ncclDevKernel_AllReduce_Sum_f32", "nvjet_b"])
def test_steps_that_something_else_runs_between_end_with_their_own_last_event(
    trace: HandMadeTrace, kernel: str
) -> None:
    add_steps(trace, between=kernel)
    assert [(step.start_ns, step.end_ns) for step in facts(trace).steps] == [
        (at * 1000 + 60_000, at * 1000 + 860_000) for at in (0, 2000, 4000)
    ]


def test_nothing_is_lost_between_steps_that_are_apart(trace: HandMadeTrace) -> None:
    add_steps(trace, between=SPIN)
    found = diagnosed(trace)
    assert [(step.step_us, step.idle_us) for step in found.steps] == [(800, 100)] * 3
    # The host waits at the end of a step; what it launches late in the next one has another cause.
    assert [(finding.cause, finding.lost_us) for finding in found.findings if finding.lost_us] == [("host_bound", 100)]


def test_a_wait_for_the_device_at_the_end_of_a_step_says_so(trace: HandMadeTrace) -> None:
    add_steps(trace)
    found = {finding.cause: finding for finding in diagnosed(trace).findings}
    # The device idles for 1200 us until the next step; the host had waited for 270 us.
    assert (found["host_sync"].where, found["host_sync"].lost_us) == (END_OF_STEP, 270)


@pytest.mark.parametrize(
    ("wait", "last"),
    [("cudaDeviceSynchronize", False), ("cudaStreamSynchronize", True), ("cudaEventSynchronize", True)],
)
def test_other_waits_do_not(trace: HandMadeTrace, wait: str, last: bool) -> None:
    add_steps(trace, wait=wait, last=last)
    found = {finding.cause: finding for finding in diagnosed(trace).findings}
    assert found["host_sync"].where == wait


def test_an_operator_that_waits_is_named_also_at_the_end(trace: HandMadeTrace) -> None:
    add_steps(trace)
    trace.op("aten::item", 590, 880)
    trace.op("aten::item", 2590, 2880)
    found = {finding.cause: finding for finding in diagnosed(trace).findings}
    assert found["host_sync"].where == "aten::item"


def test_time_is_lost_to_the_last_wait_first(trace: HandMadeTrace) -> None:
    add_steps(trace)
    # A wait of 20 us at the start of the second step and of the third.
    for at in (2000, 4000):
        trace.launch(at + 10, at, name="cudaStreamSynchronize")
        trace.events[-1]["dur"] = 20
    found = {finding.where: finding.lost_us for finding in diagnosed(trace).findings if finding.cause == "host_sync"}
    assert found == {END_OF_STEP: 270, "cudaStreamSynchronize": 20}
