"""Finds what computation and communication cost each other beside each other: from those of the trace that ran beside
each other and alone, or from measurements on another machine where it has none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.slowed import slowed_gemms
from overlap_sweep.predict.calibration import calibrations, chosen
from overlap_sweep.trace.intervals import Measure

if TYPE_CHECKING:
    from overlap_sweep.predict.graph import Node

MOST_LOST = 0.75
"""Most of the time beside communication that computation can have lost to it."""

BESIDE, ALONE = 0.5, 0.1
"""Shares of a node's time from which on it ran beside others, and up to which it ran alone."""

USUAL_BLOCKS, GEMM_SLOWDOWN, COMM_SLOWDOWN = 24, 0.38, 0.14
"""Two H200s, NCCL with 24 thread blocks: GEMMs beside all-reduces of 256 MB, and these beside GEMMs
(manual_connections_32 of docs/results/2026-11-23-diagnosis.md)."""


class Usual(NamedTuple):
    """What they cost each other where a trace does not show it, as shares of their times alone."""

    gemms: float
    comm: float
    gpus: str
    """Whose figures they are."""


def usual_contention(device: str, ranks: int | None, blocks: int = USUAL_BLOCKS) -> Usual:
    """Returns what was measured on this kind of GPU of collectives with so many thread blocks, or on two H200s."""
    known = [one for one in calibrations() if one.device == device and one.comm_slowdowns]
    if not known:
        return Usual(GEMM_SLOWDOWN, COMM_SLOWDOWN, "two H200s")
    own = chosen(known, device, ranks)
    return Usual(own.gemm_slowdown(blocks), own.comm_slowdown(blocks), own.gpus)


def set_contention(nodes: Sequence[Node], facts: RankFacts) -> bool:
    """Takes what they cost each other out of the durations of one rank's nodes, and sets their slowdowns. Returns
    whether the trace shows what communication costs GEMMs."""
    computing = [node for node in nodes if node.kind == "compute"]
    moving = [node for node in nodes if node.kind == "comm"]
    computed, moved = (
        [(node.recorded_ns[1] - node.duration_ns, node.recorded_ns[1]) for node in own] for own in (computing, moving)
    )
    beside_comm, beside_work = _within(computed, moved), _within(moved, computed)
    extra = {work: extra_ns for work, _, extra_ns in slowed_gemms(facts)}
    known = [
        (extra[node.work], beside_ns)
        for node, beside_ns in zip(computing, beside_comm, strict=True)
        if node.work in extra and beside_ns >= BESIDE * node.duration_ns
    ]
    blocks = max((node.call.blocks for node in moving if node.call and node.call.blocks), default=USUAL_BLOCKS)
    elsewhere = usual_contention(facts.device_name, facts.world_size, blocks)
    usual = slowdown_of(sum(one[0] for one in known), sum(one[1] for one in known)) if known else elsewhere.gemms
    of_comm = _comm_slowdown(moving, beside_work, elsewhere.comm)
    for node, beside_ns in zip(computing, beside_comm, strict=True):
        if node.is_gemm:
            seen = beside_ns > 0 and node.work in extra
            node.slowdown = slowdown_of(extra[node.work], beside_ns) if seen else usual
            node.duration_ns -= beside_ns * node.slowdown / (1 + node.slowdown)
    for node, beside_ns in zip(moving, beside_work, strict=True):
        node.slowdown = of_comm
        node.duration_ns -= beside_ns * of_comm / (1 + of_comm)
    return bool(known)


def slowdown_of(lost_ns: float, beside_ns: float) -> float:
    """Returns by what share of its time alone something takes longer that lost time in that beside others."""
    lost_ns = min(max(lost_ns, 0.0), MOST_LOST * beside_ns)
    return lost_ns / (beside_ns - lost_ns) if lost_ns else 0.0


def _comm_slowdown(moving: Iterable[Node], beside_ns: Iterable[float], usual: float) -> float:
    """Returns the slowdown of collectives beside computation, from those of the same kind and size that ran alone, or
    `usual` if there are none."""
    alone: dict[object, list[float]] = defaultdict(list)
    beside: dict[object, list[float]] = defaultdict(list)
    for node, own_ns in zip(moving, beside_ns, strict=True):
        if node.call and node.bytes and node.duration_ns:
            share, key = own_ns / node.duration_ns, (node.call.group, node.call.collective, node.bytes)
            if share <= ALONE:
                alone[key].append(node.duration_ns)
            elif share >= BESIDE:
                beside[key].append(node.duration_ns)
    ratios = [median(beside[key]) / median(alone[key]) - 1 for key in beside if key in alone]
    return max(0.0, median(ratios)) if ratios else usual


def _within(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> list[float]:
    """Returns how long others ran in each of the spans, in nanoseconds."""
    measured = Measure(np.array(others, np.int64).reshape(-1, 2))
    within: list[float] = measured.within(np.array(spans, np.int64).reshape(-1, 2)).tolist()
    return within
