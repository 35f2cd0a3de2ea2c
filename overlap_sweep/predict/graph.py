"""Makes a graph of the steps that were recorded: launches and waits of the hosts, kernels by stream, collectives of all
ranks, and what waited for what.

A trace has no dependencies. They are read off it: a stream runs in order; a host launches in order and stops where it
synchronises; a collective comes after the kernel launched before it, unless one of its kind started before that kernel
had ended; what needed a collective is the kernel launched after the host made its stream wait, see `needs.py`.
Whatever else held a kernel back is kept as a delay, so that the graph as it is takes the time that was recorded.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Literal

import msgspec

from overlap_sweep.diagnosis import LATENCY_NS, NEVER, TOGETHER_NS, Pass, Role
from overlap_sweep.diagnosis.arrivals import MEETING, Arrivals
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.collectives import Group
from overlap_sweep.diagnosis.facts import RankFacts, size_of, steps_in_a_row
from overlap_sweep.diagnosis.host import Wait
from overlap_sweep.diagnosis.losses import RankView
from overlap_sweep.predict.contention import set_contention
from overlap_sweep.predict.needs import EARLY_NS, Item, needs_of, seen_waiting
from overlap_sweep.trace.activity import BWD, FWD, RECOMPUTE
from overlap_sweep.trace.intervals import Measure, contains, within

MOST_STEPS, MOST_KERNELS = 8, 10_000
"""Steps that are replayed, and kernels of all ranks in them: more of a long recording would only cost time."""

WAITED_NS = 30_000
"""Longest time from the end of a kernel to the start of one on another stream that has waited for it."""

IN_THE_END = 0.5
"""Part of a matrix multiplication's time after which its first blocks leave multiprocessors to others."""

LONGEST_NS = 20_000_000
"""Longest matrix multiplication that is looked for."""

_PASSES: dict[int, Pass] = {FWD: "fwd", BWD: "bwd", RECOMPUTE: "bwd"}

Kind = Literal["launch", "sync", "compute", "comm", "none"]
"""`sync`: the host waits for the device; `none`: takes no time, what a change has left of something that ran."""

Why = Literal["host", "stream", "queue", "needs"]
"""Why a node comes after another: the host launched it then, it is next on its stream, streams share a queue, or it
needs what the other has made. In a queue it may start when the other has started, otherwise when that has ended."""


class CannotTell(Exception):
    """The trace does not hold what a change needs; the reason is a sentence."""


class Node(msgspec.Struct):
    """Something that takes time. Nanoseconds."""

    kind: Kind
    rank: int
    """Index of the rank."""
    step: int
    duration_ns: float
    """Alone, without what computation and communication cost each other; of communication after its last rank has
    started."""
    recorded_ns: tuple[float, float]
    """When it was recorded, on the clock of the first rank. Of a launch when it began, twice."""
    after: list[Edge] = []
    delay_ns: float = 0.0
    """Time from when all that is known to come before it was over until it started."""
    lane: int = NEVER
    slowdown: float = 0.0
    """What computation takes longer beside communication, and communication beside computation, as a share of its time
    alone."""
    pass_: Pass = ""
    meeting: int = NEVER
    """Number of the collective, the same on all ranks that were matched; NEVER if it waits for nobody."""
    call: Call | None = None
    role: Role | None = None
    bytes: int | None = None
    group_size: int | None = None
    """Number of ranks that communicate; None if unknown."""
    backward: int = 0
    """Number of backward passes that had begun when communication was launched."""
    optimizer: int = 0
    """Number of optimizers' steps that had begun when communication was launched."""
    work: int = NEVER
    """Index into the rank's work."""
    is_gemm: bool = False
    name: str = ""
    """Of a kernel, or of an operator on a CPU, that computes."""
    held_ns: float | None = None
    """Of what is held by a matrix multiplication on another stream that occupies all multiprocessors: when it starts,
    from the end of that, negative before; None if nothing holds it."""
    ends_step: bool = False
    """Whether it is a wait of the host as programs do to take times."""
    optimizes: bool = False
    """Whether it is launched in the step of an optimizer of torch, or the launch of what is."""
    recomputes: bool = False
    """Whether it is forward computation within the backward pass."""
    loading_ns: float = 0.0
    """Part of the delay of a launch, or of computation on a CPU, in which the host waited for the next batch."""
    leeway: tuple[float, float] = (1.0, 1.0)
    """Least and most time that it may take, over its duration, where it was not recorded so."""


class Edge(msgspec.Struct, gc=False):
    """What a node comes after."""

    node: int
    why: Why
    lag_ns: float = 0.0
    """Time from when that is over until it may start, negative if it started before. Of `host`: time from the launch
    until a kernel that nothing else holds back starts."""


