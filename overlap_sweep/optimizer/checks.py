"""Says why a trial must not win, however fast it is: it computes something else, was not in force, or needs too much
memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from overlap_sweep.optimizer.candidates import Allowed
from overlap_sweep.results.points import Point, read_points
from overlap_sweep.results.run_directory import Result
from overlap_sweep.study.analysis import analyse
from overlap_sweep.study.effects import with_effects
from overlap_sweep.study.equality import Verdict, with_equality
from overlap_sweep.workloads.job.result import memory_share
from overlap_sweep.workloads.job.study import STUDY

_WRONG: dict[Allowed, tuple[Verdict, ...]] = {
    "exact": ("differs", "rounding"),
    "rounding": ("differs",),
    "training": (),
}
"""What results must not be, by what is allowed."""


def objection(result: Result, directory: Path, reference: Sequence[Point], allow: Allowed, memory: float) -> str:
    """Returns why an `ok` trial must not be used; empty if it may. `reference`: the runs of the command as it is;
    `memory`: the largest share of a GPU's memory."""
    share = memory_share(result)
    if share is not None and share > memory:
        return f"it uses {share:.0%} of the GPU's memory, more than {memory:.0%}"
    point = point_of(directory, result.name)
    analyses = with_effects(STUDY, with_equality(STUDY, analyse(STUDY, [*reference, point])))
    row = next(row for one in analyses for row in one.rows if point in row.points)
    if (
        row.equality
        and row.equality.verdict in _WRONG[allow]
        and not (row.equality.verdict == "rounding" and _vary(reference))
    ):
        return f"it does not compute the same: {row.equality.in_words}"
    idle = [one for one in row.effect.settings if one.verdict == "not in force"] if row.effect else []
    return f"not in force: {idle[0].evidence}" if idle else ""


def point_of(directory: Path, name: str) -> Point:
    (point,) = read_points(directory / name).points
    return point


def _vary(reference: Sequence[Point]) -> bool:
    """Returns whether runs of the command as it is differ among themselves, by rounding or more."""
    first, *others = [STUDY.computed(one) for one in reference]
    return any(seen.difference(first[name]) for other in others for name, seen in other.items() if name in first)
