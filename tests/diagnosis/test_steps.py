"""What belongs to a step: the time between steps, and waits of the host at their ends."""

from pathlib import Path

import pytest

from overlap_sweep.diagnosis import END_OF_STEP
from tests.timeline import Timeline, diagnosed, findings

SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"


def steps(*, between: str = "", wait: str = "cudaDeviceSynchronize", last: bool = True) -> Timeline:
    """Returns three steps of 1000 us: a GEMM of 400 us, one of 300 us launched 100 us after the first had ended. The
    host waits at the end, or else in the middle."""
    made = Timeline()
    for number, at in enumerate((0, 2000, 4000)):
        made.step(number, at, at + 1000)
        made.kernel(at + 60, at + 460, launch=at + 50)
        made.kernel(at + 560, at + 860, launch=at + 550)
        made.wait(*((at + 600, at + 870) if last else (at + 100, at + 470)), wait)
        if between:
            made.kernel(at + 1110, at + 1900, between, launch=at + 1100)
        made.annotation("other", at + 1000, at + 2000)
    return made


@pytest.mark.parametrize(
    ("between", "spans_us"),
    [
        ("", [(60, 2060), (2060, 4060), (4060, 4860)]),
        *((name, [(60, 860), (2060, 2860), (4060, 4860)]) for name in (SPIN, "ncclDevKernel_AllReduce", "nvjet_b")),
    ],
)
def test_the_next_step_begins_where_one_ends_unless_something_else_runs_between_them(
    tmp_path: Path, between: str, spans_us: list[tuple[int, int]]
) -> None:
    found = steps(between=between).facts(tmp_path).steps
    assert [(step.start_ns // 1000, step.end_ns // 1000) for step in found] == spans_us


def test_nothing_is_lost_between_steps_that_are_apart(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, steps(between=SPIN))
    assert [(step.step_us, step.idle_us) for step in found.steps] == [(800, 100)] * 3
    # The host waits at the end of a step; what it launches late in the next one has another cause.
    assert [(finding.cause, finding.lost_us) for finding in found.findings if finding.lost_us] == [("host_bound", 100)]


@pytest.mark.parametrize(
    ("wait", "last", "where"),
    [
        ("cudaDeviceSynchronize", True, END_OF_STEP),
        ("cudaDeviceSynchronize", False, "cudaDeviceSynchronize"),
        ("cudaStreamSynchronize", True, "cudaStreamSynchronize"),
        ("cudaEventSynchronize", True, "cudaEventSynchronize"),
    ],
)
def test_a_wait_for_the_device_at_the_end_of_a_step_is_named_so(
    tmp_path: Path, wait: str, last: bool, where: str
) -> None:
    found = findings(tmp_path, steps(wait=wait, last=last))["host_sync"]
    assert found.where == where
    # The device idles for 1200 us until the next step; the host had waited for 270 us.
    assert where != END_OF_STEP or found.lost_us == 270


def test_an_operator_that_waits_is_named_also_at_the_end(tmp_path: Path) -> None:
    made = steps()
    made.operator("aten::item", 590, 880)
    made.operator("aten::item", 2590, 2880)
    assert findings(tmp_path, made)["host_sync"].where == "aten::item"


def test_time_is_lost_to_the_last_wait_first(tmp_path: Path) -> None:
    made = steps()
    # A wait of 20 us at the start of the second step and of the third.
    for at in (2000, 4000):
        made.wait(at + 10, at + 30)
    found = {one.where: one.lost_us for one in diagnosed(tmp_path, made).findings if one.cause == "host_sync"}
    assert found == {END_OF_STEP: 270, "cudaStreamSynchronize": 20}
