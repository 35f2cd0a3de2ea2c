"""ByteDance's Flux (github.com/bytedance/flux): GEMMs that communicate tile by tile, from inside the GEMM's kernel.

Written for byte-flux 1.1.1, the latest release on PyPI, whose `import flux` this is. It has ag_gemm (`AGKernel`) and
gemm_rs (`GemmRS`), and no GEMM with an all-reduce. It runs on GPUs of compute capability 8.0, 8.9 and 9.0, in float16
and bfloat16, and in FP8 on 8.9 alone. There are wheels for Python 3.10 and 3.11, torch 2.4 to 2.6 and CUDA 12.4; for
others it is built from source.

Its all-gather is by copy engines or by a small kernel, its reduce-scatter in the GEMM's epilogue.

Nothing here uses NVLink multicast: Flux's intra-node kernels have no such variant, and NVSHMEM, which some builds of it
share memory by, is told not to by the worker's NVSHMEM_DISABLE_NVLS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.backends import Outputs, Problem, lacks_precision, needs_gpus
from overlap_sweep.errors import Refused
from overlap_sweep.overlap import space
from overlap_sweep.overlap.kernel_shape import KernelShape
from overlap_sweep.overlap.space import Setting

if TYPE_CHECKING:
    from overlap_sweep.measure import Ranks

RELEASE = "1.1.1"
INSTALL = (
    f"pip install --no-build-isolation byte-flux=={RELEASE} (wheels for Python 3.10 and 3.11, torch 2.4 to 2.6, "
    "CUDA 12.4), or build it: github.com/bytedance/flux, ./build.sh --arch 90 --nvshmem"
)
PRECISIONS = ("fp16", "bf16", "fp8")
ALIGNMENT_BYTES = 16
"""Of the rows that its GEMMs load."""
LARGEST_TILE = 256
"""Rows of an output tile. On Hopper `GemmRS` pads every rank's part of m to whole tiles, within `max_m`."""
NVSHMEM = {
    "NVSHMEM_BOOTSTRAP": "UID",
    "NVSHMEM_DISABLE_CUDA_VMM": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    # Without VMM the heap cannot grow. The default of 1 GB is less than one large input.
    "NVSHMEM_SYMMETRIC_SIZE": str(8 * 2**30),
}
"""Environment that Flux's launch.sh gives a single node, unless the user has given another."""

_operators: list[Any] = []
"""Of the point that is being measured: the AGKernel and GemmRS objects, with the buffers that they share with other
ranks. Only this holds them, so that `close` frees them, in the same order on every rank."""
_users: set[Ranks] = set()
"""The ranks that share them: one group, or none."""


@cache
def missing() -> str | None:
    """Returns why there is no Flux here, without importing it."""
    spec = find_spec("flux")
    # Asking for the spec of flux.cpp_mod would import flux, whichever it is.
    folders = (spec.submodule_search_locations if spec else None) or ()
    whole = any((Path(folder) / "cpp_mod.py").is_file() for folder in folders) and find_spec("flux_ths_pybind")
    return None if whole else f"Flux is not installed; {INSTALL}"


def refusal(point: Mapping[str, Any]) -> str | None:
    shape = KernelShape.of(point)
    if reason := missing() or needs_gpus(point):
        return reason
    if shape.kernel == "gemm_ar":
        return "Flux has no GEMM with an all-reduce; it has ag_gemm and gemm_rs"
    if reason := lacks_precision(point, PRECISIONS):
        return reason
    _, columns, summed = shape.gemm_shape
    size = 1 if point["precision"] == "fp8" else 2
    for what, length, size_bytes in (("inputs", summed, size), ("outputs", columns, 2)):
        if length * size_bytes % ALIGNMENT_BYTES:
            return f"Flux needs rows of a multiple of {ALIGNMENT_BYTES} bytes, and a rank's weight has {length} {what}"
    return None


