"""Symmetric memory's operators on a kernel's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory

from overlap_sweep.backends import Outputs, Problem
from overlap_sweep.backends.symm_mem import operators
from overlap_sweep.backends.torch.gemm import as_bytes, multiplied
from overlap_sweep.errors import Refused
from overlap_sweep.overlap.space import Setting

Call = Callable[[int], Outputs]


def build(setting: Setting, problem: Problem) -> Call:
    if reason := operators.missing():
        raise Refused(reason)
    group, method = operators.group_name(), setting["method"]
    if problem.shape.kernel == "gemm_ar":
        if method == "scatter_gather":
            return _scatter_gather(problem, group)
        reduces = {"one_shot": "one_shot_all_reduce", "two_shot": "two_shot_all_reduce_"}
        return _all_reduce(problem, group, getattr(torch.ops.symm_mem, reduces[method]))
    if problem.shape.gathers:
        makers = {"ring_exchange": _gather, "async_input_mm": _async_input, "bulk": _bulk_gather}
        return makers[method](problem, group)
    return {"ring_exchange": _scatter, "bulk": _bulk_scatter}[method](problem, group)


def _gather(problem: Problem, group: str) -> Call:
    weight, matrix = problem.weight, problem.weight.data.t()

    def call(at: int) -> Outputs:
        return Outputs(operators.all_gather_matmul(problem.inputs[at].data, matrix, group)[1])

    def call_fp8(at: int) -> Outputs:
        x = problem.inputs[at]
        _, (output,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            *(x.data, [matrix], x.scale, [weight.scale], 0, group),
            *([None], [None], [problem.out_dtype], [True]),
        )
        return Outputs(output)

    return call if weight.scale is None else call_fp8


def _scatter(problem: Problem, group: str) -> Call:
    weight, matrix = problem.weight, problem.weight.data.t()

    def call(at: int) -> Outputs:
        return Outputs(operators.matmul_reduce_scatter(problem.inputs[at].data, matrix, group))

    def call_fp8(at: int) -> Outputs:
        x = problem.inputs[at]
        output = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            *(x.data, matrix, x.scale, weight.scale, "sum", 0, 0, group, [problem.shape.m, problem.shape.n]),
            *(None, None, problem.out_dtype, True),
        )
        return Outputs(output)

    return call if weight.scale is None else call_fp8


def _async_input(problem: Problem, group: str) -> Call:
    matrix = problem.weight.data.t()
    # torch's own choice between this and the chunked operator is by an environment variable and by size.
    native: Any = _symmetric_memory._fused_all_gather_matmul_native
    return lambda at: Outputs(native(problem.inputs[at].data, matrix, group)[1])


def _bulk_gather(problem: Problem, group: str) -> Call:
    def call(at: int) -> Outputs:
        moving = operators.all_gather(as_bytes(problem.inputs[at].data), group)
        output = multiplied(problem, at, problem.whole[at].data)
        return Outputs(output, moved=operators.wait(moving).view(problem.whole[at].data.dtype))

    return call


def _bulk_scatter(problem: Problem, group: str) -> Call:
    def call(at: int) -> Outputs:
        moving = operators.reduce_scatter(problem.whole[at].data, group)
        product = multiplied(problem, at, problem.inputs[at].data)
        return Outputs(operators.wait(moving), product=product)

    return call


def _all_reduce(problem: Problem, group: str, reduce: Callable[[Tensor, str, str], Tensor]) -> Call:
    """The GEMM writes into memory that all ranks can read, and `reduce` sums it. Collective."""
    shape = problem.shape
    shared = _symmetric_memory.empty(shape.m, shape.n, dtype=problem.out_dtype, device=problem.weight.data.device)
    _symmetric_memory.rendezvous(shared, group)  # type: ignore[arg-type]

    def call(at: int) -> Outputs:
        multiplied(problem, at, problem.inputs[at].data, shared)
        return Outputs(reduce(shared, "sum", group))

    return call


def _scatter_gather(problem: Problem, group: str) -> Call:
    matrix = problem.weight.data.t()

    def call(at: int) -> Outputs:
        shard = operators.matmul_reduce_scatter(problem.inputs[at].data, matrix, group)
        return Outputs(operators.wait(operators.all_gather(shard, group)))

    return call


def close() -> None:
    operators.close()
