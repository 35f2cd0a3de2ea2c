"""Changes of what hosts wait for, and of work that ranks share unequally."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import mean

from overlap_sweep.diagnosis import NEVER, as_share
from overlap_sweep.predict.graph import CannotTell, Node, StepGraph

MOST_AHEAD = 1.1
"""Time that a rank's host may take to launch what runs in the recorded steps, over their time."""


def without_sync(graph: StepGraph) -> None:
    """The host does not wait for the device within steps."""
    found = [node for node in graph.nodes if node.kind == "sync" and not node.ends_step]
    if not found:
        raise CannotTell("The host does not wait for the device within the recorded steps.")
    for node in found:
        node.after = [edge for edge in node.after if edge.why == "host"]
        node.delay_ns = 0.0


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


def without_optimizer(graph: StepGraph) -> None:
    """The optimizer's step takes no time: neither its computation nor the host between its launches."""
    found = [node for node in graph.nodes if node.optimizes]
    if not found:
        raise CannotTell("No step of an optimizer of torch was recorded.")
    for node in found:
        node.duration_ns = 0.0
        # Before the first of a step the host may do something else.
        if any(graph.nodes[edge.node].optimizes for edge in node.after if edge.why in ("host", "stream")):
            node.delay_ns = 0.0


def equal_ranks(graph: StepGraph) -> None:
    """All ranks compute equally long in each pass between the same two collectives, and their hosts take equally
    long."""
    if graph.ranks < 2:
        raise CannotTell("Only one rank was recorded.")
    _refuse_what_was_launched_ahead(graph)
    met: dict[tuple[int, int], int] = defaultdict(int)
    took_ns: dict[_Part, list[float]] = defaultdict(lambda: [0.0] * graph.ranks)
    chosen: list[tuple[Node, _Part]] = []
    for node in graph.nodes:
        met[node.rank, node.step] += node.meeting != NEVER
        if node.kind == "compute" or (node.kind == "launch" and node.after):
            part: _Part = (node.step, met[node.rank, node.step], node.kind, node.pass_)
            chosen.append((node, part))
            took_ns[part][node.rank] += node.duration_ns if node.kind == "compute" else node.delay_ns
    for node, part in chosen:
        own = took_ns[part]
        factor = mean(own) / own[node.rank] if own[node.rank] > 0 else 1.0
        if node.kind == "compute":
            node.duration_ns *= factor
        else:
            node.delay_ns *= factor


def _refuse_what_was_launched_ahead(graph: StepGraph) -> None:
    """Raises CannotTell if a rank's host takes longer than its steps: it has launched ahead before them, as where the
    profiler slows it down, and equal hosts would have to do without that."""
    if not graph.on_device:
        return
    ran = [node for node in graph.nodes if node.kind in ("compute", "comm")]
    took_ns = max(node.recorded_ns[1] for node in ran) - min(node.recorded_ns[0] for node in ran)
    launching_ns: dict[int, float] = defaultdict(float)
    for node in graph.nodes:
        if node.kind == "launch" and node.after:
            launching_ns[node.rank] += node.delay_ns
    for rank, host_ns in launching_ns.items():
        if host_ns > MOST_AHEAD * took_ns:
            share = as_share(host_ns / took_ns)
            raise CannotTell(
                f"The host of rank {rank} took {share} of the recorded steps' time to launch them, and had begun "
                "before them; record more steps."
            )


def without_surplus(graph: StepGraph) -> None:
    """Kernels that one rank alone runs take no time, where it runs so many more than each of the others."""
    if graph.ranks < 2:
        raise CannotTell("Only one rank was recorded.")
    computing = [node for node in graph.nodes if node.kind == "compute"]
    total = Counter((node.step, node.rank) for node in computing)
    running: dict[tuple[int, str], set[int]] = defaultdict(set)
    for node in computing:
        running[node.step, node.name].add(node.rank)
    alone = [node for node in computing if len(running[node.step, node.name]) == 1]
    more = Counter((node.step, node.rank) for node in alone)
    for (step, rank), number in more.items():
        # Otherwise the others do the same by kernels of other names.
        if any(total[step, rank] - total[step, other] < number for other in range(graph.ranks) if other != rank):
            raise CannotTell("What one rank alone runs, another may do by other kernels.")
    if not alone:
        raise CannotTell("No rank runs kernels that no other one runs.")
    for node in alone:
        node.duration_ns = 0.0


_Part = tuple[int, int, str, str]
"""Step, collectives so far that all ranks take part in, kind of node and pass."""