@dataclass(frozen=True)
class StepGraph:
    """The recorded steps of all ranks, in the order of launches on each rank."""

    nodes: list[Node]
    steps: list[int]
    """Numbers of the steps, in order."""
    ranks: int
    """Number of ranks that were recorded."""
    world_size: int | None
    on_device: bool
    one_queue: bool
    """Whether kernels start in the order of their launches."""
    shows_contention: list[bool]
    """By rank: whether it shows what communication costs GEMMs beside it."""
    device_name: str = ""
    """Kind of GPU; empty if unknown."""
    nccl_version: str = ""
    groups: Sequence[Mapping[str, Group]] = ()
    """Process groups that communicated, by rank and name."""
    notes: list[str] = field(default_factory=list)
    """What else to know of a changed graph: sentences."""

    def copy(self) -> StepGraph:
        """Returns a graph whose nodes can be changed."""
        new = msgspec.structs.replace
        nodes = [new(node, after=[new(edge) for edge in node.after]) for node in self.nodes]
        return replace(self, nodes=nodes, notes=[*self.notes])


@dataclass
class _Item:
    """A launch of a rank, or a wait of its host, in the order of the host."""

    host_ns: int
    start_ns: int
    end_ns: int
    lane: int
    step: int
    work: int | None = None
    call: int | None = None
    wait: Wait | None = None


def graph_of(views: Sequence[RankView], arrived: Arrivals, *, held: bool = True) -> StepGraph:
    """Returns the graph of the last of the steady steps that all ranks have in a row, MOST_STEPS at most. `held`:
    whether it says what matrix multiplications hold; otherwise that is a delay of its own."""
    facts = [view.facts for view in views]
    steps = steps_in_a_row(facts)
    meetings = {
        member: number
        for number, match in enumerate(arrived.matches)
        if len(match) > 1 and facts[match[0][0]].calls[match[0][1]].collective in MEETING
        for member in match
    }
    one_queue = facts[0].on_device and all(view.one_queue for view in views)
    kernels = sum(len(one.work) + len(one.calls) for one in facts) / max(len(facts[0].steps), 1)
    few = max(2, min(MOST_STEPS, round(MOST_KERNELS / max(kernels, 1))))
    graph = StepGraph(
        [],
        steps[-few:],
        len(facts),
        facts[0].world_size,
        facts[0].on_device,
        one_queue,
        [],
        facts[0].device_name,
        facts[0].nccl_version,
        [one.groups for one in facts],
    )
    for rank, view in enumerate(views):
        _add_rank(graph, rank, view, meetings, arrived.offsets_ns[rank], held=held)
    for node, moved_ns in zip(graph.nodes, moved_at_ns(graph), strict=True):
        if node.meeting != NEVER:
            node.duration_ns = node.recorded_ns[1] - moved_ns
    for rank, view in enumerate(views):
        own = [node for node in graph.nodes if node.rank == rank]
        graph.shows_contention.append(set_contention(own, view.facts))
    _set_delays(graph)
    return graph


def moved_at_ns(graph: StepGraph) -> list[float]:
    """Returns when each collective was recorded to have all its ranks; of all else when it started."""
    last_ns: dict[int, float] = defaultdict(float)
    for node in graph.nodes:
        last_ns[node.meeting] = max(last_ns[node.meeting], node.recorded_ns[0])
    return [
        node.recorded_ns[0] if node.meeting == NEVER else min(last_ns[node.meeting], node.recorded_ns[1])
        for node in graph.nodes
    ]


