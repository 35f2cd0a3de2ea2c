"""How long a point may take, from how long its like took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from overlap_sweep import workloads
from overlap_sweep.results.run_directory import Result

LEAST_S = 30.0
"""A first pass may compile, and a profile may be written: no reason to give up."""


class TimeLimits:
    """Learns from every result that it is shown."""

    def __init__(self) -> None:
        self._longest_s: dict[tuple[Any, ...], float] = defaultdict(float)

    def learn(self, result: Result) -> None:
        if result.status == "ok" and result.wall_s and not result.reused_from:
            kind = _kind(result.point)
            self._longest_s[kind] = max(self._longest_s[kind], result.wall_s)

    def limit_s(self, point: Mapping[str, Any]) -> float:
        """`runtime.timeout_s`, and less where points of this kind were measured."""
        runtime = point["runtime"]
        most_s, factor = float(runtime["timeout_s"]), runtime["timeout_factor"]
        longest_s = self._longest_s.get(_kind(point))
        if not longest_s or not factor:
            return most_s
        return min(most_s, max(LEAST_S, factor * longest_s))


def _kind(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what decides, roughly, how long a point takes."""
    workload, asked = workloads.of(point), point["workload"]
    of_point = (point["model"]["name"], workload.world_size(point), point["backend"], point["precision"])
    of_workload = (workload.name, workload.subject(point), asked["tokens"], asked["repeats"], *workload.cost(point))
    return (*of_point, point["runtime"]["device"], *of_workload)


limits = TimeLimits()
"""Of this process."""
