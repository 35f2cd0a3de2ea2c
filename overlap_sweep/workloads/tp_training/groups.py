"""Who is tensor-parallel with whom: ranks [dp, tp], neighbours in a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlap_sweep.measure.ranks import Ranks


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
