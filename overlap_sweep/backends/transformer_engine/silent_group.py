"""A process group in which nobody communicates: what a layer costs without its collectives, the floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch's type stubs know neither the constructor nor the methods that Python may override.
_ProcessGroup: Any = dist.ProcessGroup
_c10d: Any = torch._C._distributed_c10d


class SilentGroup(_ProcessGroup):
    """Looks like a group of `size` ranks to `torch.distributed`; its collectives take no time on the GPU.

    What is gathered is a buffer that was filled once, with copies of the first shard of that shape: a GEMM on real
    numbers takes longer than one on zeros. What is scattered is a view of this rank's part of the input. It is not
    registered with torch.distributed, which would want a backend for it; use it as a group, not as a default.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gathered: dict[tuple[Any, ...], Tensor] = {}

    def all_gather_single(self, output: Tensor, shard: Tensor, options: Any = None) -> dist.Work:
        key = tuple(output.shape), output.dtype
        if key not in self._gathered:
            self._gathered[key] = shard.detach().reshape(-1).repeat(self.size()).view(output.shape)
        _rebind(output, self._gathered[key])
        return _done()

    def reduce_scatter_single(self, output: Tensor, full: Tensor, options: Any = None) -> dist.Work:
        _rebind(output, full.detach().reshape(self.size(), -1)[self.rank()].view(output.shape))
        return _done()

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:
        return _done()

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


def _rebind(output: Tensor, source: Tensor) -> None:
    """Make `output` a view of `source`'s memory: nothing is copied."""
    output.set_(source.untyped_storage(), source.storage_offset(), source.shape, source.stride())


def _done() -> dist.Work:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    work: dist.Work = _c10d._create_work_from_future(future)
    return work
