"""Distributes the model: FSDP2 shards each unit, DDP keeps a replica on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.futures import Future
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.fsdp.collectives import FLOOR, NONE, POINT, Collectives
from overlap_sweep.workloads.fsdp.ranking_model import RankingModel
from overlap_sweep.workloads.fsdp.telemetry import ALL_REDUCE, AUXILIARY, REDUCE_SCATTER

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: RankingModel, point: Mapping[str, Any], ranks: Ranks, collectives: Collectives) -> None:
    """Shards the model in place. Collective."""
    fsdp = point["fsdp"]
    replicas = fsdp["replicas"]
    mesh = _mesh(ranks.device.type, ranks.world_size, replicas)
    # Gradients have the type in which parameters are gathered.
    reduce_dtype = DTYPES[fsdp["reduce_dtype"]] if fsdp["reduce_dtype"] else None
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[point["precision"]], reduce_dtype=reduce_dtype)
    reshard = fsdp["reshard_after_forward"]
    for unit in model.units:
        fully_shard(unit, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    gather, scatter = _Gather(collectives, fsdp["limit_all_gathers"]), _Scatter(collectives)
    for unit in model.units:
        unit.set_custom_all_gather(gather)  # type: ignore[operator]
        unit.set_custom_reduce_scatter(scatter)  # type: ignore[operator]
        if replicas > 1:
            # Not FSDP2's own hybrid sharding, whose all-reduce cannot be observed.
            unit.set_all_reduce_hook(  # type: ignore[operator]
                partial(_add_replicas, mesh["replicate"].get_group(), replicas, collectives),
                stream=collectives.own_stream(ALL_REDUCE),
            )
    _schedule(model.units, fsdp, collectives)


@cache
def _mesh(device: str, ranks: int, replicas: int) -> DeviceMesh:
    """Returns the mesh, cached for all points of a group, since each mesh creates process groups that stay."""
    if replicas == 1:
        # The mesh of the whole world uses the existing group.
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def _schedule(units: Sequence[Any], fsdp: Mapping[str, Any], collectives: Collectives) -> None:
    """Sets the units that each unit prefetches. By default the host runs ahead in the forward, and each unit gathers
    the one before it in the backward."""
    ahead = fsdp["forward_prefetch"]
    for index, unit in enumerate(units):
        if ahead:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])
        if fsdp["backward_prefetch"] != "BACKWARD_PRE":
            # Only a non-empty list replaces torch's own; the unit itself is gathered already.
            unit.set_modules_to_backward_prefetch([unit])
        if fsdp["backward_prefetch"] == "BACKWARD_POST" and index:
            unit.backward_ended = partial(units[index - 1].unshard, async_op=True)
        if fsdp["limit_all_gathers"]:
            unit.forward_ended = collectives.layer_computed
            unit.backward_ended = partial(_both, collectives.layer_computed, unit.backward_ended)


def _add_replicas(group: dist.ProcessGroup, replicas: int, collectives: Collectives, gradients: Tensor) -> None:
    """All-reduces, over the replicas, this rank's part of the reduce-scatter."""
    if collectives.mode != FLOOR:
        collectives.now(ALL_REDUCE, partial(dist.all_reduce, gradients, group=group))
    gradients.div_(replicas)
    if gradients.is_cuda:
        # FSDP2 releases them once they are cast, and the reduce-scatter's stream would reuse the memory while this
        # stream still reduces.
        gradients.record_stream(torch.cuda.current_stream())


def _both(first: Any, second: Any) -> None:
    first()
    second()


class _Gather(AllGather):
    """All-gathers of parameters."""

    def __init__(self, collectives: Collectives, limited: bool) -> None:
        self._collectives, self._limited = collectives, limited
        self._stale: dict[tuple[Any, ...], Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:  # type: ignore[override]
        if self._collectives.mode != FLOOR:
            return torch.empty(*size, dtype=dtype, device=device)
        # Parameters that are not gathered: values like weights, as the speed of GEMMs depends on the values.
        key = (*size, dtype)
        if key not in self._stale:
            self._stale[key] = torch.empty(*size, dtype=dtype, device=device).normal_(std=0.02)
        return self._stale[key]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._collectives.mode == FLOOR:
            return None
        if self._limited and self._collectives.mode == POINT:
            self._collectives.wait_for_layers()
        issue = partial(dist.all_gather_into_tensor, output_tensor, input_tensor, group)
        # On a CPU there are no streams: FSDP2 waits for the work.
        if async_op or output_tensor.device.type == "cpu":
            return self._collectives.later(AUXILIARY, issue)
        self._collectives.now(AUXILIARY, issue)
        return None


class _Scatter(ReduceScatter):
    """Reduce-scatters of gradients. FSDP2 uses the sum at once, on its own stream: on a CPU nothing can overlap it."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:  # type: ignore[override]
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        if self._collectives.mode == FLOOR:
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
            return None
        issue = partial(dist.reduce_scatter_tensor, output_tensor, input_tensor, op, group)
        self._collectives.now(REDUCE_SCATTER, issue)
        return None


def replicate(
    model: nn.Module, point: Mapping[str, Any], ranks: Ranks, collectives: Collectives
) -> DistributedDataParallel:
    """Returns the model in DDP, its buckets reduced by a communication hook. Collective."""
    distributed = point["distributed"]
    replicated = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=distributed["bucket_cap_mb"],
        gradient_as_bucket_view=distributed["gradient_as_bucket_view"],
        init_sync=point["fsdp"]["sync_module_states"],
    )

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        gradients.div_(ranks.world_size)
        if distributed["overlap_reduce_scatter"] and collectives.mode != FLOOR:
            _add_load(gradients, distributed["overlap_clone_for_reduce_scatter"], ranks, collectives)
        return collectives.reduced(ALL_REDUCE, partial(dist.all_reduce, gradients), gradients)

    # DDP checks these annotations, which postponed evaluation would turn into strings.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}
    replicated.register_comm_hook(None, hook)
    return replicated


def _add_load(gradients: Tensor, clone: bool, ranks: Ranks, collectives: Collectives) -> None:
    """Adds a reduce-scatter of the bucket as load, concurrent with its all-reduce."""
    short = -gradients.numel() % ranks.world_size
    whole = gradients.clone() if clone else gradients
    whole = pad(whole, (0, short)) if short else whole
    part = torch.empty(whole.numel() // ranks.world_size, dtype=whole.dtype, device=whole.device)
    issue = partial(dist.reduce_scatter_tensor, part, whole, group=_group_of_load(ranks.world_size))
    if collectives.mode == NONE:
        collectives.alone(REDUCE_SCATTER, issue)
    else:
        collectives.beside_step(REDUCE_SCATTER, issue, (whole, part))


@cache
def _group_of_load(world_size: int) -> dist.ProcessGroup:
    """Returns a separate group, whose collectives don't wait for the all-reduces."""
    group = dist.new_group(list(range(world_size)))
    assert group is not None
    return group