def _add_rank(
    graph: StepGraph, rank: int, view: RankView, meetings: dict[tuple[int, int], int], offset_ns: int, *, held: bool
) -> None:
    facts, nodes, first = view.facts, graph.nodes, len(graph.nodes)
    wanted = set(graph.steps)
    node_of: dict[Item, int] = {}
    last_on_lane: dict[int, int] = {}
    loading = Measure(facts.loading)
    last_host = last_device = NEVER
    items, optimizing = _items(facts, wanted), contains(facts.optimizer_steps, facts.work.launch_ns)
    if not facts.on_device and items and (since_ns := _loading_since_ns(facts, items[0])) is not None:
        # A CPU's first step has begun when it began to wait for its batch.
        last_on_lane[items[0].lane] = first
        moment_ns = float(since_ns + offset_ns)
        nodes.append(Node("compute", rank, items[0].step, 0.0, (moment_ns, moment_ns), lane=items[0].lane))
    for item in items:
        if facts.on_device and item.host_ns != NEVER:
            last_host = _add_host(graph, rank, item, last_host, [*last_on_lane.values()], loading, offset_ns)
            if item.wait:
                continue
        after = [Edge(last_host, "host")] if last_host != NEVER and item.host_ns != NEVER else []
        if (before := last_on_lane.get(item.lane)) is not None:
            after.append(Edge(before, "stream"))
        if graph.one_queue and last_device != NEVER:
            after.append(Edge(last_device, "queue"))
        place = last_device = last_on_lane[item.lane] = len(nodes)
        recorded_ns = (float(item.start_ns + offset_ns), float(item.end_ns + offset_ns))
        node = Node("compute", rank, item.step, recorded_ns[1] - recorded_ns[0], recorded_ns, after, lane=item.lane)
        if item.work is not None:
            node_of[Item(False, item.work)] = place
            node.work, node.is_gemm = item.work, bool(facts.work.is_gemm[item.work])
            node.pass_ = _PASSES.get(int(facts.work.pass_[item.work]), "other")
            node.name = facts.names[int(facts.work.signature[item.work])]
            node.recomputes = int(facts.work.pass_[item.work]) == RECOMPUTE
            node.optimizes = bool(optimizing[item.work])
            if last_host != NEVER:
                nodes[last_host].optimizes = node.optimizes
            if before is not None and not facts.on_device:
                # A CPU computes on the thread that loads; a GPU's host has nodes of its own.
                node.loading_ns = loading.between(round(nodes[before].recorded_ns[1]) - offset_ns, item.start_ns)
        else:
            assert item.call is not None
            call = facts.calls[item.call]
            node_of[Item(True, item.call)] = place
            node.kind, node.call, node.role, node.pass_ = "comm", call, view.roles[item.call], call.pass_
            node.meeting = meetings.get((rank, item.call), NEVER)
            node.group_size = size_of(facts, call)
            node.bytes = call.buffer_bytes(node.group_size)
            node.backward = int(facts.backward_passes[:, 0].searchsorted(call.launch_ns, side="right"))
            node.optimizer = int(facts.optimizer_steps[:, 0].searchsorted(call.launch_ns, side="right"))
        nodes.append(node)
    for need in needs_of(facts):
        node_after, node_before = node_of.get(need.after), node_of.get(need.before)
        if node_after is not None and node_before is not None and node_before < node_after:
            nodes[node_after].after.append(Edge(node_before, "needs"))
    own = [place for place in range(first, len(nodes)) if nodes[place].kind in ("compute", "comm")]
    _add_communicators(graph, own)
    for need in seen_waiting(view.exposure):
        node_after, node_before = node_of.get(need.after), node_of.get(need.before)
        # Behind communication in a hardware queue computation waits, too, though it needs none.
        if (
            node_after is not None
            and node_before is not None
            and _unexplained_ns(graph, nodes[node_after]) > TOGETHER_NS
        ):
            nodes[node_after].after.append(Edge(node_before, "needs"))
    _add_by_time(graph, own, held=held)


def _loading_since_ns(facts: RankFacts, first: _Item) -> int | None:
    """Returns since when the thread of a host's first item had waited for a batch; None if it had not."""
    ends_ns = facts.work.end_ns[(facts.work.lane == first.lane) & (facts.work.end_ns <= first.start_ns)]
    waits = within(facts.loading, int(ends_ns.max()) if len(ends_ns) else NEVER, first.start_ns)
    return int(waits[-1, 0]) if len(waits) else None


def _add_communicators(graph: StepGraph, own: Sequence[int]) -> None:
    """Lets collectives of one process group run one after the other, also on different streams, as NCCL does."""
    last: dict[str, int] = {}
    for place in own:
        call = graph.nodes[place].call
        if call and call.group:
            before = last.get(call.group)
            if (
                before is not None
                and graph.nodes[place].recorded_ns[0] >= graph.nodes[before].recorded_ns[1] - EARLY_NS
            ):
                graph.nodes[place].after.append(Edge(before, "stream"))
            last[call.group] = place


def _add_by_time(graph: StepGraph, own: Sequence[int], *, held: bool) -> None:
    """Lets what started in the end of something on another stream, and for no other reason that is known, be held by
    that if it ran when all else was over, otherwise come after it."""
    by_end = sorted(own, key=lambda place: graph.nodes[place].recorded_ns[1])
    ends_ns = [graph.nodes[place].recorded_ns[1] for place in by_end]
    for place in own:
        node = graph.nodes[place]
        unexplained_ns = _unexplained_ns(graph, node) if node.after else 0.0
        if unexplained_ns <= LATENCY_NS:
            continue
        start_ns = node.recorded_ns[0]
        ready_ns = start_ns - unexplained_ns
        for other in by_end[bisect(ends_ns, start_ns - WAITED_NS) :]:
            end_ns, since_ns = graph.nodes[other].recorded_ns[1], graph.nodes[other].recorded_ns[0]
            if end_ns > start_ns + LONGEST_NS:
                break
            if other == place or graph.nodes[other].lane == node.lane:
                continue
            took_ns = end_ns - since_ns
            in_the_end = graph.nodes[other].is_gemm and start_ns >= since_ns + IN_THE_END * took_ns
            if held and in_the_end and since_ns <= ready_ns + LATENCY_NS:
                node.held_ns = start_ns - end_ns
                # Of two that wait for the same the multiplication was faster.
                node.delay_ns = max(0.0, since_ns - ready_ns + 1)
                break
            if other < place and (start_ns >= end_ns - EARLY_NS or in_the_end):
                node.after.append(Edge(other, "needs"))
                break


