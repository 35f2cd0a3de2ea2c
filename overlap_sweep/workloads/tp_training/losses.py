"""Whether training runs on the same data have the same losses and gradient norms, apart from rounding."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.tp_training.config import Resolved
from overlap_sweep.workloads.tp_training.result import TpTrainingRun, TpTrainingStep


class Losses(NamedTuple):
    """Comparison of a run's losses and gradient norms with those of other runs on the same data."""

    largest: float
    """Largest relative difference of a loss; infinite if one of the two is NaN or infinite."""
    deviates: str
    """First difference beyond the tolerance, such as `loss is 6.4 instead of 6.6 at step 4`; empty if there is none."""


def tolerance_of(precision: str) -> dict[str, float]:
    """Returns the relative differences of losses and gradient norms that rounding explains: bf16 and fp16 keep 8 and 11
    bits, and every implementation adds in another order."""
    return {"loss": 1e-4, "grad_norm": 1e-3} if precision == "fp32" else {"loss": 1e-2, "grad_norm": 5e-2}


def losses_by_point(points: Iterable[Point], setting: Callable[[Point], Hashable]) -> dict[Path, Losses]:
    """Returns how the losses of points with the same data compare, by run directory. Implementations are compared with
    each other, or settings if there is only one implementation. The reference is the median of all, which shows a
    single wrong one among three or more; two are compared with each other."""
    found: dict[Path, Losses] = {}
    same_data = list(points)
    several = len({point.config_as(Resolved).impl for point in same_data}) > 1
    votes: dict[Hashable, dict[Path, list[TpTrainingStep]]] = defaultdict(dict)
    for point in same_data:
        who = point.config_as(Resolved).impl if several else setting(point)
        votes[who][point.directory] = point.measured_as(TpTrainingRun).steps
    tolerance = tolerance_of(same_data[0].config_as(Resolved).precision)
    for who, runs in votes.items():
        others = [list(other.values()) for name, other in votes.items() if len(votes) > 2 or name != who]
        if others:
            found |= {directory: _compared(steps, others, tolerance) for directory, steps in runs.items()}
    return found


def _compared(
    own: Sequence[TpTrainingStep], others: Sequence[Sequence[Sequence[TpTrainingStep]]], tolerance: Mapping[str, float]
) -> Losses:
    """Returns how the losses of `own` compare. `others`: by implementation, the steps of each of its runs."""
    largest, deviates = 0.0, ""
    for number, step in enumerate(own):
        for name, most in tolerance.items():
            value: float | None = getattr(step, name)
            reference = _median(_median(getattr(run[number], name) for run in runs) for runs in others)
            difference = _relative(value, reference)
            if difference > most and not deviates:
                deviates = f"{name} is {_number(value)} instead of {_number(reference)} at step {number}"
            if name == "loss":
                largest = max(largest, difference)
    return Losses(largest, deviates)


def deviation(result: Result, reference: Result) -> str:
    """Returns how an `ok` result's losses or gradient norms differ from those of another one on the same data beyond
    what rounding explains; empty if they don't, or if the data are not the same."""
    own, other = result.measured_as(TpTrainingRun).steps, reference.measured_as(TpTrainingRun).steps
    if own[-1].loss is None:
        return "the loss is NaN or infinite"
    if result.point_as(Resolved).dp_size != reference.point_as(Resolved).dp_size or len(own) != len(other):
        return ""
    return _compared(own, [[other]], tolerance_of(result.point_as(Resolved).precision)).deviates


def _median(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are not None; None if most are."""
    of_all = list(values)
    known = [value for value in of_all if value is not None]
    return statistics.median(known) if 2 * len(known) >= len(of_all) else None


def _relative(value: float | None, reference: float | None) -> float:
    if value is None or reference is None:
        return 0.0 if value is reference else math.inf
    return abs(value - reference) / abs(reference) if reference else math.inf if value else 0.0


def _number(value: float | None) -> str:
    return "NaN" if value is None else f"{value:.6g}"
