"""Points that were measured more than once, with `repetition=0,1,2` or in several sweeps: how well they repeat."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from overlap_sweep.overlap import space
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.operator.result import OperatorTimes

_SAME = ("model", "tp_size", "operator", "phase", "phases", "method", *space.KNOBS)


@dataclass(frozen=True)
class Repeats:
    """The medians of one pass of the same point, in microseconds."""

    point: str
    """The first one's name."""
    pass_name: str
    medians_us: list[float]

    @property
    def spread(self) -> float:
        """(highest - lowest) / median."""
        return (max(self.medians_us) - min(self.medians_us)) / statistics.median(self.medians_us)


def repeated(points: Iterable[Point]) -> list[Repeats]:
    """Every pass that a point of one case is about, where the point was measured at least twice; widest spread first.

    The times are as measured, not compared through the baselines beside them: this is what repeating shows.
    """
    same: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.result and not point.result.launch_bound:
            same[json.dumps([point.config.get(name) for name in _SAME], sort_keys=True)].append(point)
    found = [
        Repeats(group[0].name, name, [point.measured_as(OperatorTimes).times[name].point.median_us for point in group])
        for group in same.values()
        if len(group) > 1
        for name in space.passes(group[0].config)
    ]
    return sorted(found, key=lambda repeats: -repeats.spread)
