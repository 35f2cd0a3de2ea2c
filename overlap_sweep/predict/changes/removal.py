"""Leaves nodes out of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from overlap_sweep.diagnosis import NEVER
from overlap_sweep.predict.graph import Edge, Node, StepGraph


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
