"""Changes of when, and how often, sharded parameters are gathered."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from overlap_sweep.diagnosis.collectives import REDUCTIONS
from overlap_sweep.predict.changes.removal import remove
from overlap_sweep.predict.graph import CannotTell, Edge, Node, StepGraph


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
    kept: dict[tuple[int, int, int], int] = defaultdict(int)
    for place in again:
        node = graph.nodes[place]
        kept[node.rank, node.step, node.backward] += node.bytes or 0
    if most_bytes := max(kept.values()):
        # Beside the shard: FSDP gathers into memory of its own. What is gathered at the peak is there anyway.
        graph.notes.append(
            f"All gathered parameters stay in memory: at most {most_bytes / 1e9:.3g} GB more on each GPU."
        )
    remove(graph, dict.fromkeys([*again, *copies_in, *copies_out], ()))


_COPY_OUT = re.compile(r"split_with_sizes_copy")
"""FSDP2's copy out of the buffer of an all-gather."""


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


def _causes(graph: StepGraph, unit: list[int]) -> list[Edge]:
    """Returns what the first of these nodes comes after, but for its stream."""
    return [edge for edge in graph.nodes[unit[0]].after if edge.why in ("host", "needs")]


def _gathers(node: Node) -> bool:
    return node.kind == "comm" and node.role == "parameter" and node.call is not None


def _is_reduction(node: Node) -> bool:
    return node.kind == "comm" and node.call is not None and node.call.collective in REDUCTIONS
