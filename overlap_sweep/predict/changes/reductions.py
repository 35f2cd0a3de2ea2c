"""Changes of how gradients are reduced: in which buckets, when, and how often."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import ceil
from statistics import median

from overlap_sweep.diagnosis import NEVER
from overlap_sweep.diagnosis.collectives import REDUCTIONS
from overlap_sweep.predict.changes.removal import remove
from overlap_sweep.predict.costs import LEEWAY, costs_of, family_of
from overlap_sweep.predict.graph import CannotTell, Edge, Node, StepGraph

SAME_SIZE = 0.1
"""Share by which sizes of all-reduces may differ and are the same."""


def in_buckets(graph: StepGraph, bucket_bytes: float) -> None:
    """Gradients are summed in buckets of this size, as soon as the backward pass has made them. So is the first: that
    of DistributedDataParallel has 1 MB only where no `bucket_cap_mb` is given."""

    def sizes(_: list[Node], made: _Made) -> list[float]:
        # A bucket is closed by the gradient that fills it.
        size = ceil(bucket_bytes / made.finest_bytes) * made.finest_bytes
        total = made.reached_bytes[-1]
        full = max(0, ceil((total - made.finest_bytes / 2) / size) - 1)
        return [size] * full + [total - full * size]

    _resum(graph, sizes)


def in_hooks(graph: StepGraph) -> None:
    """Gradients are summed one by one, as soon as the backward pass has made them, the last layer's first."""

    def sizes(nodes: list[Node], made: _Made) -> list[float]:
        # After the backward pass they are summed in the order of parameters.
        at_the_end = made.launched_after[0] == made.producers[-1]
        return [float(node.bytes or 0) for node in (reversed(nodes) if at_the_end else nodes)]

    if _resum(graph, sizes):
        graph.notes.append(
            "To write: all_reduce(async_op=True) in each parameter's register_post_accumulate_grad_hook()."
        )


def _resum(graph: StepGraph, sizes: Callable[[list[Node], _Made], list[float]]) -> bool:
    """Replaces the all-reduces of gradients by others, and returns whether these are not there already. `sizes`:
    returns theirs in bytes, from the recorded ones of a backward pass."""
    wanted: list[_Wanted] = []
    for (rank, step), own in _reductions(graph, ("all_reduce",)).items():
        for number, chosen in enumerate(_by_microbatch(graph, own)):
            nodes = [graph.nodes[place] for place in chosen]
            if any(node.bytes is None for node in nodes):
                raise CannotTell("The trace does not have the sizes of the all-reduces.")
            made = _gradients_made(graph, rank, step, chosen)
            wanted.append(_Wanted(number, chosen, made, sizes(nodes, made)))
    if not wanted:
        raise CannotTell("No all-reduce of gradients was recorded.")
    if _are_there(graph, wanted):
        graph.notes.append("Gradients are summed so already: it changes nothing.")
        return False
    costs = costs_of(graph.nodes)
    meetings: dict[tuple[int, int, int], int] = {}
    next_meeting = 1 + max((node.meeting for node in graph.nodes), default=0)
    instead: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    hosts_and_kernels: list[list[int]] = [[] for _ in range(graph.ranks)]
    for place, node in enumerate(graph.nodes):
        if node.kind in ("compute", "sync"):
            hosts_and_kernels[node.rank].append(place)
    for one in wanted:
        nodes = [graph.nodes[place] for place in one.chosen]
        first, new = nodes[0], list[int]()
        cost, delay_ns = costs[family_of(first)], median(node.delay_ns for node in nodes)
        for count, (size, producer) in enumerate(one.producers()):
            key = (first.step, one.number, count)
            meeting = meetings.setdefault(key, next_meeting + len(meetings)) if first.meeting != NEVER else NEVER
            edges = [Edge(producer, "needs")]
            edges += [Edge(last[first.rank], "stream")] if first.rank in last else []
            edges += [] if new else _after_calls(graph, first)
            graph.nodes.append(
                Node(
                    *("comm", first.rank, first.step, cost.time_ns(size), first.recorded_ns, edges, delay_ns),
                    lane=first.lane,
                    pass_="bwd",
                    meeting=meeting,
                    call=first.call,
                    role="gradient",
                    bytes=round(size),
                    held_ns=0.0 if graph.on_device else None,
                    leeway=LEEWAY,
                )
            )
            new.append(len(graph.nodes) - 1)
            last[first.rank] = new[-1]
        _needed_after_backward(graph, hosts_and_kernels[first.rank], one.chosen)
        instead |= dict.fromkeys(one.chosen, new)
    remove(graph, instead)
    return True


