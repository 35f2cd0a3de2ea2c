"""One step of the slowest rank as it was recorded, and as it is replayed with a change: bars by kind and stream, few
enough to be drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

import msgspec
import numpy as np

from overlap_sweep.predict.graph import Node, StepGraph
from overlap_sweep.predict.predictions import parsed
from overlap_sweep.predict.replay import POWER, Replayed, kind_of, recorded, replay_at_power, spans_ns, step_us
from overlap_sweep.trace.intervals import Intervals, merge, rows_without_overlap, subtract

MOST_BARS = 80
"""Bars of a lane; of more, neighbours become one."""

MOST_STREAMS = 4
"""Streams of communication that have lanes of their own; more share as many as are busy at the same time."""

FINEST = 2000
"""Part of the picture's time by which the first neighbours are apart that become one bar."""

Shown = Literal["gemm", "compute", "comm", "wait", "bad"]
"""What a bar shows, as charts name its colour: `wait` of a collective until its last rank has come, `bad` communication
while nothing computes."""


class Bar(msgspec.Struct):
    """Microseconds from the start of the step."""

    start_us: float
    end_us: float
    shown: Shown
    name: str = ""
    """Of the first kernel, or the collective."""
    count: int = 1
    """Number of kernels."""


class Lane(msgspec.Struct):
    name: str
    bars: list[Bar]


class Step(msgspec.Struct):
    """A step of a rank."""

    passes: list[tuple[str, float, float]]
    """Pass, start and end of each stretch of matrix multiplications of one pass."""
    lanes: list[Lane]
    exposed: list[Bar]
    """When communication runs while nothing computes."""
    exposed_us: float


class Picture(msgspec.Struct):
    """A step without and with a change."""

    change: str
    rank: int
    """Index of the slowest rank of the recording."""
    step: int
    step_us: float
    """Mean of the steps with the change, as predicted."""
    before: Step
    after: Step
    merged_us: float
    """Kernels that are less apart may be one bar; 0: all have their own."""


def picture_of(graph: StepGraph, change: str) -> Picture:
    """Returns the step in the middle of the graph, without and with the change. CannotTell if that is not predicted."""
    singles, changed = parsed(change), graph.copy()
    for single, value in singles:
        single.apply(changed, value)
    overlaps = any(single.overlaps for single, _ in singles)
    times, original = replay_at_power(changed, graph, POWER if overlaps else 0.0), recorded(graph)
    spans = spans_ns(graph, original)
    rank, step = spans.index(max(spans)), graph.steps[len(graph.steps) // 2]
    (before, near_us), (after, near_after_us) = (
        _step(one, at, rank, step) for one, at in ((graph, original), (changed, times))
    )
    return Picture(change, rank, step, step_us(changed, times), before, after, max(near_us, near_after_us))


def _step(graph: StepGraph, times: Replayed, rank: int, step: int) -> tuple[Step, float]:
    """Returns the step, and how far apart kernels are that are one bar."""
    own = [
        place
        for place, node in enumerate(graph.nodes)
        if (node.rank, node.step) == (rank, step) and node.kind in ("compute", "comm")
    ]
    own.sort(key=lambda place: times.starts_ns[place])
    first_ns = times.starts_ns[own[0]]

    def bar(place: int, start_ns: float, end_ns: float, shown: Shown) -> Bar:
        node = graph.nodes[place]
        name = node.call.collective if node.call else node.name
        return Bar((start_ns - first_ns) / 1000, (end_ns - first_ns) / 1000, shown, name)

    def bars(place: int) -> list[Bar]:
        start_ns, moved_ns, end_ns = times.starts_ns[place], times.moved_ns[place], times.ends_ns[place]
        if graph.nodes[place].kind == "compute":
            return [bar(place, start_ns, end_ns, "gemm" if graph.nodes[place].is_gemm else "compute")]
        moved_ns = max(start_ns, moved_ns)
        waited = [bar(place, start_ns, moved_ns, "wait")] if moved_ns > start_ns else []
        return [*waited, bar(place, moved_ns, end_ns, "comm")]

    by_lane: dict[tuple[bool, str, int], list[int]] = defaultdict(list)
    streams = {graph.nodes[place].lane for place in own if graph.nodes[place].call}
    for place in own:
        node = graph.nodes[place]
        stream = node.lane if len(streams) <= MOST_STREAMS else 0
        by_lane[(True, "", stream) if node.call else (False, kind_of(node), 0)].append(place)
    lanes, apart_us = [], 0.0
    for (is_comm, name, _), places in sorted(by_lane.items(), key=lambda one: (one[0][0], one[0][1] != "GEMMs")):
        for row in rows_without_overlap((times.starts_ns[place], times.ends_ns[place]) for place in places):
            merged, near_us = _merged([one for i in row for one in bars(places[i])])
            apart_us = max(apart_us, near_us)
            lanes.append(Lane(_collectives(graph.nodes[places[i]] for i in row) if is_comm else name, merged))
    exposed = _exposed(graph, times, own, first_ns)
    exposed_us = sum(one.end_us - one.start_us for one in exposed)
    gemms = [place for place in own if graph.nodes[place].is_gemm]
    passes = [
        (pass_, *((ns - first_ns) / 1000 for ns in (times.starts_ns[same[0]], times.ends_ns[same[-1]])))
        for pass_, places in groupby(gemms, key=lambda place: graph.nodes[place].pass_)
        for same in [list(places)]
    ]
    return Step(passes, lanes, _merged(exposed)[0], exposed_us), apart_us


def _collectives(nodes: Iterable[Node]) -> str:
    return ", ".join(dict.fromkeys(node.call.collective for node in nodes if node.call))


def _merged(bars: Sequence[Bar]) -> tuple[list[Bar], float]:
    """Returns at most MOST_BARS bars, and how far apart those are that have become one."""
    near_us = 0.0
    found = list(bars)
    while len(found) > MOST_BARS:
        near_us = near_us * 2 or max(bar.end_us for bar in bars) / FINEST
        found = []
        for bar in bars:
            # Short waits cannot be seen.
            if bar.shown == "wait" and bar.end_us - bar.start_us < near_us:
                continue
            last = found[-1] if found else None
            if last and last.shown == bar.shown and bar.start_us - last.end_us < near_us:
                last.end_us, last.count = bar.end_us, last.count + 1
            else:
                found.append(msgspec.structs.replace(bar))
    return found, near_us


def _exposed(graph: StepGraph, times: Replayed, own: Sequence[int], first_ns: float) -> list[Bar]:
    """Returns when communication runs and nothing computes."""

    def union(kind: str) -> Intervals:
        spans = [(times.starts_ns[one], times.ends_ns[one]) for one in own if graph.nodes[one].kind == kind]
        return merge(np.array(spans, np.int64).reshape(-1, 2))

    found = subtract(union("comm"), union("compute")).tolist()
    return [Bar((start - first_ns) / 1000, (end - first_ns) / 1000, "bad") for start, end in found]
