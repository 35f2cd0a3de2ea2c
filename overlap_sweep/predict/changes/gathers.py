"""Changes of when, and how often, sharded parameters are gathered."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import copy

from overlap_sweep.diagnosis import NEVER
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
    before, and run before the reductions that were launched in between. Those that were launched so early stay."""
    computing = {(node.rank, node.lane) for node in graph.nodes if node.is_gemm}
    by_pass: dict[tuple[int, tuple[int, int, str]], list[int]] = defaultdict(list)
    for place, node in enumerate(graph.nodes):
        if _gathers(node):
            by_pass[node.rank, (node.step, node.backward, node.pass_)].append(place)
    if not by_pass:
        raise CannotTell("No all-gather of parameters was recorded.")
    used = _used(graph)
    # How many modules earlier each is to be launched; on no rank more than where it was launched earliest.
    moved: dict[tuple[tuple[int, int, str], int], int] = {}
    for (_, which), own in by_pass.items():
        for number, place in enumerate(own):
            first = next((i for i in range(number, 0, -1) if used[own[i - 1]] < place), 0)
            key, by = (which, number), min(ahead - (number - first), number)
            moved[key] = min(moved.get(key, by), by)
    if max(moved.values()) <= 0:
        graph.notes.append("Parameters are gathered so early already: it changes nothing.")
        return
    _on_own_streams(graph, computing)
    passed: dict[int, set[int]] = {}
    for (_, which), own in by_pass.items():
        units = [[*reversed(_copies_in(graph, place, computing)), place] for place in own]
        causes = [_causes(graph, unit) for unit in units]
        for number, unit in enumerate(units):
            cause = number - max(moved[which, number], 0)
            if cause == number:
                continue
            earlier = units[cause][-1]
            for place in unit:
                node = graph.nodes[place]
                inside = [edge for edge in node.after if edge.node in unit]
                stream = [edge for edge in node.after if edge.why == "stream" and edge.node not in unit]
                kept, passed[place] = _passing(graph, stream, earlier, passed)
                node.after = [*inside, *kept, *(copy(edge) for edge in causes[cause])]
                node.after += [] if node.after else [Edge(own[number - 1], "stream")]
                for one in passed[place]:
                    graph.nodes[one].after.append(Edge(place, "stream"))
    for place, node in enumerate(graph.nodes):
        if place not in passed:
            over = {one for edge in node.after if edge.why == "stream" for one in passed.get(edge.node, ())}
            node.after += [Edge(one, "stream") for one in sorted(over) if one < place]


def _passing(
    graph: StepGraph, stream: Iterable[Edge], earlier: int, passed: Mapping[int, Iterable[int]]
) -> tuple[list[Edge], set[int]]:
    """Returns what a gather comes after on its stream and in its group if it passes the reductions launched after
    `earlier`, and these. `passed`: the same of gathers before it."""
    kept, own, ahead = [], set[int](), [*stream]
    # It does not pass what its own stream may wait for.
    earlier = max([earlier, *(edge.node for edge in ahead if graph.nodes[edge.node].kind == "compute")])
    while ahead:
        edge = ahead.pop()
        if edge.node > earlier and _is_reduction(graph.nodes[edge.node]):
            if edge.node not in own:
                own.add(edge.node)
                ahead += [
                    before
                    for before in graph.nodes[edge.node].after
                    if before.why == "stream" and graph.nodes[before.node].kind == "comm"
                ]
        else:
            kept.append(copy(edge))
            ahead += [Edge(one, "stream") for one in passed.get(edge.node, ()) if one not in own]
    return kept, own


def _used(graph: StepGraph) -> dict[int, int]:
    """Returns the first matrix multiplication after each gather's parameters were waited for; NEVER if nothing did."""
    used: dict[int, int] = defaultdict(lambda: NEVER)
    waited_for: dict[int, set[int]] = defaultdict(set)
    for place, node in enumerate(graph.nodes):
        if node.kind == "compute":
            before = {edge.node for edge in node.after if edge.why in ("needs", "stream") and edge.node not in used}
            waited_for[node.rank] |= {one for one in before if _gathers(graph.nodes[one])}
        if node.is_gemm:
            used |= dict.fromkeys(waited_for.pop(node.rank, ()), place)
    return used


def _on_own_streams(graph: StepGraph, computing: set[tuple[int, int]]) -> None:
    """Moves gathers off streams that compute: they then need what was launched there before them, and are needed by
    what was launched there next, which comes after the former."""
    lane = max(node.lane for node in graph.nodes) + 1
    before: dict[int, list[Edge]] = {}
    for place, node in enumerate(graph.nodes):
        passed = [edge for edge in node.after if edge.why == "stream" and edge.node in before]
        lined_up = [copy(one) for edge in passed for one in before[edge.node]]
        if _gathers(node) and (node.rank, node.lane) in computing:
            stream = [edge for edge in node.after if edge.why == "stream" and edge.node not in before]
            before[place] = [*lined_up, *(copy(edge) for edge in stream)]
            node.lane = lane
            for edge in stream:
                if graph.nodes[edge.node].kind == "compute":
                    edge.why = "needs"
        elif passed:
            for edge in passed if node.kind == "compute" else ():
                edge.why = "needs"
            node.after += lined_up


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
