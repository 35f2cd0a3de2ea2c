"""Replays a graph of steps: when everything runs if each node starts as soon as what it comes after is over.

Computation and communication that moves data are slower beside each other, by the shares that the graph has. A
collective moves data once all its ranks have come.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from typing import NamedTuple

from overlap_sweep.diagnosis import NEVER
from overlap_sweep.predict.graph import CannotTell, Kind, Node, StepGraph, moved_at_ns


class Replayed(NamedTuple):
    """When each node started and ended, in nanoseconds on the clock of the first rank."""

    starts_ns: list[float]
    ends_ns: list[float]
    moved_ns: list[float]
    """When each collective had all its ranks; of all else when it started."""
    waited_for: list[int]
    """By node: the one that it came after, of several that which was over last, of a collective the rank that came
    last; NEVER if there is none."""


_START, _END = 0, 1


_Places = list[list[tuple[int, float]]]


def _followers(graph: StepGraph) -> tuple[_Places, _Places, dict[int, list[int]]]:
    """Returns for each node what may start after its end, and after its start, with lags; and the nodes that meet."""
    by_end: _Places = [[] for _ in graph.nodes]
    by_start: _Places = [[] for _ in graph.nodes]
    members: dict[int, list[int]] = defaultdict(list)
    for place, node in enumerate(graph.nodes):
        for edge in node.after:
            (by_start if edge.why == "queue" else by_end)[edge.node].append((place, edge.lag_ns))
        if node.meeting != NEVER:
            members[node.meeting].append(place)
    return by_end, by_start, members


def replay(graph: StepGraph, followers: tuple[_Places, _Places, dict[int, list[int]]] | None = None) -> Replayed:
    """Returns when everything runs. CannotTell if something would wait for itself, through others."""
    nodes = graph.nodes
    by_end, by_start, members = followers or _followers(graph)
    waiting = [len(node.after) for node in nodes]
    ready_ns = [float("-inf")] * len(nodes)
    waited_for = [NEVER] * len(nodes)
    missing = {meeting: len(own) for meeting, own in members.items()}
    starts_ns, ends_ns, moved_ns = ([0.0] * len(nodes) for _ in range(3))
    left_ns, since_ns, version = [0.0] * len(nodes), [0.0] * len(nodes), [0] * len(nodes)
    active: dict[Kind, list[set[int]]] = {kind: [set() for _ in range(graph.ranks)] for kind in ("compute", "comm")}
    events: list[tuple[float, int, int, int]] = []
    for place, node in enumerate(nodes):
        if not node.after:
            heappush(events, (node.delay_ns, place, _START, 0))
    done = 0

    def release(before: int, places: list[tuple[int, float]], now_ns: float) -> None:
        for after, lag_ns in places:
            waiting[after] -= 1
            if now_ns + lag_ns >= ready_ns[after]:
                ready_ns[after], waited_for[after] = now_ns + lag_ns, before
            if not waiting[after]:
                heappush(events, (ready_ns[after] + nodes[after].delay_ns, after, _START, 0))

    def begin(place: int, now_ns: float) -> None:
        node = nodes[place]
        left_ns[place] = node.duration_ns
        change(node.rank, node.kind, place, now_ns)
        schedule(place, now_ns)

    def change(rank: int, kind: Kind, place: int, now_ns: float) -> None:
        """Adds a node to what runs on its rank, or takes it away; the other kind then runs slower or faster."""
        own, other = active[kind][rank], active["comm" if kind == "compute" else "compute"][rank]
        had = bool(own)
        own ^= {place}
        if bool(own) is not had:
            for one in other:
                slower = 1 + nodes[one].slowdown if had else 1.0
                left_ns[one] = max(0.0, left_ns[one] - (now_ns - since_ns[one]) / slower)
                schedule(one, now_ns)

    def schedule(place: int, now_ns: float) -> None:
        node = nodes[place]
        since_ns[place] = now_ns
        version[place] += 1
        slower = 1 + node.slowdown if active["comm" if node.kind == "compute" else "compute"][node.rank] else 1.0
        heappush(events, (now_ns + left_ns[place] * slower, place, _END, version[place]))

    def held_until_ns(place: int, now_ns: float) -> float:
        """Returns when a node starts that a matrix multiplication on another stream may hold."""
        node = nodes[place]
        assert node.held_ns is not None
        beside = bool(active["comm"][node.rank])
        ends = (
            since_ns[one] + left_ns[one] * (1 + nodes[one].slowdown if beside else 1.0)
            for one in active["compute"][node.rank]
            if nodes[one].is_gemm and nodes[one].lane != node.lane
        )
        return max(ends, default=now_ns) + node.held_ns

    while events:
        now_ns, place, what, of_version = heappop(events)
        node = nodes[place]
        if what == _START:
            if node.held_ns is not None and not of_version:
                until_ns = held_until_ns(place, now_ns)
                if until_ns > now_ns:
                    heappush(events, (until_ns, place, _START, 1))
                    continue
            starts_ns[place] = moved_ns[place] = now_ns
            release(place, by_start[place], now_ns)
            if node.kind == "compute":
                begin(place, now_ns)
            elif node.kind == "comm":
                if node.meeting == NEVER:
                    begin(place, now_ns)
                else:
                    missing[node.meeting] -= 1
                    if not missing[node.meeting]:
                        for one in members[node.meeting]:
                            if one != place:
                                waited_for[one] = place
                            moved_ns[one] = now_ns
                            begin(one, max(now_ns, starts_ns[one]))
            else:
                ends_ns[place] = now_ns
                done += 1
                release(place, by_end[place], now_ns)
            continue
        if of_version != version[place]:
            continue
        change(node.rank, node.kind, place, now_ns)
        ends_ns[place] = now_ns
        done += 1
        release(place, by_end[place], now_ns)
    if done < len(nodes):
        raise CannotTell("With it kernels or ranks would wait for each other forever, as far as the trace shows.")
    return Replayed(starts_ns, ends_ns, moved_ns, waited_for)


def recorded(graph: StepGraph) -> Replayed:
    """Returns when everything ran."""
    starts_ns, ends_ns = ([node.recorded_ns[i] for node in graph.nodes] for i in (0, 1))
    return Replayed(starts_ns, ends_ns, moved_at_ns(graph), [NEVER] * len(starts_ns))


def step_us(graph: StepGraph, times: Replayed) -> float:
    """Returns the time of a step of the slowest rank: the time from its first kernel to the end of its last, over the
    number of steps."""
    return max(spans_ns(graph, times)) / max(len(graph.steps), 1) / 1000


def spans_ns(graph: StepGraph, times: Replayed) -> list[float]:
    """Returns the time of each rank from its first kernel to the end of its last."""
    first = [float("inf")] * graph.ranks
    last = [float("-inf")] * graph.ranks
    for node, start_ns, end_ns in zip(graph.nodes, times.starts_ns, times.ends_ns, strict=True):
        if node.kind in ("compute", "comm"):
            first[node.rank] = min(first[node.rank], start_ns)
            last[node.rank] = max(last[node.rank], end_ns)
    return [end - start for start, end in zip(first, last, strict=True)]


def parts_us(graph: StepGraph, times: Replayed) -> dict[str, float]:
    """Returns what each kind takes of a step, the mean over the steps and ranks: GEMMs, other computation, each
    collective from when its last rank has come, and the time in which nothing computes. At the same time they count for
    each."""
    took: dict[str, float] = defaultdict(float)
    until_ns = [float("-inf")] * graph.ranks
    running = [place for place, node in enumerate(graph.nodes) if node.kind in ("compute", "comm")]
    for place in sorted(running, key=lambda place: times.starts_ns[place]):
        node = graph.nodes[place]
        took[kind_of(node)] += times.ends_ns[place] - times.moved_ns[place]
        if node.kind == "compute":
            if until_ns[node.rank] > float("-inf"):
                took[NOTHING_COMPUTES] += max(0.0, times.starts_ns[place] - until_ns[node.rank])
            until_ns[node.rank] = max(until_ns[node.rank], times.ends_ns[place])
    return {name: time_ns / max(graph.ranks * len(graph.steps), 1) / 1000 for name, time_ns in took.items()}


NOTHING_COMPUTES = "nothing computes"


def kind_of(node: Node) -> str:
    """Returns what a node counts as, such as `GEMMs` or `all_reduce bwd`."""
    if node.kind == "comm" and node.call:
        return f"{node.call.collective} {node.pass_}".strip()
    if node.kind == "compute":
        return "GEMMs" if node.is_gemm else "other computation"
    return "launches"


def replay_error(graph: StepGraph) -> float:
    """Returns by what share of the recorded step its replay as it is differs from it; 0 of a graph without steps."""
    recorded_us = step_us(graph, recorded(graph)) if graph.nodes else 0.0
    return step_us(graph, replay(graph)) / recorded_us - 1 if recorded_us > 0 else 0.0


ROUNDS = 5
"""Replays until clocks and times agree within a thousandth."""

POWER = 0.35
"""Exponent of how much slower matrix multiplications are on a GPU that computes for a larger part of the time: at its
limit of power a GPU that waits less runs at a lower clock. Fitted on two H200s (docs/results/2026-11-28-predict.md)."""


def replay_at_power(graph: StepGraph, original: StepGraph, power: float = POWER) -> Replayed:
    """Returns when everything runs if the clock follows how much of the time each rank multiplies matrices, compared
    with the original graph; with a power of 0 it does not. Changes the durations of the graph."""
    if not power:
        return replay(graph)
    usual_ns, changed_ns = _multiplying_ns(original), _multiplying_ns(graph)
    original_us = step_us(original, recorded(original))
    scale = [1.0] * graph.ranks
    # Only durations change.
    followers = _followers(graph)
    times = replay(graph, followers)
    for _ in range(ROUNDS):
        faster = original_us / step_us(graph, times)
        wanted = [
            (changed / usual * faster) ** power if usual and changed else 1.0
            for usual, changed in zip(usual_ns, changed_ns, strict=True)
        ]
        # Halfway, lest it swings around the solution.
        new = [(one * other) ** 0.5 for one, other in zip(scale, wanted, strict=True)]
        for node in graph.nodes:
            if node.kind == "compute" and node.is_gemm:
                node.duration_ns *= new[node.rank] / scale[node.rank]
        scale, times = new, replay(graph, followers)
    return times


def _multiplying_ns(graph: StepGraph) -> list[float]:
    """Returns how long each rank multiplies matrices, without communication beside it."""
    took = [0.0] * graph.ranks
    for node in graph.nodes:
        if node.kind == "compute" and node.is_gemm:
            took[node.rank] += node.duration_ns
    return took
