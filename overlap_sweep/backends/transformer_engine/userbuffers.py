"""Transformer Engine's communicators: those of its layers, which are initialised again in the same process when the
configuration changes, and those of kernels, each with its own buffer. They share state that the first one destroyed
frees, so both kinds never exist at once.

They print from C++; the worker redirects standard output to the point's log.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import cache, partial
from typing import Protocol, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformer_engine.pytorch  # noqa: F401  makes the next one importable
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.module import base
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from overlap_sweep.backends import LinearPoint, Operand, Outputs, Problem
from overlap_sweep.backends.communicator import as_bytes
from overlap_sweep.errors import Refused
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap.models import KernelPoint
from overlap_sweep.overlap.recipes import RECIPES
from overlap_sweep.overlap.space import PRIORITIES, Setting, SlotSetting

_BROKEN = re.compile(r"CUDA error|out of memory|NCCL", re.IGNORECASE)
"""Marks RuntimeErrors of the library that are failures; the others mean that something is not supported."""

_current: dict[str, object] | None = None
"""The arguments of the last initialize_ub; None while there are no userbuffers."""


def initialize_for(point: LinearPoint, ub_cfgs: Mapping[str, Setting]) -> None:
    """Initialises the userbuffers for a point of an operator or a layer, see `initialize`."""
    runtime, with_cublasmp = point.runtime, bool(point.with_cublasmp)
    # It takes its multicast addresses from NCCL, which creates none then.
    if with_cublasmp and not runtime.multicast and os.environ.get("NCCL_NVLS_ENABLE") != "0":
        raise Refused("cuBLASMp could use NVLink multicast, since NCCL_NVLS_ENABLE is not 0 in this process")
    assert point.model.hidden_size
    sizes = point.workload.tokens, point.model.hidden_size, point.tp_size
    initialize(*sizes, point.precision in RECIPES, runtime.bootstrap_backend, ub_cfgs, with_cublasmp)


def initialize(
    tokens: int,
    hidden_size: int,
    tp_size: int,
    fp8: bool,
    bootstrap_backend: str,
    ub_cfgs: Mapping[str, Setting],
    with_cublasmp: bool = False,
) -> None:
    """Initialises exactly this configuration; does nothing if it is initialised already. Collective.

    A slot that is not in `ub_cfgs` gets the library's default, and is used only by layers whose switches
    (`operator_switches`) are on. Raises Refused with the library's reason if it rejects the configuration.
    """
    global _current
    mode = base.UserBufferQuantizationMode
    wanted: dict[str, object] = {
        "shape": [tokens, hidden_size],
        "tp_size": tp_size,
        "quantization_modes": [mode.FP8 if fp8 else mode.NONE],
        "dtype": torch.bfloat16,
        "ub_cfgs": deepcopy(dict(ub_cfgs)) or None,
        "bootstrap_backend": bootstrap_backend,
        # Older versions don't have the argument.
        **({"with_cublasmp": True} if with_cublasmp else {}),
    }
    if wanted == _current:
        return
    if reason := _unsupported(ub_cfgs, with_cublasmp):
        raise Refused(f"Transformer Engine: {reason}")
    destroy()
    # No rank may free its buffers while another still reads them.
    torch.cuda.synchronize()
    dist.barrier()
    try:
        with _kept_bootstrap_groups(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            # The library modifies the slots' settings.
            base.initialize_ub(**{**wanted, "ub_cfgs": deepcopy(wanted["ub_cfgs"])})
    except (ValueError, AssertionError, RuntimeError) as error:
        if isinstance(error, (torch.OutOfMemoryError, dist.DistError)) or _BROKEN.search(str(error)):
            raise
        base.destroy_ub()
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        raise Refused(f"Transformer Engine: {reason}") from error
    _current = wanted


def _unsupported(ub_cfgs: Mapping[str, Setting], with_cublasmp: bool) -> str | None:
    if with_cublasmp and not getattr(tex, "nvte_built_with_cublasmp", lambda: False)():
        return "it was built without cuBLASMp (NVTE_WITH_CUBLASMP=1)"
    for slot, setting in ub_cfgs.items():
        for knob, value in setting.items():
            lowest, highest = tex.get_stream_priority_range()
            if knob in PRIORITIES and not highest <= value <= lowest:
                return f"{slot}: {knob}={value} is not among this GPU's priorities, {highest} to {lowest}"
    return None


def destroy() -> None:
    """Frees the buffers. Collective, because other ranks may still read them."""
    global _current
    if _current is not None:
        torch.cuda.synchronize()
        dist.barrier()
        # destroy_ub also resets torch.compile. Nothing compiled here depends on userbuffers, and compiling a layer's
        # fused functions again would take a tenth of a second per turn.
        with patch.object(torch.compiler, "reset"):
            base.destroy_ub()
        _current = None


_groups: dict[object, object] = {}


@contextmanager
def _kept_bootstrap_groups() -> Iterator[None]:
    """Makes initialize_ub reuse its process groups.

    It creates new ones at each call and never destroys them: sockets and threads, or with NCCL half a gigabyte of GPU
    memory, for every point of a sweep.
    """

    def kept(make: Callable[..., object], *arguments: object, **keywords: object) -> object:
        key = make, str(arguments), str(keywords)
        if key not in _groups:
            _groups[key] = make(*arguments, **keywords)
        return _groups[key]

    with ExitStack() as stack:
        for name in ("new_group", "new_subgroups_by_enumeration"):
            stack.enter_context(patch.object(dist, name, partial(kept, getattr(dist, name))))
        yield


KERNEL_STREAMS = 3
"""Number of streams for the GEMMs of one ring exchange, as in initialize_ub."""


class Userbuffer(Protocol):
    """A communicator of a kernel, as far as it is used here."""

    def copy_into_buffer(self, data: Tensor, local_chunk: bool) -> None: ...

    def get_buffer(self, local_chunk: bool = False, shape: list[int] | None = None) -> Tensor: ...


Held = list[Userbuffer]
"""A list with a kernel's communicator; empty once it is closed."""
Rows: TypeAlias = "Tensor | Float8TensorStorage"
"""A matrix as the library's GEMM takes it."""
_open: list[Held] = []


