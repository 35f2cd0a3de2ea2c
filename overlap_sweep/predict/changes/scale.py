"""Changes of how much is trained at once: samples of a rank's step, and ranks that share the data."""

from __future__ import annotations

import re
from math import log2

from overlap_sweep.predict.costs import LEEWAY, bus_share, latencies_ns
from overlap_sweep.predict.graph import CannotTell, StepGraph

USUAL, LEAST, MOST = 0.9, 0.7, 1.0
"""Power of the number of samples that the time of computation grows with. A GEMM reads its weights once however many
samples it has, and fills all multiprocessors only with many: below the roofline's knee, some 200 tokens in bfloat16 on
an H200, its time hardly grows, far above in proportion. From 256 tokens to 2048 two programs on two H200s show 0.90 and
0.93 (docs/results/2026-11-28-predict.md)."""

FLOOR_NS = 3_000.0
"""Time of a kernel that has next to nothing to do."""

_OF_PARAMETERS = re.compile(r"split_with_sizes_copy|chunk_cat|multi_tensor_apply")
"""FSDP2's copies, and what is done to lists of parameters or gradients."""


def larger_batch(graph: StepGraph, times: float) -> None:
    """Each rank computes so many times the samples in a step. The optimizer, reductions of gradients and gathers of
    parameters, the copies for them, and the host take as long as they do."""
    computing = [node for node in graph.nodes if node.kind == "compute" and node.pass_ in ("fwd", "bwd")]
    if not computing:
        raise CannotTell("The trace does not show what the forward and the backward pass compute.")
    staying = _of_parameters(graph)
    for node in computing:
        if (node.name, node.pass_) not in staying:
            fixed_ns = min(node.duration_ns, FLOOR_NS)
            usual, *ends = (fixed_ns + (node.duration_ns - fixed_ns) * times**power for power in (USUAL, LEAST, MOST))
            node.duration_ns, node.leeway = usual, (min(ends) / usual, max(ends) / usual)
    latency_ns = latencies_ns(graph.nodes)
    for place, node in enumerate(graph.nodes):
        if node.kind == "comm" and node.role == "activation":
            node.duration_ns = latency_ns[place] + (node.duration_ns - latency_ns[place]) * times
            node.bytes = round(node.bytes * times) if node.bytes else None
            node.leeway = (node.leeway[0] * LEEWAY[0], node.leeway[1] * LEEWAY[1])


def more_ranks(graph: StepGraph, times: float) -> None:
    """So many times the ranks share the data: gradients are reduced, and parameters gathered, among more. Each rank
    moves at least what it does in a ring, and waits at least for the steps of a tree. What the optimizer does to shards
    becomes less."""
    shared = [place for place, node in enumerate(graph.nodes) if node.kind == "comm" and node.role in _OF_RANKS]
    if not shared:
        raise CannotTell("No reduction of gradients, and no gather of parameters, was recorded.")
    if times <= 1:
        raise CannotTell("Only more ranks than now are predicted.")
    latency_ns, sharded = latencies_ns(graph.nodes), 1.0
    for place in shared:
        node = graph.nodes[place]
        if node.group_size is None or node.group_size < 2:
            raise CannotTell("The trace does not have the number of ranks that share the data.")
        assert node.call is not None
        ranks = round(node.group_size * times)
        before, after = (bus_share(node.call.collective, count) for count in (node.group_size, ranks))
        moving_ns = (node.duration_ns - latency_ns[place]) * (after / before if before else 1.0)
        node.duration_ns = latency_ns[place] * log2(ranks) / log2(node.group_size) + moving_ns
        sharded = node.group_size / ranks if node.role == "parameter" else sharded
        node.group_size = ranks
    for node in graph.nodes:
        if node.kind == "compute" and node.pass_ == "other":
            node.duration_ns *= sharded


_OF_RANKS = ("gradient", "parameter")


def _of_parameters(graph: StepGraph) -> set[tuple[str, str]]:
    """Returns the names and passes of kernels that copy or scale parameters or gradients: those of FSDP2 and of lists,
    and what a collective of either needs, or what needs it, but GEMMs."""
    found: set[tuple[str, str]] = set()
    for node in graph.nodes:
        if node.kind == "compute" and not node.is_gemm and _OF_PARAMETERS.search(node.name):
            found.add((node.name, node.pass_))
        for edge in node.after if node.kind == "comm" and node.role == "gradient" else ():
            before = graph.nodes[edge.node]
            if edge.why == "needs" and before.kind == "compute" and not before.is_gemm:
                found.add((before.name, before.pass_))
    return found
