"""PyTorch's symmetric-memory operators, the ones that copy from rank to rank. CUDA only, on one node.

The fused ones cut the rows by rank. While one rank's chunk is multiplied, another's is copied peer to peer, on two
streams in turn. They are what `torch.compile`'s async-TP pass puts in place of a collective and its GEMM. The
low-contention ones copy with the copy engines, on a stream of their own, and are waited for later. All of them share
one buffer per group, which grows when it is too small: only one of them may be under way.

None of them here uses multicast: a small all-gather would where the gathered tensor is not asked for, so it always is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from overlap_sweep.backends import Outputs, Problem
from overlap_sweep.backends.torch.communicator import Pending
from overlap_sweep.backends.torch.overlap import as_bytes, multiplied
from overlap_sweep.errors import Refused
from overlap_sweep.overlap.space import Setting

OLDEST_TORCH = (2, 11)
"""From here on symmetric memory finds a group by its name; before, each group had to be enabled."""

_KernelCall = Callable[[int], Outputs]


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


@dataclass(frozen=True)
class SymmetricMemory:
    """`torch.overlap.Overlap` of a process group: the fused operators, and the low-contention collectives beside
    what does not need them."""

    group_name: str

    def gather_multiply(self, shard: Tensor, matrix: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        gathered, product = all_gather_matmul(shard, matrix, self.group_name)
        return gathered, product if bias is None else product.add_(bias)

    def multiply_scatter(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return matmul_reduce_scatter(rows, matrix, self.group_name)

    def all_gather(self, shard: Tensor) -> Pending:
        gathered = all_gather(shard, self.group_name)
        return Pending(gathered, [_Registered(gathered)], [shard])

    def reduce_scatter(self, full: Tensor) -> Pending:
        shard = reduce_scatter(full, self.group_name)
        return Pending(shard, [_Registered(shard)], [full])


@dataclass(frozen=True)
class _Registered:
    """The work that torch has registered for a tensor."""

    result: Tensor

    def wait(self) -> None:
        wait(self.result)


def build_kernel(setting: Setting, problem: Problem) -> _KernelCall:
    if reason := missing():
        raise Refused(reason)
    group, method = group_name(), setting["method"]
    if problem.shape.kernel == "gemm_ar":
        if method == "scatter_gather":
            return _scatter_gather(problem, group)
        reduces = {"one_shot": "one_shot_all_reduce", "two_shot": "two_shot_all_reduce_"}
        return _all_reduce(problem, group, getattr(torch.ops.symm_mem, reduces[method]))
    if problem.shape.gathers:
        makers = {"ring_exchange": _gather, "async_input_mm": _async_input, "bulk": _bulk_gather}
        return makers[method](problem, group)
    return {"ring_exchange": _scatter, "bulk": _bulk_scatter}[method](problem, group)


def _gather(problem: Problem, group: str) -> _KernelCall:
    weight, matrix = problem.weight, problem.weight.data.t()

    def call(at: int) -> Outputs:
        return Outputs(all_gather_matmul(problem.inputs[at].data, matrix, group)[1])

    def call_fp8(at: int) -> Outputs:
        x = problem.inputs[at]
        _, (output,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            *(x.data, [matrix], x.scale, [weight.scale], 0, group),
            *([None], [None], [problem.out_dtype], [True]),
        )
        return Outputs(output)

    return call if weight.scale is None else call_fp8


def _scatter(problem: Problem, group: str) -> _KernelCall:
    weight, matrix = problem.weight, problem.weight.data.t()

    def call(at: int) -> Outputs:
        return Outputs(matmul_reduce_scatter(problem.inputs[at].data, matrix, group))

    def call_fp8(at: int) -> Outputs:
        x = problem.inputs[at]
        output = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            *(x.data, matrix, x.scale, weight.scale, "sum", 0, 0, group, [problem.shape.m, problem.shape.n]),
            *(None, None, problem.out_dtype, True),
        )
        return Outputs(output)

    return call if weight.scale is None else call_fp8


def _async_input(problem: Problem, group: str) -> _KernelCall:
    matrix = problem.weight.data.t()
    # torch's own choice between this and the chunked operator is by an environment variable and by size.
    native: Any = _symmetric_memory._fused_all_gather_matmul_native
    return lambda at: Outputs(native(problem.inputs[at].data, matrix, group)[1])


def _bulk_gather(problem: Problem, group: str) -> _KernelCall:
    def call(at: int) -> Outputs:
        moving = all_gather(as_bytes(problem.inputs[at].data), group)
        output = multiplied(problem, at, problem.whole[at].data)
        return Outputs(output, moved=wait(moving).view(problem.whole[at].data.dtype))

    return call


def _bulk_scatter(problem: Problem, group: str) -> _KernelCall:
    def call(at: int) -> Outputs:
        moving = reduce_scatter(problem.whole[at].data, group)
        product = multiplied(problem, at, problem.inputs[at].data)
        return Outputs(wait(moving), product=product)

    return call


def _all_reduce(problem: Problem, group: str, reduce: Callable[[Tensor, str, str], Tensor]) -> _KernelCall:
    """The GEMM writes into memory that all ranks can read, and `reduce` sums it. Collective."""
    shape = problem.shape
    shared = _symmetric_memory.empty(shape.m, shape.n, dtype=problem.out_dtype, device=problem.weight.data.device)
    _symmetric_memory.rendezvous(shared, group)  # type: ignore[arg-type]

    def call(at: int) -> Outputs:
        multiplied(problem, at, problem.inputs[at].data, shared)
        return Outputs(reduce(shared, "sum", group))

    return call


def _scatter_gather(problem: Problem, group: str) -> _KernelCall:
    matrix = problem.weight.data.t()

    def call(at: int) -> Outputs:
        shard = matmul_reduce_scatter(problem.inputs[at].data, matrix, group)
        return Outputs(wait(all_gather(shard, group)))

    return call
