"""Bytes that training sends within a node and between nodes in a step, computed from how the model is sharded.

A collective of n ranks on S bytes makes each rank send (n - 1) / n S, an all-reduce twice that: the factors of
nccl-tests (doc/PERFORMANCE.md), which hold for NCCL's and gloo's rings. A ring visits the ranks in order, so that it
leaves each node once: of a group with m ranks on each of several nodes, 1 / m of what is sent crosses between nodes.
NCCL's trees, for small all-reduces, send about as much.

FSDP2 communicates as ZeRO's stage 3 does (Rajbhandari et al., arXiv:1910.02054, section 7): all-gathers of the
parameters in forward and backward, then a reduce-scatter of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap_sweep.report.table import Column
from overlap_sweep.workloads.fsdp.config import Resolved

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes that a rank sends in a step: the mean over the ranks."""

    within_node: float
    """To ranks of its own node."""
    between_nodes: float
    """To ranks of other nodes."""

    def __add__(self, other: NodeTraffic) -> NodeTraffic:
        return NodeTraffic(self.within_node + other.within_node, self.between_nodes + other.between_nodes)

    def __rmul__(self, times: int) -> NodeTraffic:
        return NodeTraffic(times * self.within_node, times * self.between_nodes)


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
    shards = ranks // replicas
    of_model = [range(first, first + shards) for first in range(0, ranks, shards)]
    of_shard = [range(first, ranks, shards) for first in range(shards)]
    traffic = micro_batches * _collective(parameter_bytes, of_model, ranks, nodes)
    if reshard_after_forward:
        group = shards if reshard_after_forward is True else int(reshard_after_forward)
        again = [range(first, first + group) for first in range(0, ranks, group)]
        traffic += micro_batches * _collective(parameter_bytes, again, ranks, nodes)
    traffic += _collective(gradient_bytes, of_model, ranks, nodes)
    # Each rank has one part of the reduced gradients.
    return traffic + 2 * _collective(gradient_bytes / shards, of_shard, ranks, nodes)


def _collective(size: float, groups: Sequence[range], ranks: int, nodes: int) -> NodeTraffic:
    """Returns what a rank sends in an all-gather or a reduce-scatter of `size` bytes in each of these equal groups."""
    count, per_node = len(groups[0]), ranks // nodes
    links = [(rank, group[(place + 1) % count]) for group in groups for place, rank in enumerate(group)]
    crossing = sum(rank // per_node != following // per_node for rank, following in links)
    sent = size * (count - 1) / count
    return NodeTraffic(sent * (1 - crossing / ranks), sent * crossing / ranks)


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
        loads = distributed.overlap_reduce_scatter
        return reduced + loads * node_traffic(parameter_bytes=0, gradient_bytes=size, ranks=ranks, nodes=nodes)
    return node_traffic(
        parameter_bytes=parameters * _BYTES[point.precision],
        gradient_bytes=parameters * _BYTES[fsdp.reduce_dtype or point.precision],
        ranks=ranks,
        nodes=nodes,
        replicas=fsdp.replicas,
        reshard_after_forward=fsdp.reshard_after_forward,
        micro_batches=point.training.gradient_accumulation,
    )


def _gb(traffic_bytes: float) -> str:
    return f"{traffic_bytes:.3g}"


COLUMNS: tuple[Column[NodeTraffic], ...] = (
    Column(
        "within_node_gb",
        lambda traffic: traffic.within_node / 1e9,
        "Data that a rank sends within its node in a step, 10^9 bytes: computed from the sharding, mean over the "
        "ranks; empty for points on one node.",
        header="GB in node",
        show=_gb,
        dropped=2,
    ),
    Column(
        "between_nodes_gb",
        lambda traffic: traffic.between_nodes / 1e9,
        "Data that a rank sends to other nodes in a step, 10^9 bytes: computed from the sharding, mean over the "
        "ranks; empty for points on one node.",
        header="GB between nodes",
        show=_gb,
        dropped=6,
    ),
)
"""Columns of the points' table, and of the settings'."""
