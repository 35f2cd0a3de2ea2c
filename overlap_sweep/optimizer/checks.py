"""Says why a trial must not win, however fast it is: it computes something else, or needs too much memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from overlap_sweep.optimizer.candidates import Allowed
from overlap_sweep.results.points import Point, read_points
from overlap_sweep.results.run_directory import Result
from overlap_sweep.study.equality import equality
from overlap_sweep.workloads.job.result import memory_share
from overlap_sweep.workloads.job.study import STUDY


def objection(result: Result, directory: Path, reference: Sequence[Point], allow: Allowed, memory: float) -> str:
    """Returns why an `ok` trial must not be used; empty if it may. `reference`: the runs of the command as it is;
    `memory`: the largest share of a GPU's memory."""
    share = memory_share(result)
    if share is not None and share > memory:
        return f"it uses {share:.0%} of the GPU's memory, more than {memory:.0%}"
    if allow == "training":
        return ""
    found = equality([STUDY.computed(one) for one in reference], [STUDY.computed(point_of(directory, result.name))])
    wrong = ("differs",) if allow == "rounding" else ("differs", "rounding")
    if found.verdict in wrong and not (found.verdict == "rounding" and _vary(reference)):
        return f"it does not compute the same: {found.in_words}"
    return ""


def point_of(directory: Path, name: str) -> Point:
    (point,) = read_points(directory / name).points
    return point


def _vary(reference: Sequence[Point]) -> bool:
    """Returns whether runs of the command as it is differ by rounding among themselves."""
    first, *others = [STUDY.computed(one) for one in reference]
    return any(equality([first, first], [one]).verdict != "equal" for one in others)
