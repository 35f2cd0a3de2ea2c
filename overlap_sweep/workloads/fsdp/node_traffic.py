"""Bytes that training sends within a node and between nodes in a step, computed from how the model is sharded.

A collective of n ranks on S bytes makes each rank send (n - 1) / n S, an all-reduce twice that: the factors of
nccl-tests (doc/PERFORMANCE.md), which hold for NCCL's and gloo's rings. A ring visits the ranks in order, so that it
leaves each node once: of a group with m ranks on each of several nodes, 1 / m of what is sent crosses between nodes.
NCCL's trees, for small all-reduces, send about as much.

FSDP2 communicates as ZeRO's stage 3 does (Rajbhandari et al., arXiv:1910.02054, section 7): all-gathers of the
parameters in forward and backward, then a reduce-scatter of the gradients.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from overlap_sweep.report.table import Column
from overlap_sweep.workloads.fsdp.config import Resolved

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class NodeTraffic(NamedTuple):
    """Bytes that a rank sends in a step, mean over the ranks: to ranks of its own node, and of others."""

    within_node: float
    between_nodes: float


def node_traffic(
    *,
    parameter_bytes: float,
    gradient_bytes: float,
    ranks: int,
    nodes: int,
    replicas: int = 1,
    reshard_after_forward: bool | int = True,
    micro_batches: int = 1,
) -> NodeTraffic:
    """Returns what a rank sends in a step of sharded data parallelism. `replicas=ranks` is plain data parallelism.

    parameter_bytes, gradient_bytes: the whole model's, as they are gathered and reduced, without FSDP2's padding.
    reshard_after_forward: as in FSDP2; with a number of ranks the backward pass gathers among that many.
    """
    shards, per_node = ranks // replicas, ranks // nodes
    of_model = [range(first, first + shards) for first in range(0, ranks, shards)]
    of_shard = [range(first, ranks, shards) for first in range(shards)]
    collectives = [(micro_batches * parameter_bytes, of_model), (gradient_bytes, of_model)]
    if reshard_after_forward:
        group = shards if reshard_after_forward is True else int(reshard_after_forward)
        again = [range(first, first + group) for first in range(0, ranks, group)]
        collectives.append((micro_batches * parameter_bytes, again))
    # Each rank has one part of the reduced gradients.
    collectives.append((2 * gradient_bytes / shards, of_shard))
    within = between = 0.0
    for size, groups in collectives:
        count = len(groups[0])
        links = [(rank, group[(place + 1) % count]) for group in groups for place, rank in enumerate(group)]
        crossing = sum(rank // per_node != following // per_node for rank, following in links) / ranks
        sent = size * (count - 1) / count
        within, between = within + sent * (1 - crossing), between + sent * crossing
    return NodeTraffic(within, between)


def traffic_of(point: Resolved, parameters: int) -> NodeTraffic | None:
    """Returns the traffic of a resolved training point with so many parameters; None on a single node. Without the
    all-reduce of the gradients' norm, which is one number."""
    nodes, ranks = point.runtime.nodes or 1, point.distributed.dp_size
    if nodes == 1:
        return None
    fsdp, distributed = point.fsdp, point.distributed
    if distributed.strategy == "ddp":
        # Parameters and gradients are in float32, whatever autocast computes in.
        size = parameters * _BYTES["fp32"]
        reduced = node_traffic(parameter_bytes=0, gradient_bytes=size, ranks=ranks, nodes=nodes, replicas=ranks)
        if not distributed.overlap_reduce_scatter:
            return reduced
        load = node_traffic(parameter_bytes=0, gradient_bytes=size, ranks=ranks, nodes=nodes)
        return NodeTraffic(*(sum(both) for both in zip(reduced, load, strict=True)))
    return node_traffic(
        parameter_bytes=parameters * _BYTES[point.precision],
        gradient_bytes=parameters * _BYTES[fsdp.reduce_dtype or point.precision],
        ranks=ranks,
        nodes=nodes,
        replicas=fsdp.replicas,
        reshard_after_forward=fsdp.reshard_after_forward,
        micro_batches=point.training.gradient_accumulation,
    )


def _column(name: str, sent: str, header: str, dropped: int) -> Column[NodeTraffic]:
    computed = "computed from the sharding, mean over the ranks; empty for points on one node."
    about, value = f"Data that a rank sends {sent} in a step, 10^9 bytes: {computed}", attrgetter(name)
    return Column(f"{name}_gb", lambda t: value(t) / 1e9, about, header=header, show="{:.3g}".format, dropped=dropped)


COLUMNS = (
    _column("within_node", "within its node", "GB in node", 2),
    _column("between_nodes", "to other nodes", "GB between nodes", 6),
)
"""Columns of the points' table, and of the settings'."""