def _are_there(graph: StepGraph, wanted: Sequence[_Wanted]) -> bool:
    """Returns whether the calls that were recorded have the sizes wanted, and most of them were launched as soon as
    their gradients were there, and held nothing of the backward pass up."""
    if not all(one.has_sizes(graph) for one in wanted):
        return False
    calls = {place for one in wanted for place in one.chosen}
    other = {place for one in wanted for place in one.late()}
    for node in graph.nodes:
        if node.kind in ("compute", "sync") and node.pass_ == "bwd":
            other |= {edge.node for edge in node.after if edge.why != "queue" and edge.node in calls}
    return 2 * len(other) < len(calls)


def _needed_after_backward(graph: StepGraph, own: Sequence[int], chosen: Sequence[int]) -> None:
    """Lets nothing of the backward pass wait for sums of gradients, but what follows it: the next microbatch, which
    DistributedDataParallel has wait for them, or the optimizer. `own`: the computation and waits of the rank."""
    step, summed = graph.nodes[chosen[0]].step, set(chosen)
    until = next((i for i in own if i > chosen[0] and graph.nodes[i].pass_ == "fwd"), len(graph.nodes))
    backward = [i for i in own if i < until and graph.nodes[i].step == step and graph.nodes[i].pass_ == "bwd"]
    last = backward[-1] if backward else chosen[-1]
    for place in own:
        node = graph.nodes[place]
        if place <= last:
            node.after = [edge for edge in node.after if not (edge.why == "needs" and edge.node in summed)]
    after = max(last, chosen[-1])
    following = next((place for place in own if place > after and graph.nodes[place].kind == "compute"), None)
    if following is not None:
        node = graph.nodes[following]
        node.after += [Edge(place, "needs") for place in chosen]
        # On a CPU what waited can seem to start before the end of what it waited for: all of that is a delay then.
        ended_ns = max(graph.nodes[place].recorded_ns[1] for place in chosen)
        node.delay_ns = min(node.delay_ns, max(0.0, node.recorded_ns[0] - ended_ns))


def _after_calls(graph: StepGraph, node: Node) -> list[Edge]:
    """Returns what communication on its stream it comes after: hooks launch on a stream that does not compute."""
    return [edge for edge in node.after if edge.why == "stream" and graph.nodes[edge.node].kind == "comm"]


@dataclass(frozen=True)
class _Wanted:
    """The sums of the gradients of one backward pass."""

    number: int
    """Of the backward pass in its step."""
    chosen: list[int]
    """Calls that were recorded."""
    made: _Made
    sizes: list[float]
    """Bytes, in the order of the new calls."""

    def producers(self) -> list[tuple[float, int]]:
        """Returns for each new call its bytes and the computation that it comes after."""
        return [(size, self.made.after(until)) for size, until in zip(self.sizes, accumulate(self.sizes), strict=True)]

    def late(self) -> Iterator[int]:
        """Yields the calls that were launched after gradients were there. Of which of two multiplications in a row a
        gradient comes cannot be seen: one more is not late."""
        for place, (_, producer), recorded in zip(self.chosen, self.producers(), self.made.launched_after, strict=True):
            if bisect(self.made.producers, recorded) > bisect(self.made.producers, producer) + 1:
                yield place

    def has_sizes(self, graph: StepGraph) -> bool:
        """Returns whether the calls that were recorded have these sizes, in this order."""
        recorded = [graph.nodes[place].bytes or 0 for place in self.chosen]
        return len(recorded) == len(self.sizes) and all(
            abs(size - old) <= SAME_SIZE * old for size, old in zip(self.sizes, recorded, strict=True)
        )


@dataclass(frozen=True)
class _Made:
    """When a backward pass had made its gradients."""

    reached_bytes: list[float]
    """Bytes that were made when each of the `producers` had ended, ascending."""
    producers: list[int]
    launched_after: list[int]
    """The last of them before each call."""
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
    launched_after = [gemms[max(bisect(gemms, place) - 1, 0)] for place in chosen]
    # Half of the multiplications make gradients of weights; the first layer has no others.
    return _Made(reached, producers, launched_after, total / ceil(len(gemms) / 2))


def unsynchronised(graph: StepGraph) -> None:
    """Gradients are reduced after the last microbatch before a step of an optimizer alone. Where several optimizers
    take turns, a recorded step has several of their steps, each of which needs its gradients."""
    early: list[int] = []
    for own in _reductions(graph).values():
        passes = _by_microbatch(graph, own)
        for calls, later in pairwise(passes):
            if graph.nodes[calls[0]].optimizer == graph.nodes[later[0]].optimizer:
                early += calls
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
