"""DDP: a model on every rank, its buckets reduced by a communication hook."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.workloads.fsdp.collectives import FLOOR, NONE, Collectives
from overlap_sweep.workloads.fsdp.telemetry import ALL_REDUCE, REDUCE_SCATTER


def replicate(
    model: nn.Module, point: Mapping[str, Any], ranks: Ranks, collectives: Collectives
) -> DistributedDataParallel:
    """Collective."""
    distributed = point["distributed"]
    replicated = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=distributed["bucket_cap_mb"],
        gradient_as_bucket_view=distributed["gradient_as_bucket_view"],
        init_sync=point["fsdp"]["sync_module_states"],
    )
    load = _Load(distributed, ranks) if distributed["overlap_reduce_scatter"] else None

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        gradients.div_(ranks.world_size)
        if load and collectives.mode != FLOOR:
            load.add(gradients, collectives)

        def issue(asynchronously: bool) -> dist.Work | None:
            return dist.all_reduce(gradients, async_op=asynchronously)

        return collectives.reduced(ALL_REDUCE, issue, gradients)

    # As its own hooks are: DDP looks for these annotations among the builtins.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}
    replicated.register_comm_hook(None, hook)
    return replicated


class _Load:
    """A reduce-scatter of every bucket that nobody needs, beside its all-reduce."""

    def __init__(self, distributed: Mapping[str, Any], ranks: Ranks) -> None:
        self._clone, self._ranks = distributed["overlap_clone_for_reduce_scatter"], ranks

    def add(self, gradients: Tensor, collectives: Collectives) -> None:
        short = -gradients.numel() % self._ranks.world_size
        whole = gradients.clone() if self._clone else gradients
        whole = pad(whole, (0, short)) if short else whole
        part = torch.empty(whole.numel() // self._ranks.world_size, dtype=whole.dtype, device=whole.device)
        group = _group_of_load(self._ranks.world_size)

        def issue(asynchronously: bool) -> dist.Work | None:
            return dist.reduce_scatter_tensor(part, whole, group=group, async_op=asynchronously)

        if collectives.mode == NONE:
            collectives.alone(REDUCE_SCATTER, issue)
        else:
            collectives.beside_step(REDUCE_SCATTER, issue, (whole, part))


@cache
def _group_of_load(world_size: int) -> dist.ProcessGroup:
    """Of its own, so that it waits for none of the all-reduces."""
    group = dist.new_group(list(range(world_size)))
    assert group is not None
    return group
