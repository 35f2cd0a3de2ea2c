"""Changes of what streams and ranks share: hardware queues, multiprocessors, links."""

from __future__ import annotations

from overlap_sweep.predict.graph import CannotTell, Edge, StepGraph

_REDUCING = {"all_reduce", "reduce_scatter", "reduce"}


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


def beside_nothing(graph: StepGraph) -> None:
    """Communication takes no multiprocessors, and slows no computation down."""
    moving = {node.call.collective for node in graph.nodes if node.call}
    if moving and moving <= _REDUCING:
        raise CannotTell(f"Copy engines add nothing up: they cannot do {', '.join(sorted(moving))}.")
    if not any(node.slowdown for node in graph.nodes if node.kind == "compute"):
        raise CannotTell("No computation ran beside communication.")
    for node in graph.nodes:
        if node.kind == "compute":
            node.slowdown = 0.0


def faster_link(graph: StepGraph, times: float) -> None:
    """Communication moves data faster."""
    if not any(node.kind == "comm" for node in graph.nodes):
        raise CannotTell("No communication was recorded.")
    for node in graph.nodes:
        if node.kind == "comm":
            node.duration_ns /= times
