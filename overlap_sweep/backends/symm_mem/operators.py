"""PyTorch's symmetric-memory operators, the ones that copy from rank to rank. CUDA only, on one node.

The fused ones cut the rows by rank. While one rank's chunk is multiplied, another's is copied peer to peer, on two
streams in turn. They are what `torch.compile`'s async-TP pass puts in place of a collective and its GEMM. The
low-contention ones copy with the copy engines, on a stream of their own, and are waited for later. All of them share
one buffer per group, which grows when it is too small: only one of them may be under way.

None of them here uses multicast: a small all-gather would where the gathered tensor is not asked for, so it always is.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

OLDEST_TORCH = (2, 11)
"""From here on symmetric memory finds a group by its name; before, each group had to be enabled."""


def missing() -> str | None:
    """Why the operators cannot be used with the torch that is installed, or None."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        return f"symmetric memory needs torch {'.'.join(map(str, OLDEST_TORCH))} or later, not {torch.__version__}"
    return None


def group_name(group: dist.ProcessGroup | None = None) -> str:
    """What the operators know a process group by: the whole worker group's by default."""
    name: str = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    return name


def all_gather_matmul(shard: Tensor, matrix: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Gather `shard` [rows, k] and multiply by `matrix` [k, n]: ([world * rows, k], [world * rows, n])."""
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(shard, [matrix], 0, group_name, return_A=True)
    return gathered, product


def matmul_reduce_scatter(rows: Tensor, matrix: Tensor, group_name: str) -> Tensor:
    """Multiply `rows` [world * m, k] by `matrix` [k, n]: this rank's [m, n] of the sum over the ranks."""
    product: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(rows, matrix, "sum", 0, group_name)
    return product


def all_gather(shard: Tensor, group_name: str) -> Tensor:
    """[rows, columns] of every rank -> [world * rows, columns], complete after `wait`. Keep `shard` until then."""
    gathered: Tensor = torch.ops.symm_mem._low_contention_all_gather(shard, group_name)
    return gathered


def reduce_scatter(full: Tensor, group_name: str) -> Tensor:
    """[world * rows, columns] of every rank -> this rank's [rows, columns] of their sum, complete after `wait`. Keep
    `full` until then."""
    shard: Tensor = torch.ops.symm_mem._low_contention_reduce_scatter(full, "sum", group_name)
    return shard


def wait(result: Tensor) -> Tensor:
    """Have the current stream wait for what `all_gather` or `reduce_scatter` returned."""
    complete: Tensor = torch.ops._c10d_functional.wait_tensor(result)
    return complete


def close() -> None:
    """Free the memory that the ranks share, which otherwise outlives the process groups. Collective."""
    if _symmetric_memory._group_name_to_workspace_tensor:
        torch.cuda.synchronize()
        _symmetric_memory._group_name_to_workspace_tensor.clear()
