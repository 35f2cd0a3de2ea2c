"""Which TP sizes are searched at all."""

from __future__ import annotations

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import PassTimes, Result
from overlap_sweep.tuner.tp_sizes import cannot_scale, tp_sizes_up_to
from tests.make_point import pass_times


@pytest.mark.parametrize(
    ("most", "gpus", "sizes", "notice"),
    [
        (8, 8, [2, 4, 8], None),
        (8, None, [2, 4, 8], None),
        (4, None, [2, 4], None),
        (7, None, [2, 4], None),
        (16, 9, [2, 4, 8], None),
        (2, 2, [2], None),
        (8, 4, [2, 4], "TP=8 left out: 4 GPUs are visible"),
        (8, 3, [2], "TP=4, TP=8 left out: 3 GPUs are visible"),
    ],
)
def test_powers_of_two_up_to_what_was_asked_for_and_what_there_is(
    most: int, gpus: int | None, sizes: list[int], notice: str | None
) -> None:
    assert tp_sizes_up_to(most, gpus) == (sizes, notice)


@pytest.mark.parametrize(
    ("most", "gpus", "says"),
    [
        (1, 8, "max_tp_size=1 leaves nothing"),
        (1, None, "max_tp_size=1 leaves nothing"),
        (8, 1, "needs 2 GPUs at least and 1 is visible"),
        (8, 0, "needs 2 GPUs at least and 0 is visible"),
    ],
)
def test_where_none_is_left_that_is_an_error(most: int, gpus: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        tp_sizes_up_to(most, gpus)


def baseline(tp_size: int, floor_us: float, tp1_us: float | None, none_us: float = 1e4) -> Result:
    """Of one operator, forward and backward alike."""
    times: dict[str, PassTimes] = {
        name: pass_times(none_us, none_us, floor_us, tp1_us=tp1_us) for name in ("fwd", "bwd")
    }
    return Result(name="none", point={"tp_size": tp_size}, status="ok", times=times)


@pytest.mark.parametrize(
    ("floor_us", "tolerance", "times"),
    [(25.1, 0.0, "1.00"), (30.5, 0.2, "1.22"), (60.0, 0.2, "2.40")],
)
def test_a_size_cannot_scale_whose_gemms_alone_take_too_long(floor_us: float, tolerance: float, times: str) -> None:
    reason = cannot_scale([baseline(4, floor_us, 100.0)], tolerance)
    assert reason
    assert f"take {times} times TP=1's time / 4, and {1 + tolerance:.2f} is allowed" in reason


@pytest.mark.parametrize(
    ("baselines", "tolerance"),
    [
        ([baseline(4, 25.0, 100.0)], 0.0),
        ([baseline(4, 30.0, 100.0)], 0.2),
        ([baseline(4, 60.0, 100.0)], 2.0),
        ([baseline(4, 20.0, 100.0, none_us=1e6)], 0.2),
        ([baseline(2, 80.0, 100.0), baseline(2, 40.0, 100.0)], 0.2),
        ([baseline(4, 500.0, 100.0), baseline(4, 500.0, None)], 0.2),
    ],
    ids=["at once", "within", "far within", "slow without overlap", "operators together", "no time on one rank"],
)
def test_other_sizes_can(baselines: list[Result], tolerance: float) -> None:
    assert cannot_scale(baselines, tolerance) is None
