"""Changes of a graph of steps, each a small function: what would run otherwise if a lever were set."""

from __future__ import annotations

import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from statistics import mean, median

from overlap_sweep.diagnosis import NEVER
from overlap_sweep.diagnosis.collectives import REDUCTIONS
from overlap_sweep.predict.costs import costs_of, family_of
from overlap_sweep.predict.graph import CannotTell, Edge, Node, StepGraph

FIRST_BUCKET_BYTES = 1_048_576
"""DistributedDataParallel's own, unless it is said: the first bucket is to start early."""


def without_queue(graph: StepGraph) -> None:
    """Streams have queues of their own."""
    if not graph.one_queue:
        raise CannotTell("Kernels of different streams are not held to the order of their launches here.")
    for node in graph.nodes:
        node.after = [edge for edge in node.after if edge.why != "queue"]


def with_queue(graph: StepGraph) -> None:
    """Kernels of all streams start in the order of their launches."""
    if graph.one_queue:
        raise CannotTell("Kernels start in the order of their launches already.")
    last: dict[int, int] = {}
    for place, node in enumerate(graph.nodes):
        if node.kind in ("compute", "comm"):
            if node.rank in last:
                node.after.append(Edge(last[node.rank], "queue"))
            last[node.rank] = place


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


def _reductions(graph: StepGraph, collectives: Iterable[str] = REDUCTIONS) -> Mapping[tuple[int, int], list[int]]:
    """Returns the reductions of gradients by rank and step, in the order of their launches."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, node in enumerate(graph.nodes):
        if node.kind == "comm" and node.role == "gradient" and node.call and node.call.collective in collectives:
            found[node.rank, node.step].append(place)
    return found


def remove(graph: StepGraph, instead: Mapping[int, Iterable[int]]) -> None:
    """Leaves nodes out, and of those that others don't run `instead` of also the host's time before their launch. What
    came after a node comes after those instead, and what it stood before in a stream or queue after what it came after
    there."""
    before: dict[int, list[Edge]] = {}
    for place in sorted(instead):
        node, others = graph.nodes[place], [*instead[place]]
        before[place] = _lined_up(node, before)
        for edge in node.after:
            if edge.why == "host" and not others:
                graph.nodes[edge.node].delay_ns = 0.0
        node.kind, node.meeting, node.duration_ns, node.delay_ns = "none", NEVER, 0.0, 0.0
        node.after = [Edge(other, "needs") for other in others]
    for node in graph.nodes:
        if any(edge.node in before and edge.why in ("stream", "queue") for edge in node.after):
            kept = [edge for edge in node.after if edge.why not in ("stream", "queue")]
            node.after = [*kept, *_lined_up(node, before)]


def _lined_up(node: Node, before: Mapping[int, list[Edge]]) -> list[Edge]:
    """Returns what a node comes after in its stream or queue, each once. `before`: the same of nodes that are left
    out."""
    edges = [edge for edge in node.after if edge.why in ("stream", "queue")]
    found = {(one.node, one.why): one for edge in edges for one in before.get(edge.node, [edge])}
    return list(found.values())


def without_sync(graph: StepGraph) -> None:
    """The host does not wait for the device within steps."""
    found = [node for node in graph.nodes if node.kind == "sync" and not node.ends_step]
    if not found:
        raise CannotTell("The host does not wait for the device within the recorded steps.")
    for node in found:
        node.after = [edge for edge in node.after if edge.why == "host"]
        node.delay_ns = 0.0


def unsynchronised(graph: StepGraph) -> None:
    """Gradients are reduced after the last microbatch alone."""
    early = [
        place for own in _reductions(graph).values() for calls in _by_microbatch(graph, own)[:-1] for place in calls
    ]
    if not early:
        raise CannotTell("Each step reduces its gradients after one backward pass.")
    remove(graph, dict.fromkeys(early, ()))


def _by_microbatch(graph: StepGraph, places: Iterable[int]) -> list[list[int]]:
    """Returns the calls of each backward pass."""
    found: dict[int, list[int]] = defaultdict(list)
    for place in places:
        found[graph.nodes[place].backward].append(place)
    return list(found.values())


def kept_after_forward(graph: StepGraph) -> None:
    """Parameters that were gathered for the forward pass are not gathered again for the backward pass, nor copied."""
    forward = {(node.rank, node.step, node.bytes) for node in graph.nodes if _gathers(node) and node.pass_ == "fwd"}
    again = [
        place
        for place, node in enumerate(graph.nodes)
        if _gathers(node) and node.pass_ == "bwd" and (node.rank, node.step, node.bytes) in forward
    ]
    if not again:
        raise CannotTell("No parameters are gathered again for the backward pass.")
    computing = {(node.rank, node.lane) for node in graph.nodes if node.is_gemm}
    gathered = set(again)
    copies_in = [before for place in again for before in _copies_in(graph, place, computing)]
    copies_out = [
        place
        for place, node in enumerate(graph.nodes)
        if node.kind == "compute"
        and _COPY_OUT.search(node.name)
        and any(edge.why == "needs" and edge.node in gathered for edge in node.after)
    ]
    remove(graph, dict.fromkeys([*again, *copies_in, *copies_out], ()))


_COPY_OUT = re.compile(r"split_with_sizes_copy")
"""FSDP2's copy out of the buffer of an all-gather."""