def _unexplained_ns(graph: StepGraph, node: Node) -> float:
    """Returns how long it took until the node started, after all that it is known to come after."""
    over = (graph.nodes[edge.node].recorded_ns[edge.why != "queue"] for edge in node.after)
    return node.recorded_ns[0] - max(over, default=-inf)


def _items(facts: RankFacts, steps: set[int]) -> list[_Item]:
    work = facts.work
    rows = zip(
        *(column.tolist() for column in (work.launch_ns, work.start_ns, work.end_ns, work.lane, work.step)), strict=True
    )
    found = [
        _Item(host, start, end, lane, step, work=i)
        for i, (host, start, end, lane, step) in enumerate(rows)
        if step in steps
    ]
    found += [
        _Item(call.launch_ns, call.start_ns, call.end_ns, call.lane, call.step, call=i)
        for i, call in enumerate(facts.calls)
        if call.step in steps
    ]
    if facts.on_device and found:
        first_ns, last_ns = min(one.host_ns for one in found), max(one.host_ns for one in found)
        by_launch = sorted(found, key=lambda one: one.host_ns)
        for wait in facts.waits:
            if first_ns < wait.start_ns < last_ns:
                before = by_launch[bisect(by_launch, wait.start_ns, key=lambda one: one.host_ns) - 1]
                found.append(_Item(wait.start_ns, wait.start_ns, wait.end_ns, NEVER, before.step, wait=wait))
    return sorted(found, key=lambda one: (one.start_ns if one.host_ns == NEVER else one.host_ns, one.start_ns))


def _add_host(
    graph: StepGraph, rank: int, item: _Item, last: int, running: Sequence[int], loading: Measure, offset_ns: int
) -> int:
    """Adds what the host did and returns its number. `running`: the last node of each stream; `loading`: when the host
    waited for the next batch."""
    nodes = graph.nodes
    host_ns = float(item.host_ns + offset_ns)
    after = [Edge(last, "host")] if last != NEVER else []
    loading_ns = 0.0
    if last != NEVER:
        loading_ns = loading.between(round(nodes[last].recorded_ns[1]) - offset_ns, item.host_ns)
    nodes.append(Node("launch", rank, item.step, 0.0, (host_ns, host_ns), after, loading_ns=loading_ns))
    if item.wait is None:
        return len(nodes) - 1
    until_ns = float(item.end_ns + offset_ns)
    # Of what was launched, that which had ended when the host went on.
    ended = [one for one in running if nodes[one].recorded_ns[1] <= until_ns]
    after = [Edge(len(nodes) - 1, "host"), *(Edge(one, "needs") for one in ended)]
    nodes.append(Node("sync", rank, item.step, 0.0, (until_ns, until_ns), after, ends_step=item.wait.ends_step))
    return len(nodes) - 1


def _set_delays(graph: StepGraph) -> None:
    """Sets what the recorded times leave: launches' lags where the host was late, delays everywhere else."""
    late: list[tuple[Node, Edge, float]] = []
    lags: list[float] = []
    for node in graph.nodes:
        if node.held_ns is not None:
            # It is held when it could have started.
            continue
        before = [(graph.nodes[edge.node].recorded_ns[edge.why != "queue"], edge) for edge in node.after]
        for over_ns, edge in before:
            # It started before that was over: so much earlier than that it may, but not than all else.
            edge.lag_ns = min(0.0, node.recorded_ns[0] - over_ns)
        before = [(over_ns + edge.lag_ns, edge) for over_ns, edge in before]
        last_ns, last = max(before, key=lambda one: one[0], default=(0.0, None))
        node.delay_ns = node.recorded_ns[0] - last_ns
        if last is not None and last.why == "host" and node.kind in ("compute", "comm"):
            late.append((node, last, max((one[0] for one in before if one[1] is not last), default=-inf)))
        elif node.kind in ("compute", "comm"):
            lags.append(node.delay_ns)
    usual_ns = max(0.0, median(lags)) if lags else 0.0
    for node, launch, others_ns in late:
        launch.lag_ns += node.delay_ns
        node.delay_ns = min(usual_ns, node.recorded_ns[0] - others_ns)
        launch.lag_ns -= node.delay_ns
