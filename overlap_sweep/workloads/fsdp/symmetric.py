"""Symmetric memory of NCCL for the buffers of FSDP2's collectives. NCCL then moves them by kernels that read and write
the other GPUs' buffers directly, or, with the zero-CTA policy, all-gathers them by copy engines.

NVLink multicast stays off without `runtime.multicast`. NCCL 2.27 to 2.30 creates multicast objects, also for windows of
symmetric memory, only in communicators with NVLS (`nvlsSupport`), which NCCL_NVLS_ENABLE=0 turns off. torch's own
symmetric memory, with kernels of its own, is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks
from overlap_sweep.workloads.fsdp.config import COPY_ENGINES

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""Returns an uninitialised tensor of a size."""

LEAST_TORCH = (2, 9)
"""First torch that registers a memory pool as symmetric."""
LEAST_NCCL = (2, 27)
LEAST_NCCL_OF_COPY_ENGINES = (2, 28)


def check(kind: str, ranks: Ranks) -> None:
    """Raises Refused where torch or NCCL have no symmetric memory, or GPUs don't reach each other's memory.
    Collective."""
    hip, nccl = torch.version.hip, (0, 0) if torch.version.hip else torch.cuda.nccl.version()
    if reason := lacks(kind, torch.__version__, nccl, rocm=bool(hip)):
        raise Refused(reason)
    own = ranks.local_rank
    others = (peer for peer in range(ranks.ranks_per_node) if peer != own)
    (alone,) = ranks.slowest([float(any(not torch.cuda.can_device_access_peer(own, peer) for peer in others))])
    if alone:
        raise Refused(f"fsdp.symmetric_memory={kind} needs GPUs with peer access to each other")


def lacks(kind: str, torch_version: str, nccl: Sequence[int], *, rocm: bool) -> str | None:
    """Returns what the installed libraries lack for symmetric memory; None if nothing."""
    given = f"fsdp.symmetric_memory={kind}"
    if rocm:
        return f"{given} needs NCCL; this torch is built for ROCm"
    if tuple(map(int, torch_version.split(".")[:2])) < LEAST_TORCH:
        return f"{given} needs torch {_dotted(LEAST_TORCH)}; {torch_version} is installed"
    least = LEAST_NCCL_OF_COPY_ENGINES if kind == COPY_ENGINES else LEAST_NCCL
    if tuple(nccl[:2]) < least:
        return f"{given} needs NCCL {_dotted(least)}; torch has {_dotted(nccl)}"
    return None


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


@cache
def allocator(group: dist.ProcessGroup, device: torch.device) -> Allocate:
    """Returns what allocates in symmetric memory of the group, whose ranks must allocate and free in the same order.
    Cached for all points of the process, since what NCCL has registered stays. Collective."""
    # A pool can only be registered with a communicator that exists; the first collective makes it.
    dist.barrier(group)
    backend: Any = group._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    # Also registers what is allocated later.
    backend.register_mem_pool(pool, symm=True)

    def empty(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(*size, dtype=dtype, device=device)

    return empty