def _copies_in(graph: StepGraph, place: int, computing: set[tuple[int, int]]) -> list[int]:
    """Returns the kernels that were launched for a collective alone: right before it, on a stream that multiplies no
    matrices."""
    found = []
    rank = graph.nodes[place].rank
    for before in range(place - 1, -1, -1):
        node = graph.nodes[before]
        if node.rank != rank or node.kind not in ("compute", "comm"):
            continue
        if node.kind == "comm" or (rank, node.lane) in computing:
            break
        found.append(before)
    return found


def _gathers(node: Node) -> bool:
    return node.kind == "comm" and node.role == "parameter" and node.call is not None


def prefetched(graph: StepGraph, ahead: int) -> None:
    """All-gathers of parameters, with the copies into their buffers, are launched as early as those of `ahead` modules
    before, and run before the reductions that were launched in between."""
    computing = {(node.rank, node.lane) for node in graph.nodes if node.is_gemm}
    by_pass: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for place, node in enumerate(graph.nodes):
        if _gathers(node):
            by_pass[node.rank, node.step, node.pass_].append(place)
    if not by_pass:
        raise CannotTell("No all-gather of parameters was recorded.")
    for own in by_pass.values():
        units = [[*reversed(_copies_in(graph, place, computing)), place] for place in own]
        causes = [_causes(graph, unit) for unit in units]
        for number, unit in enumerate(units[1:], start=1):
            earlier = units[max(number - ahead, 0)]
            for place in unit:
                node = graph.nodes[place]
                inside = [edge for edge in node.after if edge.node in unit]
                stream = [edge for edge in node.after if edge.why == "stream" and edge.node not in unit]
                passed = [edge for edge in stream if edge.node > earlier[-1] and _is_reduction(graph.nodes[edge.node])]
                node.after = [*inside, *(edge for edge in stream if edge not in passed)]
                node.after += [replace(edge) for edge in causes[max(number - ahead, 0)]]
                node.after += [Edge(earlier[-1], "stream")] if place == unit[-1] and passed else []
                for edge in passed:
                    graph.nodes[edge.node].after.append(Edge(place, "stream"))


def _causes(graph: StepGraph, unit: list[int]) -> list[Edge]:
    """Returns what the first of these nodes comes after, but for its stream."""
    return [edge for edge in graph.nodes[unit[0]].after if edge.why in ("host", "needs")]


def _is_reduction(node: Node) -> bool:
    return node.kind == "comm" and node.call is not None and node.call.collective in REDUCTIONS


def equal_ranks(graph: StepGraph) -> None:
    """All ranks compute equally long in each pass, and their hosts take equally long."""
    if graph.ranks < 2:
        raise CannotTell("Only one rank was recorded.")
    took_ns: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0.0] * graph.ranks)
    chosen = [node for node in graph.nodes if node.kind == "compute" or (node.kind == "launch" and node.after)]
    for node in chosen:
        own = took_ns[node.step, node.kind, node.pass_]
        own[node.rank] += node.duration_ns if node.kind == "compute" else node.delay_ns
    for node in chosen:
        own = took_ns[node.step, node.kind, node.pass_]
        factor = mean(own) / own[node.rank] if own[node.rank] > 0 else 1.0
        if node.kind == "compute":
            node.duration_ns *= factor
        else:
            node.delay_ns *= factor


def faster_host(graph: StepGraph) -> None:
    """All launches of a step are there at its beginning, as with CUDA graphs."""
    begun = set()
    for node in graph.nodes:
        if node.kind == "launch" and node.after:
            if (node.rank, node.step) in begun:
                node.delay_ns = 0.0
            begun.add((node.rank, node.step))


def ready_batches(graph: StepGraph) -> None:
    """The host does not wait for the next batch."""
    waiting = [node for node in graph.nodes if node.loading_ns > 0]
    if not waiting:
        raise CannotTell("The host does not wait for a DataLoader within the recorded steps.")
    for node in waiting:
        node.delay_ns = max(0.0, node.delay_ns - node.loading_ns)


def faster_link(graph: StepGraph, times: float) -> None:
    """Communication moves data faster."""
    if not any(node.kind == "comm" for node in graph.nodes):
        raise CannotTell("No communication was recorded.")
    for node in graph.nodes:
        if node.kind == "comm":
            node.duration_ns /= times


def beside_nothing(graph: StepGraph) -> None:
    """Communication takes no multiprocessors, and slows no computation down."""
    if not any(node.slowdown for node in graph.nodes if node.kind == "compute"):
        raise CannotTell("No computation ran beside communication.")
    for node in graph.nodes:
        if node.kind == "compute":
            node.slowdown = 0.0
