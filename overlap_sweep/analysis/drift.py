"""How the none baseline, measured again beside every point, moved in the course of a sweep."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from overlap_sweep import space
from overlap_sweep.analysis.points import Point

NOTABLE = 0.05
"""From this change on the report speaks of drift."""


@dataclass(frozen=True)
class Drift:
    """The none times of one operator's pass at one TP size, in the order of measuring; times in microseconds."""

    tp_size: int
    operator: str
    pass_name: str
    measurements: int
    median_us: float
    lowest_us: float
    highest_us: float
    change: float
    """Median of the later half over the median of the earlier half, minus 1."""


def baseline_drift(points: Iterable[Point]) -> list[Drift]:
    """For everything of one case whose baseline was measured at least twice."""
    measured: dict[tuple[int, str, str], list[tuple[str, float]]] = defaultdict(list)
    for point in points:
        if point.result:
            for pass_name in space.PASSES:
                key = point.config["tp_size"], point.config["operator"], pass_name
                measured[key].append((point.result.started or "", point.result.times[pass_name].none.median_us))
    drifts = []
    for key, timed in sorted(measured.items()):
        times = [time_us for _, time_us in sorted(timed)]
        half = len(times) // 2
        if half:
            change = statistics.median(times[-half:]) / statistics.median(times[:half]) - 1
            drifts.append(Drift(*key, len(times), statistics.median(times), min(times), max(times), change))
    return drifts
