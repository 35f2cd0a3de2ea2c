"""How the baselines, measured again and again, moved in the course of a sweep."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from overlap_sweep.overlap import space
from overlap_sweep.results.estimate import later_change
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.operator.result import OperatorTimes, distinct


@dataclass(frozen=True)
class Drift:
    """The times of a baseline of one operator's pass at one TP size, in the order of measuring; in microseconds."""

    tp_size: int
    operator: str
    pass_name: str
    baseline: str
    """`none` or `floor`, which are measured beside every point, or the library's `default`."""
    measurements: int
    median_us: float
    lowest_us: float
    highest_us: float
    change: float
    """Median of the later half over the median of the earlier half, minus 1."""


def baseline_drift(points: Iterable[Point]) -> list[Drift]:
    """For everything of one case whose baseline was measured at least twice."""
    results: dict[tuple[int, str], list[Result]] = defaultdict(list)
    for point in points:
        if point.result:
            results[point.config["tp_size"], point.config["operator"]].append(point.result)
    return [
        _drift(tp_size, operator, pass_name, baseline, times_us)
        for tp_size, operator in sorted(results)
        for pass_name in sorted(space.PASSES)
        for baseline, times_us in _baselines(results[tp_size, operator], pass_name).items()
        if len(times_us) > 1
    ]


def _baselines(results: Iterable[Result], pass_name: str) -> dict[str, list[float]]:
    """The medians of each baseline's distinct measurements in time order, in microseconds."""
    times = [
        result.measured_as(OperatorTimes).times[pass_name]
        for result in sorted(results, key=lambda result: result.started or "")
    ]
    defaults = distinct(beside.default for beside in times if beside.default)
    return {
        "none": [beside.none.median_us for beside in times],
        "floor": [beside.floor.median_us for beside in times],
        "default": [measured.default.median_us for measured in defaults],
    }


def _drift(tp_size: int, operator: str, pass_name: str, baseline: str, times_us: list[float]) -> Drift:
    return Drift(
        tp_size=tp_size,
        operator=operator,
        pass_name=pass_name,
        baseline=baseline,
        measurements=len(times_us),
        median_us=statistics.median(times_us),
        lowest_us=min(times_us),
        highest_us=max(times_us),
        change=later_change(times_us),
    )
