"""Whether implementations that are given the same weights and data compute the same: their losses, step by step."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from overlap_sweep.workloads.tp_training.result import TpTrainingStep

K = TypeVar("K")


class Tolerance(NamedTuple):
    """Relative differences that rounding explains."""

    loss: float
    grad_norm: float


def tolerance_of(precision: str) -> Tolerance:
    """bf16 and fp16 keep 8 and 11 bits of a number, and every implementation adds in another order."""
    return Tolerance(1e-4, 1e-3) if precision == "fp32" else Tolerance(1e-2, 5e-2)


class Difference(NamedTuple):
    """Of one run from what the others compute."""

    what: str
    """`loss` or `gradient norm`."""
    step: int
    relative: float
    """Infinite where one of them is no number."""


class Comparison(NamedTuple):
    """Of one run with the others of the same data."""

    largest: Difference | None
    """Of its losses; None where all are no numbers."""
    deviates: Difference | None
    """The first that is beyond the tolerance; None where it computes the same."""


def compare(votes: Mapping[str, Mapping[K, Sequence[TpTrainingStep]]], tolerance: Tolerance) -> dict[K, Comparison]:
    """By run. `votes`: by who computed, the steps of each of their runs, warm-up steps among them. Each is held against
    the median of all, so that one that is wrong among three or more tells itself; of two each is held against the
    other. At least two."""
    assert len(votes) > 1
    steps = [{run: {step.step: step for step in of_run} for run, of_run in runs.items()} for runs in votes.values()]
    numbers = sorted(set.intersection(*(set(of_run) for runs in steps for of_run in runs.values())))
    found: dict[K, Comparison] = {}
    for runs in steps:
        others = steps if len(steps) > 2 else [other for other in steps if other is not runs]
        against = [list(other.values()) for other in others]
        found |= {run: _compare(of_run, against, numbers, tolerance) for run, of_run in runs.items()}
    return found


def _compare(
    run: Mapping[int, TpTrainingStep],
    against: Sequence[Sequence[Mapping[int, TpTrainingStep]]],
    numbers: Iterable[int],
    tolerance: Tolerance,
) -> Comparison:
    largest: Difference | None = None
    deviates: Difference | None = None
    for number in numbers:
        losses = _median(_median(one[number].loss for one in runs) for runs in against)
        norms = _median(_median(one[number].grad_norm for one in runs) for runs in against)
        loss = Difference("loss", number, _relative(run[number].loss, losses))
        norm = Difference("gradient norm", number, _relative(run[number].grad_norm, norms))
        if run[number].loss is not None and (largest is None or loss.relative > largest.relative):
            largest = loss
        if deviates is None and loss.relative > tolerance.loss:
            deviates = loss
        if deviates is None and norm.relative > tolerance.grad_norm:
            deviates = norm
    return Comparison(largest, deviates)


def _median(values: Iterable[float | None]) -> float | None:
    """None where most are no numbers."""
    of_all = list(values)
    known = [value for value in of_all if value is not None]
    return statistics.median(known) if 2 * len(known) >= len(of_all) else None


def _relative(value: float | None, reference: float | None) -> float:
    if value is None or reference is None:
        return 0.0 if value is reference else float("inf")
    return abs(value - reference) / abs(reference) if reference else float("inf") if value else 0.0
