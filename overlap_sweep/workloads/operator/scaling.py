"""Does a larger TP size pay? Time(TP=n) should be Time(TP=1) / n, up to a tolerance."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from overlap_sweep.overlap import space
from overlap_sweep.workloads.operator.choice import PassChoice

ROUNDING = 1e-9
"""600 x 4 / 2000 is 1.2 and must not fail a tolerance of 0.2 for the last binary digit."""


@dataclass(frozen=True)
class OperatorScaling:
    """One operator's times over the TP sizes (in microseconds), and what follows from them."""

    optimal_tp_size: int | None
    """The largest that scales; None without a TP=1 baseline."""
    scaling_efficient: dict[int, bool]
    scaling_ratios: dict[int, float]
    """t_n x n / t_1."""
    e2e_times: dict[int, float]
    reason: str


@dataclass(frozen=True)
class Scaling:
    """TP scaling of a case."""

    optimal_tp_size: int | None
    """By the sum over the operators that were measured at every TP size."""
    tolerance: float
    results: dict[str, OperatorScaling] = field(default_factory=dict)
    reason: str = ""


def scale(e2e_times: Mapping[int, float], tolerance: float) -> OperatorScaling:
    """Judge every TP size against TP=1. `e2e_times` are microseconds by TP size."""
    times = dict(sorted(e2e_times.items()))
    if 1 not in times:
        return OperatorScaling(None, {}, {}, times, "No TP=1 baseline was measured.")
    ratios = {tp_size: time_us * tp_size / times[1] for tp_size, time_us in times.items()}
    efficient = {tp_size: ratio <= 1 + tolerance + ROUNDING for tp_size, ratio in ratios.items()}
    verdicts = [f"TP={tp}: {'EFFICIENT' if good else 'NOT efficient'}" for tp, good in efficient.items() if tp > 1]
    reason = f"Baseline: TP=1 (no TP) @ {times[1]:.1f}us. {'; '.join(verdicts)}"
    optimal = max(tp_size for tp_size, good in efficient.items() if good)
    return OperatorScaling(optimal, efficient, ratios, times, reason)


def scale_case(choices: Sequence[PassChoice], tolerance: float) -> Scaling:
    """Scaling of every operator of a case, with its chosen settings, forward and backward together.

    TP=1 is measured by points of that size, or else by the unsharded operator that the other points time beside
    themselves.
    """
    times: dict[str, dict[int, float]] = {operator: {} for operator in space.OPERATORS}
    for operator, of_operator in times.items():
        own = [choice for choice in choices if choice.operator == operator]
        for tp_size in {choice.tp_size for choice in own}:
            of_operator[tp_size] = sum(choice.chosen.time_us for choice in own if choice.tp_size == tp_size)
        if 1 not in of_operator and (tp1_us := _tp1_us(own)):
            of_operator[1] = tp1_us
    measured = {operator: of_operator for operator, of_operator in times.items() if of_operator}
    results = {operator: scale(of_operator, tolerance) for operator, of_operator in measured.items()}
    tp_sizes = {tp_size for of_operator in measured.values() for tp_size in of_operator}
    complete = [operator for operator, of_operator in measured.items() if set(of_operator) == tp_sizes]
    if not complete:
        return Scaling(None, tolerance, results, "No operator was measured at every TP size.")
    total = scale({tp: sum(measured[operator][tp] for operator in complete) for tp in tp_sizes}, tolerance)
    return Scaling(total.optimal_tp_size, tolerance, results, f"Sum over {', '.join(complete)}. {total.reason}")


def _tp1_us(choices: Sequence[PassChoice]) -> float | None:
    """Forward and backward of the unsharded operator: the median over the TP sizes that it was measured beside."""
    passes = {name: [c.tp1_us for c in choices if c.pass_name == name and c.tp1_us] for name in space.PASSES}
    if not all(passes.values()):
        return None
    return sum(map(statistics.median, passes.values()))
