"""What a tensor-parallel stack is to the benchmark, three calls that a training step is made of; and who is
tensor-parallel with whom: ranks [dp, tp], neighbours in a tensor-parallel group.

Each is a module of this package with `build(point, ranks, groups) -> Implementation`, called on every rank. It returns
the model in training, with the weights of `initial_weights`. Refused from it skips the point with that reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap_sweep.measure.ranks import Ranks

MODULES = {
    "autotp": "overlap_sweep.workloads.tp_training.autotp",
    "fsdp_dtensor": "overlap_sweep.workloads.tp_training.fsdp_dtensor",
    "async_tp": "overlap_sweep.workloads.tp_training.async_tp",
    "megatron": "overlap_sweep.workloads.tp_training.megatron",
}


@dataclass(frozen=True)
class Groups:
    """Of this rank. The tensor-parallel ranks compute the same tokens, the data-parallel ones have the same weights."""

    mesh: DeviceMesh
    """Dimensions `dp` and `tp`."""
    tp: dist.ProcessGroup
    dp: dist.ProcessGroup

    @property
    def tp_size(self) -> int:
        return dist.get_world_size(self.tp)

    @property
    def tp_rank(self) -> int:
        return dist.get_rank(self.tp)

    @property
    def dp_size(self) -> int:
        return dist.get_world_size(self.dp)

    @property
    def dp_rank(self) -> int:
        return dist.get_rank(self.dp)


@cache
def groups_of(ranks: Ranks, tp_size: int, dp_size: int) -> Groups:
    """Made once for all points of a process: groups stay. Collective."""
    assert tp_size * dp_size == ranks.world_size
    mesh = init_device_mesh(ranks.device.type, (dp_size, tp_size), mesh_dim_names=("dp", "tp"))
    return Groups(mesh, mesh.get_group("tp"), mesh.get_group("dp"))


@dataclass(frozen=True)
class Facts:
    """What only the implementation knows of how it trains."""

    details: dict[str, Any] = field(default_factory=dict)
    """Of result.json, such as who computes attention. JSON."""
    warnings: list[str] = field(default_factory=list)
    """What a reader must know before believing the numbers, one sentence each."""


class Implementation(Protocol):
    """A model in training on this rank. Nothing here waits for the device unless the stack itself does."""

    def forward(self, tokens: Tensor, labels: Tensor, last: bool) -> Tensor:
        """The loss of one micro batch, mean over this data-parallel rank's tokens, float32, the same on all its
        tensor-parallel ranks. tokens, labels: [batch, sequence], int64; labels are those of the next token already.
        `last`: of the step's micro batches."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Of the loss that `forward` returned. Gradients are averaged over micro batches and data-parallel ranks; they
        are reduced with the last one, unless the stack reduces each."""
        ...

    def update(self) -> Tensor:
        """Clip, take the optimizer's step, clear the gradients. Returns the norm of the gradients before, over all
        parameters and ranks: a scalar on any device; not finite where the step was left out (float16)."""
        ...

    def facts(self) -> Facts:
        """Asked once, after the last step."""
        ...

    def close(self) -> None:
        """Free what outlives the object: process groups of its own, buffers, state of the library's. Collective."""
        ...


def load(name: str) -> Any:
    """The implementation's module."""
    return import_module(MODULES[name])
