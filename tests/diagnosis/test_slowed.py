"""How much slower GEMMs are next to communication: where one kernel multiplies several sizes, as persistent ones do
with the same number of thread blocks, and where GEMMs run behind each other."""

from collections.abc import Sequence
from pathlib import Path

from overlap_sweep.diagnosis.slowed import slowed_gemms
from tests.timeline import SIDE, Timeline

BEFORE = "elementwise_kernel"


def lost(directory: Path, made: Timeline, end: float) -> list[tuple[float, float]]:
    """Time alone and beyond it of each GEMM next to communication, in microseconds."""
    made.step(1, -2000, end)
    return [(alone / 1000, extra / 1000) for _, alone, extra in slowed_gemms(made.facts(directory))]


def in_turn(took: Sequence[float], *, marked: Sequence[int] = ()) -> tuple[Timeline, list[float]]:
    """GEMMs of one kernel one after the other, those `marked` after two other kernels; and their starts."""
    made, now, starts = Timeline(), 0.0, []
    for place, us in enumerate(took):
        if place in marked:
            for _ in range(2):
                made.kernel(now, now + 10, BEFORE)
                now += 10
        starts.append(now)
        made.kernel(now, now + us)
        now += us
    return made, [*starts, now]


def test_a_gemm_after_the_same_kernels_is_the_same_however_slow_it_became(tmp_path: Path) -> None:
    """A wave of thread blocks has become two."""
    made, starts = in_turn([500, 200, 1000, 500, 200, 1000, 990], marked=(0, 3, 6))
    made.collective("all_reduce", starts[6], starts[7])

    assert lost(tmp_path, made, starts[7]) == [(500.0, 490.0)]


def test_a_gemm_that_is_alone_nowhere_may_be_of_another_size(tmp_path: Path) -> None:
    made, starts = in_turn([500, 500, 500, 1000, 1000, 1000, 800], marked=(6,))
    made.collective("all_reduce", starts[6], starts[7])

    assert lost(tmp_path, made, starts[7]) == []


def test_a_gemm_that_is_hardly_slower_is_of_the_size_that_is_nearest(tmp_path: Path) -> None:
    made, starts = in_turn([500, 500, 500, 1000, 1000, 1000, 600], marked=(6,))
    made.collective("all_reduce", starts[6], starts[7])

    assert lost(tmp_path, made, starts[7]) == [(500.0, 100.0)]


def test_more_than_twice_the_only_size_is_another_one(tmp_path: Path) -> None:
    made, starts = in_turn([500, 500, 500, 1300])
    made.collective("all_reduce", starts[3], starts[4])

    assert lost(tmp_path, made, starts[4]) == []


def test_time_behind_another_gemm_is_not_lost_to_communication(tmp_path: Path) -> None:
    """Pieces of a ring exchange are launched on two streams: the second waits for multiprocessors."""
    made, starts = in_turn([500, 500, 500])
    made.kernel(starts[3], starts[3] + 500)
    made.kernel(starts[3] + 300, starts[3] + 710, stream=SIDE)
    made.collective("all_gather", starts[3] + 300, starts[3] + 710)

    assert lost(tmp_path, made, starts[3] + 710) == [(500.0, 0.0)]


def test_a_single_gemm_before_which_communication_may_have_begun_is_no_size(tmp_path: Path) -> None:
    made, starts = in_turn([900, 500, 500, 500, 500, 900, 900])
    made.collective("all_reduce", starts[5], starts[7])

    assert lost(tmp_path, made, starts[7]) == [(500.0, 400.0)] * 2