def implementations(point: Mapping[str, Any]) -> dict[str, Setting]:
    if point["kernel"] == "ag_gemm":
        # Its all-to-all by SMs is for int8 only, and so is programmatic dependent launch, which needs that. Its
        # two-dimensional ring is for PCIe across NUMA nodes.
        settings: list[Setting] = [
            {"method": "all_to_all", "use_ce": True},
            {"method": "ring_exchange", "use_ce": True},
            {"method": "ring_exchange", "use_ce": False},
        ]
    else:
        # ReduceScatterOption is left as it is: it matters without NVLink only.
        settings = [{"method": "scatter"}] if point["kernel"] == "gemm_rs" else []
    return {space.setting_name(setting): setting for setting in settings}


def named(point: Mapping[str, Any], name: str) -> Setting | None:
    return implementations(point).get(name)


def build(point: Mapping[str, Any], setting: Setting, problem: Problem, ranks: Ranks) -> Callable[[int], Outputs]:
    # NVSHMEM's libraries, which the import loads, read them.
    for name, value in NVSHMEM.items():
        os.environ.setdefault(name, value)
    try:
        flux = import_module("flux")
    except (ImportError, OSError) as error:
        raise Refused(
            f"Flux cannot be imported ({_first_line(error)}); was it built for this torch and CUDA? {INSTALL}"
        ) from error
    _initialise_shared_memory(flux)
    _users.add(ranks)
    try:
        multiply = (_ag_gemm if problem.shape.gathers else _gemm_rs)(flux, setting, problem)
        # The first call allocates the rest of what the ranks share, and says what Flux was not compiled for.
        multiply(0)
    except RuntimeError as error:
        # What Flux throws for what it does not take, on all ranks alike.
        if "Check failed" not in str(error):
            raise
        raise Refused(f"Flux: {_first_line(error)}") from error
    return multiply


def _ag_gemm(flux: Any, setting: Setting, problem: Problem) -> Callable[[int], Outputs]:
    import torch
    import torch.distributed as dist

    weight, key = problem.weight, len(_operators)
    sizes = *problem.shape.gemm_shape, weight.data.dtype
    _operators.append(flux.AGKernel(dist.group.WORLD, 1, *sizes, output_dtype=problem.out_dtype))
    option = flux.AllGatherOption()
    option.mode = flux.AGRingMode.All2All if setting["method"] == "all_to_all" else flux.AGRingMode.Ring1D
    option.use_cuda_core_local = False
    option.use_cuda_core_ag = not setting["use_ce"]
    output = torch.empty(problem.shape.output_shape, dtype=problem.out_dtype, device=weight.data.device)

    def multiply(at: int) -> Outputs:
        x = problem.inputs[at]
        more = {"input_scale": x.scale, "weight_scale": weight.scale, "all_gather_option": option}
        _operators[key].forward(x.data, weight.data, output=output, **more)
        return Outputs(output)

    return multiply


def _gemm_rs(flux: Any, setting: Setting, problem: Problem) -> Callable[[int], Outputs]:
    import torch.distributed as dist

    shape, weight, key = problem.shape, problem.weight, len(_operators)
    rows_of_tiles = LARGEST_TILE * shape.tp_size
    sizes = -(-shape.m // rows_of_tiles) * rows_of_tiles, shape.n, weight.data.dtype
    _operators.append(flux.GemmRS(dist.group.WORLD, 1, *sizes, output_dtype=problem.out_dtype))

    def multiply(at: int) -> Outputs:
        x = problem.inputs[at]
        return Outputs(_operators[key].forward(x.data, weight.data, input_scale=x.scale, weight_scale=weight.scale))

    return multiply


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@cache
def _initialise_shared_memory(flux: Any) -> None:
    """Once in a process. Collective."""
    import torch.distributed as dist

    flux.init_flux_shm(dist.group.WORLD)


def close() -> None:
    for ranks in _users:
        # Another rank's copy engines may still be reading what is freed here.
        ranks.barrier()
    _users.clear()
    _operators.clear()
