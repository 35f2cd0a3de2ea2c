"""Changes of how gradients are reduced: in which buckets, when, and how often."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median

from overlap_sweep.diagnosis import NEVER
from overlap_sweep.diagnosis.collectives import REDUCTIONS
from overlap_sweep.predict.changes.removal import remove
from overlap_sweep.predict.costs import LEEWAY, costs_of, family_of
from overlap_sweep.predict.graph import CannotTell, Edge, Node, StepGraph

FIRST_BUCKET_BYTES = 1_048_576
"""DistributedDataParallel's own, unless it is said: the first bucket is to start early."""


def in_buckets(graph: StepGraph, bucket_bytes: float, first_bytes: float = FIRST_BUCKET_BYTES) -> None:
    """Gradients are summed in buckets of this size, as soon as the backward pass has made them."""

    def sizes(total: float, finest: float) -> list[float]:
        found, left, limit = [], total, first_bytes
        while left > 0:
            # A bucket is closed by the gradient that fills it.
            size = min(left, max(limit, finest))
            if left - size < finest / 2:
                size = left
            found.append(size)
            left, limit = left - size, bucket_bytes
        return found

    _resum(graph, lambda own, finest: sizes(sum(node.bytes or 0 for node in own), finest))


def in_hooks(graph: StepGraph) -> None:
    """Gradients are summed one by one, as soon as the backward pass has made them, the last layer's first."""
    _resum(graph, lambda own, finest: [float(node.bytes or 0) for node in reversed(own)])


def _resum(graph: StepGraph, sizes: Callable[[list[Node], float], list[float]]) -> None:
    """Replaces the all-reduces of gradients by others. `sizes`: returns theirs in bytes, from the recorded ones of a
    step and the least bytes that a gradient has."""
    costs = costs_of(graph.nodes)
    meetings: dict[tuple[int, int, int], int] = {}
    next_meeting = 1 + max((node.meeting for node in graph.nodes), default=0)
    instead: dict[int, list[int]] = {}
    hosts_and_kernels: list[list[int]] = [[] for _ in range(graph.ranks)]
    for place, node in enumerate(graph.nodes):
        if node.kind in ("compute", "sync"):
            hosts_and_kernels[node.rank].append(place)
    for (rank, step), own in _reductions(graph, ("all_reduce",)).items():
        for number, chosen in enumerate(_by_microbatch(graph, own)):
            nodes = [graph.nodes[place] for place in chosen]
            if any(node.bytes is None for node in nodes):
                raise CannotTell("The trace does not have the sizes of the all-reduces.")
            made = _gradients_made(graph, rank, step, chosen)
            family = family_of(nodes[0])
            delay_ns = median(node.delay_ns for node in nodes)
            position, new = 0.0, list[int]()
            for count, size in enumerate(sizes(nodes, made.finest_bytes)):
                position += size
                producer = made.after(position)
                key = (step, number, count)
                meeting = meetings.setdefault(key, next_meeting + len(meetings)) if nodes[0].meeting != NEVER else NEVER
                edges = [Edge(producer, "needs")]
                edges += [Edge(new[-1], "stream")] if new else _after_calls(graph, nodes[0])
                graph.nodes.append(
                    Node(
                        *("comm", rank, step, costs[family].time_ns(size), nodes[0].recorded_ns, edges, delay_ns),
                        lane=nodes[0].lane,
                        pass_="bwd",
                        meeting=meeting,
                        call=nodes[0].call,
                        role="gradient",
                        bytes=round(size),
                        held_ns=0.0,
                        leeway=LEEWAY,
                    )
                )
                new.append(len(graph.nodes) - 1)
            _needed_after_backward(graph, hosts_and_kernels[rank], chosen)
            instead |= dict.fromkeys(chosen, new)
    if not instead:
        raise CannotTell("No all-reduce of gradients was recorded.")
    remove(graph, instead)


