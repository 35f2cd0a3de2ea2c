"""PyTorch's symmetric-memory operators that copy from rank to rank. CUDA only, on one node.

The fused operators split the rows by rank. While one rank's chunk is multiplied, another's is copied peer to peer, on
two streams in turn. `torch.compile`'s async-TP pass puts them in place of a collective and its GEMM. The low-contention
operators use the copy engines on a separate stream and are waited for later. All of them share one buffer per group,
which grows when it is too small, so only one may run at a time.

None of them uses multicast here: a small all-gather would if the gathered tensor is not returned, so it always is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory

from overlap_sweep.backends import Outputs, Problem
from overlap_sweep.backends.communicator import Pending
from overlap_sweep.backends.torch.overlap import multiplied, multiply_beside
from overlap_sweep.errors import Refused
from overlap_sweep.overlap.space import Setting

OLDEST_TORCH = (2, 11)
"""First version that finds a group by name; before, each group had to be enabled."""

_KernelCall = Callable[[int], Outputs]


def group_name(group: dist.ProcessGroup | None = None) -> str:
    """Returns the name by which the operators know a process group, by default the whole worker group."""
    name: str = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    return name


def close() -> None:
    """Frees the memory that the ranks share, which otherwise outlives the process groups. Collective."""
    if _symmetric_memory._group_name_to_workspace_tensor:
        torch.cuda.synchronize()
        _symmetric_memory._group_name_to_workspace_tensor.clear()


@dataclass(frozen=True)
class SymmetricMemory:
    """`torch.overlap.Overlap` of a process group: the fused operators, and the low-contention collectives next to
    independent GEMMs."""

    group_name: str

    def gather_multiply(self, shard: Tensor, matrix: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(
            shard, [matrix], 0, self.group_name, return_A=True
        )
        return gathered, product if bias is None else product.add_(bias)

    def multiply_scatter(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(rows, matrix, "sum", 0, self.group_name)

    def all_gather(self, shard: Tensor) -> Pending:
        return _pending(torch.ops.symm_mem._low_contention_all_gather(shard, self.group_name), shard)

    def reduce_scatter(self, full: Tensor) -> Pending:
        return _pending(torch.ops.symm_mem._low_contention_reduce_scatter(full, "sum", self.group_name), full)


def _pending(result: Tensor, source: Tensor) -> Pending:
    """Returns the result as Pending; waiting uses the work that torch registered for it."""
    return Pending(result, [partial(torch.ops._c10d_functional.wait_tensor, result)], [source])


def build_kernel(setting: Setting, problem: Problem) -> _KernelCall:
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise Refused(f"symmetric memory requires torch {oldest} or later, not {torch.__version__}")
    memory, method = SymmetricMemory(group_name()), setting["method"]
    if method == "bulk":
        return lambda at: multiply_beside(problem, at, memory)
    if method in ("one_shot", "two_shot"):
        reduces = {"one_shot": "one_shot_all_reduce", "two_shot": "two_shot_all_reduce_"}
        return _all_reduce(problem, memory.group_name, getattr(torch.ops.symm_mem, reduces[method]))
    matrix = problem.weight.data.t()
    if method == "scatter_gather":
        return lambda at: Outputs(memory.all_gather(memory.multiply_scatter(problem.inputs[at].data, matrix)).wait())
    if method == "async_input_mm":
        # torch chooses between this and the chunked operator by an environment variable and by size.
        native: Callable[..., tuple[Tensor, Tensor]] = _symmetric_memory._fused_all_gather_matmul_native
        return lambda at: Outputs(native(problem.inputs[at].data, matrix, memory.group_name)[1])
    if problem.weight.scale is not None:
        return partial(_fp8, problem, matrix, memory.group_name)
    if problem.shape.gathers:
        return lambda at: Outputs(memory.gather_multiply(problem.inputs[at].data, matrix)[1])
    return lambda at: Outputs(memory.multiply_scatter(problem.inputs[at].data, matrix))


def _fp8(problem: Problem, matrix: Tensor, group: str, at: int) -> Outputs:
    x, scale, dtype = problem.inputs[at], problem.weight.scale, problem.out_dtype
    if problem.shape.gathers:
        gather = torch.ops.symm_mem.fused_all_gather_scaled_matmul
        return Outputs(gather(x.data, [matrix], x.scale, [scale], 0, group, [None], [None], [dtype], [True])[1][0])
    scatter, size = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter, [problem.shape.m, problem.shape.n]
    return Outputs(scatter(x.data, matrix, x.scale, scale, "sum", 0, 0, group, size, None, None, dtype, True))


def _all_reduce(problem: Problem, group: str, reduce: Callable[[Tensor, str, str], Tensor]) -> _KernelCall:
    """Returns a call of the GEMM into memory shared by all ranks, followed by `reduce`. Collective."""
    shape = problem.shape
    shared = _symmetric_memory.empty(shape.m, shape.n, dtype=problem.out_dtype, device=problem.weight.data.device)
    _symmetric_memory.rendezvous(shared, group)  # type: ignore[arg-type]

    def call(at: int) -> Outputs:
        multiplied(problem, at, problem.inputs[at].data, shared)
        return Outputs(reduce(shared, "sum", group))

    return call
