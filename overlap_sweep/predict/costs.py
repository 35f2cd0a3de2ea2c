"""Estimates what a collective of another size would take, from those that were recorded: a latency and a rate for each
kind, fitted over the sizes that occur."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from overlap_sweep.predict.graph import Node

LATENCY_NS = 15_000.0
"""Of a collective of few bytes on NVLink, where the recorded ones all have about the same size: NCCL's all-reduce of
two and eight H200s takes 12 to 25 us (docs/results/2026-11-12-kernels.md)."""

OTHER_SIZE = 1.5
"""Sizes whose ratio is smaller say nothing of latency."""


SLOWEST_NS_PER_BYTE = 8.0
"""Of a link of 1 Gbit/s. What a collective takes beyond that is latency, if smaller ones are not faster."""

MOST_LATENCY = 0.5
"""Most of the time of a collective that is taken for latency."""

LEEWAY = (0.93, 1.07)
"""Least and most time of a collective of another size, over that of its cost."""


class Family(NamedTuple):
    """Collectives whose costs are alike."""

    group: str
    collective: str


@dataclass(frozen=True)
class Cost:
    latency_ns: float
    ns_per_byte: float

    def time_ns(self, size_bytes: float) -> float:
        return self.latency_ns + self.ns_per_byte * size_bytes


def family_of(node: Node) -> Family:
    assert node.call is not None
    return Family(node.call.group, node.call.collective)


def bus_share(collective: str, ranks: int | None) -> float:
    """Returns the part of a buffer that each rank sends, in a ring and at least; 0 if it is unknown."""
    if not ranks or ranks < 2:
        return 0.0
    return {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}.get(collective, 0.0) * (ranks - 1) / ranks


def costs_of(nodes: Iterable[Node]) -> dict[Family, Cost]:
    """Returns the costs of each kind of collective. Without the time in which one waited for other ranks, as far as
    they were matched; kinds of unknown sizes have none."""
    times: dict[Family, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for node in nodes:
        if node.kind == "comm" and node.bytes and node.duration_ns > 0:
            times[family_of(node)][node.bytes].append(node.duration_ns)
    return {family: cost_of({size: median(own) for size, own in by_size.items()}) for family, by_size in times.items()}


def latencies_ns(nodes: Sequence[Node]) -> list[float]:
    """Returns what of the time of each collective is latency, MOST_LATENCY of it at most; 0 of all else."""
    costs = costs_of(nodes)
    usual = Cost(LATENCY_NS, 0.0)
    return [
        min(costs.get(family_of(node), usual).latency_ns, MOST_LATENCY * node.duration_ns)
        if node.kind == "comm" and node.call
        else 0.0
        for node in nodes
    ]


def cost_of(times_ns: Mapping[int, float]) -> Cost:
    """Returns the latency and rate that fit times by size in bytes best, by relative errors."""
    sizes, times = np.array([*times_ns], float), np.array([*times_ns.values()], float)
    if sizes.max() >= OTHER_SIZE * sizes.min():
        columns = np.stack((1 / times, sizes / times), axis=1)
        (latency_ns, ns_per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
        if latency_ns >= 0 and ns_per_byte > 0:
            return Cost(float(latency_ns), float(ns_per_byte))
        if ns_per_byte <= 0:
            usual_ns, largest_bytes = float(np.median(times)), float(sizes.max())
            moving_ns = min(MOST_LATENCY * usual_ns, SLOWEST_NS_PER_BYTE * largest_bytes)
            return Cost(usual_ns - moving_ns, moving_ns / largest_bytes)
    largest = int(np.argmax(sizes))
    latency_ns = min(LATENCY_NS, MOST_LATENCY * float(times[largest]))
    return Cost(latency_ns, (float(times[largest]) - latency_ns) / float(sizes[largest]))