def build_kernel(point: KernelPoint, setting: Setting, problem: Problem, ranks: Ranks) -> Callable[[int], Outputs]:
    if reason := _unsupported({point.kernel: setting}, with_cublasmp=False):
        raise Refused(f"Transformer Engine: {reason}")
    destroy()
    gathers = problem.shape.gathers
    try:
        held = [_communicator(setting, problem, point.runtime.bootstrap_backend, ranks)]
    except (ValueError, AssertionError) as error:
        raise Refused(f"Transformer Engine: {error}") from error
    _open.append(held)
    bulk = setting["method"] == "bulk"
    call = (_bulk_gather if bulk else _gather) if gathers else (_bulk_scatter if bulk else _scatter)
    return partial(call, held, _for_gemm(problem.weight), problem)


def _communicator(setting: Setting, problem: Problem, bootstrap_backend: str, ranks: Ranks) -> Userbuffer:
    shape, gathers, knobs = problem.shape, problem.shape.gathers, SlotSetting.of(setting)
    dtype = as_bytes((problem.inputs if gathers else problem.whole)[0].data).dtype
    lowest, highest = tex.get_stream_priority_range()
    size = [shape.m, shape.k if gathers else shape.n]
    buffer = size, dtype, _bootstrap(bootstrap_backend), ranks.world_size
    common = {
        "num_max_streams": KERNEL_STREAMS,
        "comm_cga_size": knobs.cga_size,
        "num_comm_sm": knobs.num_sm,
        "set_sm_margin": knobs.set_sm_margin,
        "atomic_gemm": False,
        "gemm_priority": lowest if knobs.gemm_priority is None else knobs.gemm_priority,
        "comm_priority": highest if knobs.comm_priority is None else knobs.comm_priority,
    }
    kind = tex.CommOverlapType.AG if gathers else tex.CommOverlapType.RS
    if knobs.method == "ring_exchange":
        return tex.CommOverlapP2P(*buffer, kind, use_ce=knobs.use_ce, aggregate=knobs.aggregate, **common)
    common["rs_overlap_first_gemm"] = bool(knobs.pipeline_rs_overlap_first_gemm)
    return tex.CommOverlap(*buffer, comm_type=kind, num_splits=knobs.num_splits or 4, **common)


@cache
def _bootstrap(backend: str) -> object:
    # Created once, because a process group is never fully freed.
    group = dist.new_group(backend=backend)
    return tex.CommOverlapHelper(group, group)


def _for_gemm(operand: Operand, data: Tensor | None = None) -> Rows:
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


def _gemm(comm: Userbuffer, weight: Rows, rows: Rows, problem: Problem, **more: object) -> Tensor:
    kind = tex.CommOverlapType.AG if problem.shape.gathers else tex.CommOverlapType.RS
    output: Tensor = general_gemm(weight, rows, out_dtype=problem.out_dtype, ub=comm, ub_type=kind, **more)[0]
    return output


def _gather(held: Held, weight: Rows, problem: Problem, at: int) -> Outputs:
    (comm,) = held
    x = problem.inputs[at]
    comm.copy_into_buffer(as_bytes(x.data), local_chunk=True)
    rows = _for_gemm(x, comm.get_buffer(shape=[problem.shape.m, problem.shape.k]))
    return Outputs(_gemm(comm, weight, rows, problem))


def _scatter(held: Held, weight: Rows, problem: Problem, at: int) -> Outputs:
    (comm,) = held
    x = problem.inputs[at]
    output = torch.empty(problem.shape.output_shape, dtype=problem.out_dtype, device=x.data.device)
    _gemm(comm, weight, _for_gemm(x), problem, extra_output=output)
    return Outputs(output)


def _bulk_gather(held: Held, weight: Rows, problem: Problem, at: int) -> Outputs:
    (comm,) = held
    whole = problem.whole[at]
    comm.copy_into_buffer(as_bytes(problem.inputs[at].data), local_chunk=True)
    output = _gemm(comm, weight, _for_gemm(whole), problem, bulk_overlap=True)
    moved = comm.get_buffer(shape=[problem.shape.m, problem.shape.k])
    return Outputs(output, moved=moved.view(whole.data.dtype))


def _bulk_scatter(held: Held, weight: Rows, problem: Problem, at: int) -> Outputs:
    """Runs the GEMM next to a reduce-scatter of the product, which is first copied in; in a layer the GEMM before wrote
    it."""
    (comm,) = held
    comm.copy_into_buffer(problem.whole[at].data, local_chunk=False)
    product = _gemm(comm, weight, _for_gemm(problem.inputs[at]), problem, bulk_overlap=True)
    return Outputs(comm.get_buffer(local_chunk=True), product=product)


def close_kernels() -> None:
    """Frees all communicators of kernels. Collective, because other ranks may still read the buffers."""
    torch.cuda.synchronize()
    dist.barrier()
    for held in _open:
        held.clear()
    _open.clear()
