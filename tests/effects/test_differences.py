"""What counts as a difference between two recordings, on made traces."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from overlap_sweep.effects import Difference
from overlap_sweep.effects.comparison import effect
from overlap_sweep.effects.differences import differences
from overlap_sweep.effects.fingerprint import Fingerprint, fingerprint_of
from tests.timeline import COMPUTE, Timeline

GEMMS = 4


def training(
    directory: Path, calls: Sequence[Sequence[int]], *, rank: int = 0, marked: bool = True, **options: int
) -> Fingerprint:
    """Makes a rank of some steps of GEMMS backward GEMMs. `calls`: by step the numbers of GEMMs after which an
    all-reduce is launched. `options`: of the all-reduces."""
    made, at = Timeline(rank), 10_000.0
    for number, own in enumerate(calls):
        start = at - 600
        made.function("aten::mm", at - 590, at - 580)
        made.kernel(at, at + 90, launch=at - 585)
        at += 100
        for i in range(GEMMS):
            made.backward(at - 500, at - 490)
            made.kernel(at, at + 90, launch=at - 498, thread=2)
            at += 100
            if i + 1 in own:
                made.collective("all_reduce", at, at + 50, launch=at - 594, thread=2, **options)
        at += 1_000
        if marked:
            made.step(number + 1, start, at - 600)
    directory.mkdir(exist_ok=True)
    return fingerprint_of(made.facts(directory))


def aspects(found: Sequence[Difference]) -> set[str]:
    return {one.aspect for one in found}


def test_equal_recordings_do_not_differ(tmp_path: Path) -> None:
    before, after = (training(tmp_path / name, [[1, 3]] * 3) for name in ("before", "after"))

    assert differences([before], [after]) == []


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ([[1, 3]] * 3, set()),
        ([[1]] * 3, {"calls"}),
        # One step of the other recording has as many.
        ([[1], [1], [1, 3]], set()),
        ([[1, 4]] * 3, {"position"}),
        ([[1, 4], [1, 4], [1, 3]], set()),
        # The last step of both is cut.
        ([[1, 4], [1, 4], [1, 4], []], {"position"}),
        ([[1], [1], [1], []], {"calls"}),
        ([[]] * 3, {"calls"}),
    ],
)
def test_all_steps_must_differ(tmp_path: Path, after: list[list[int]], expected: set[str]) -> None:
    before = [[1, 3]] * 3 + [[]] * (len(after) - 3)
    found = differences([training(tmp_path / "before", before)], [training(tmp_path / "after", after)])

    assert aspects(found) == expected


def test_sizes_and_streams_are_told(tmp_path: Path) -> None:
    before = training(tmp_path / "before", [[1, 3]] * 2)
    larger = training(tmp_path / "larger", [[1, 3]] * 2, elements=1 << 24)
    beside = training(tmp_path / "beside", [[1, 3]] * 2, stream=COMPUTE)

    assert [one.sentence for one in differences([before], [larger])] == [
        "2 all_reduce of 2.1 MB became 2 all_reduce of 33.6 MB (bwd, 2 ranks)"
    ]
    assert [one.sentence for one in differences([before], [beside])] == [
        "all_reduce runs on the stream of computation, before on a stream of its own (bwd, 2 ranks)"
    ]


def test_a_launch_that_one_rank_makes_later_is_no_change(tmp_path: Path) -> None:
    before = [training(tmp_path / f"before{rank}", [[1, 3]] * 3, rank=rank) for rank in (0, 1)]
    late = [
        training(tmp_path / "late0", [[1, 3]] * 3, rank=0),
        training(tmp_path / "late1", [[1, 4]] * 3, rank=1),
    ]
    fewer = [late[0], training(tmp_path / "fewer1", [[1]] * 3, rank=1)]

    assert differences(before, late) == []
    (found,) = differences(before, fewer)
    assert found.ranks == [1]
    assert found.sentence.endswith("(only on rank 1)")


def test_steps_need_no_mark(tmp_path: Path) -> None:
    before = training(tmp_path / "before", [[1, 3]] * 3, marked=False)
    after = training(tmp_path / "after", [[1]] * 3, marked=False)

    assert aspects(differences([before], [after])) == {"calls"}


def test_a_single_step_is_noted(tmp_path: Path) -> None:
    before, after = (training(tmp_path / name, [[1, 3]]) for name in ("before", "after"))

    found = effect("after", [after], "before", [before], {})

    assert not found.changed
    assert "A recording has one step: what varies from step to step anyway may count as a change." in found.notes