def _needed_after_backward(graph: StepGraph, own: Sequence[int], chosen: Sequence[int]) -> None:
    """Lets nothing of the backward pass wait for sums of gradients, but what follows it. `own`: the computation and
    waits of the rank."""
    step, summed = graph.nodes[chosen[0]].step, set(chosen)
    backward = [i for i in own if graph.nodes[i].step == step and graph.nodes[i].pass_ == "bwd"]
    last = backward[-1] if backward else chosen[-1]
    for place in own:
        node = graph.nodes[place]
        if place <= last:
            node.after = [edge for edge in node.after if not (edge.why == "needs" and edge.node in summed)]
    after = max(last, chosen[-1])
    following = next((place for place in own if place > after and graph.nodes[place].kind == "compute"), None)
    if following is not None:
        graph.nodes[following].after += [Edge(place, "needs") for place in chosen]


def _after_calls(graph: StepGraph, node: Node) -> list[Edge]:
    """Returns what communication on its stream it comes after: hooks launch on a stream that does not compute."""
    return [edge for edge in node.after if edge.why == "stream" and graph.nodes[edge.node].kind == "comm"]


@dataclass(frozen=True)
class _Made:
    """When a backward pass had made its gradients."""

    reached_bytes: list[float]
    """Bytes that were made when each of the `producers` had ended, ascending."""
    producers: list[int]
    finest_bytes: float
    """About the bytes of one gradient."""

    def after(self, position_bytes: float) -> int:
        """Returns the computation after which so many bytes are there."""
        for reached, producer in zip(self.reached_bytes, self.producers, strict=True):
            if reached >= position_bytes - 1:
                return producer
        return self.producers[-1]


def _gradients_made(graph: StepGraph, rank: int, step: int, chosen: list[int]) -> _Made:
    """Returns when gradients were there. Each call's were made between the call before it and itself, in proportion to
    the time of matrix multiplications there; those of calls without any between them together."""
    first, last = chosen[0], chosen[-1]
    gemms = [
        place
        for place in range(last)
        if (node := graph.nodes[place]).kind == "compute"
        and (node.rank, node.step, node.pass_, node.is_gemm) == (rank, step, "bwd", True)
    ]
    # Of the last microbatch alone.
    passes = [place for place in range(first) if graph.nodes[place].pass_ == "fwd" and graph.nodes[place].rank == rank]
    gemms = [place for place in gemms if not passes or place > passes[-1]]
    if not gemms:
        raise CannotTell("No matrix multiplication of the backward pass was recorded before the all-reduces.")
    reached: list[float] = []
    producers: list[int] = []
    total, begun = 0.0, 0
    for until, together in groupby(chosen, key=lambda place: bisect(gemms, place)):
        size = sum(graph.nodes[place].bytes or 0 for place in together)
        own = gemms[begun:until] or gemms[-1:]
        took_ns = [graph.nodes[gemm].duration_ns for gemm in own]
        for gemm, so_far_ns in zip(own, accumulate(took_ns), strict=True):
            reached.append(total + size * so_far_ns / max(sum(took_ns), 1.0))
            producers.append(gemm)
        total, begun = total + size, until
    # Half of the multiplications make gradients of weights.
    return _Made(reached, producers, total / max(len(gemms) / 2, 1))


def unsynchronised(graph: StepGraph) -> None:
    """Gradients are reduced after the last microbatch alone."""
    early = [
        place for own in _reductions(graph).values() for calls in _by_microbatch(graph, own)[:-1] for place in calls
    ]
    if not early:
        raise CannotTell("Each step reduces its gradients after one backward pass.")
    remove(graph, dict.fromkeys(early, ()))


def _reductions(graph: StepGraph, collectives: Iterable[str] = REDUCTIONS) -> Mapping[tuple[int, int], list[int]]:
    """Returns the reductions of gradients by rank and step, in the order of their launches."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, node in enumerate(graph.nodes):
        if node.kind == "comm" and node.role == "gradient" and node.call and node.call.collective in collectives:
            found[node.rank, node.step].append(place)
    return found


def _by_microbatch(graph: StepGraph, places: Iterable[int]) -> list[list[int]]:
    """Returns the calls of each backward pass."""
    found: dict[int, list[int]] = defaultdict(list)
    for place in places:
        found[graph.nodes[place].backward].append(place)
    return list(found.values())
