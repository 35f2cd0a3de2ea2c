"""Transformer Engine's communicator objects, each with a buffer of its own, and its GEMM beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch  # noqa: F401  it makes the next one importable
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from overlap_sweep.backends import Operand, Outputs, Problem
from overlap_sweep.backends.torch.overlap import as_bytes
from overlap_sweep.backends.transformer_engine import userbuffers
from overlap_sweep.errors import Refused
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.overlap.space import Setting

MAX_STREAMS = 3
"""That GEMMs of one ring exchange run on, as in initialize_ub."""

Held = list[Any]
"""The communicator, until it is closed."""
_open: list[Held] = []


def build(point: Mapping[str, Any], setting: Setting, problem: Problem, ranks: Ranks) -> Callable[[int], Outputs]:
    gathers = problem.shape.gathers
    moved = problem.inputs[0].data if gathers else problem.whole[0].data
    columns = problem.shape.k if gathers else problem.shape.n
    # All communicators of a process share what the first to be destroyed takes down.
    userbuffers.destroy()
    try:
        held = [_communicator(setting, [problem.shape.m, columns], moved.dtype, gathers, point, ranks)]
    except (ValueError, AssertionError) as error:
        raise Refused(f"Transformer Engine: {error}") from error
    _open.append(held)
    weight = _for_gemm(problem.weight)
    if setting["method"] == "bulk":
        return _bulk_gather(held, weight, problem) if gathers else _bulk_scatter(held, weight, problem)
    return _gather(held, weight, problem) if gathers else _scatter(held, weight, problem)


def _communicator(
    setting: Setting, size: list[int], dtype: torch.dtype, gathers: bool, point: Mapping[str, Any], ranks: Ranks
) -> Any:
    """As initialize_ub makes those of one slot."""
    fp8 = dtype == torch.float8_e4m3fn
    lowest, highest = tex.get_stream_priority_range()
    what = size, torch.uint8 if fp8 else dtype, _bootstrap(point["runtime"]["bootstrap_backend"]), ranks.world_size
    common = {
        "num_max_streams": MAX_STREAMS,
        "comm_cga_size": setting["cga_size"],
        "num_comm_sm": setting["num_sm"],
        "set_sm_margin": setting["set_sm_margin"],
        "atomic_gemm": False,
        "gemm_priority": lowest,
        "comm_priority": highest,
    }
    kind = tex.CommOverlapType.AG if gathers else tex.CommOverlapType.RS
    if setting["method"] == "ring_exchange":
        return tex.CommOverlapP2P(*what, kind, use_ce=setting["use_ce"], aggregate=setting["aggregate"], **common)
    return tex.CommOverlap(*what, comm_type=kind, num_splits=setting.get("num_splits", 4), **common)


@cache
def _bootstrap(backend: str) -> Any:
    """Exchanges the buffers' handles. Made once: a process group is never wholly freed."""
    group = dist.new_group(backend=backend)
    return tex.CommOverlapHelper(group, group)


def _for_gemm(operand: Operand, data: Tensor | None = None) -> Any:
    """The operand, or other data of its kind, as Transformer Engine multiplies it."""
    data = operand.data if data is None else data
    if operand.scale is None:
        return data
    return Float8TensorStorage(
        data=data.view(torch.uint8),
        fp8_scale_inv=operand.scale.view(1),
        fp8_dtype=tex.DType.kFloat8E4M3,
        fake_dtype=torch.bfloat16,
        quantizer=None,
    )


def _gather(held: Held, weight: Any, problem: Problem) -> Callable[[int], Outputs]:
    size = [problem.shape.m, problem.shape.k]

    def call(at: int) -> Outputs:
        (comm,) = held
        x = problem.inputs[at]
        comm.copy_into_buffer(as_bytes(x.data), local_chunk=True)
        rows = _for_gemm(x, comm.get_buffer(shape=size))
        output, *_ = general_gemm(weight, rows, out_dtype=problem.out_dtype, ub=comm, ub_type=tex.CommOverlapType.AG)
        return Outputs(output)

    return call


def _scatter(held: Held, weight: Any, problem: Problem) -> Callable[[int], Outputs]:
    def call(at: int) -> Outputs:
        (comm,) = held
        x = problem.inputs[at]
        output = torch.empty(problem.shape.output_shape, dtype=problem.out_dtype, device=x.data.device)
        general_gemm(
            weight,
            _for_gemm(x),
            out_dtype=problem.out_dtype,
            ub=comm,
            ub_type=tex.CommOverlapType.RS,
            extra_output=output,
        )
        return Outputs(output)

    return call


def _bulk_gather(held: Held, weight: Any, problem: Problem) -> Callable[[int], Outputs]:
    size = [problem.shape.m, problem.shape.k]

    def call(at: int) -> Outputs:
        (comm,) = held
        whole = problem.whole[at]
        comm.copy_into_buffer(as_bytes(problem.inputs[at].data), local_chunk=True)
        output, *_ = general_gemm(
            weight,
            _for_gemm(whole),
            out_dtype=problem.out_dtype,
            ub=comm,
            ub_type=tex.CommOverlapType.AG,
            bulk_overlap=True,
        )
        return Outputs(output, moved=comm.get_buffer(shape=size).view(whole.data.dtype))

    return call


def _bulk_scatter(held: Held, weight: Any, problem: Problem) -> Callable[[int], Outputs]:
    """The product is copied into the buffer first. In a layer the GEMM before has written it there."""

    def call(at: int) -> Outputs:
        (comm,) = held
        comm.copy_into_buffer(problem.whole[at].data, local_chunk=False)
        product, *_ = general_gemm(
            weight,
            _for_gemm(problem.inputs[at]),
            out_dtype=problem.out_dtype,
            ub=comm,
            ub_type=tex.CommOverlapType.RS,
            bulk_overlap=True,
        )
        return Outputs(comm.get_buffer(local_chunk=True), product=product)

    return call


def close() -> None:
    """Free all communicators, before others are made. Collective: no rank may while another still reads its buffers."""
    torch.cuda.synchronize()
    dist.barrier()
    for held in _open:
        held.clear()
    _open.clear()
