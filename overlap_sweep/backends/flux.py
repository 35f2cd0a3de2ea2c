"""ByteDance's Flux (github.com/bytedance/flux): GEMMs that communicate tile by tile from inside the GEMM's kernel.

Written for byte-flux 1.1.1, the latest release on PyPI, imported as `flux`. It has ag_gemm (`AGKernel`) and gemm_rs
(`GemmRS`), but no GEMM with an all-reduce. It runs on GPUs of compute capability 8.0, 8.9 and 9.0, in float16 and
bfloat16, and in FP8 on 8.9 only. There are wheels for Python 3.10 and 3.11, torch 2.4 to 2.6 and CUDA 12.4; for
others it is built from source.

Its all-gather uses copy engines or a small kernel, its reduce-scatter runs in the GEMM's epilogue.

Nothing here uses NVLink multicast: Flux's intra-node kernels have no such variant, and the worker's
NVSHMEM_DISABLE_NVLS disables it in NVSHMEM, which some builds use to share memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from overlap_sweep.backends import Outputs, Problem, lacks_precision, needs_gpus
from overlap_sweep.errors import Refused
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import KernelPoint, KernelShape
from overlap_sweep.overlap.space import Setting

if TYPE_CHECKING:
    from torch import Tensor

    from overlap_sweep.measure import Ranks

RELEASE = "1.1.1"
NEEDED = {"ag_gemm": ("AGKernel", "AllGatherOption", "AGRingMode"), "gemm_rs": ("GemmRS",)}
INSTALL = (
    f"pip install --no-build-isolation byte-flux=={RELEASE} (wheels for Python 3.10 and 3.11, torch 2.4 to 2.6, "
    "CUDA 12.4), or build it: github.com/bytedance/flux, ./build.sh --arch 90 --nvshmem"
)
PRECISIONS = ("fp16", "bf16", "fp8")
CAPABILITIES = ((8, 0), (8, 9), (9, 0))
TRANSPOSED = "_transposed"
"""Suffix of names: the weight is stored as [inputs, outputs], which Flux's own tests use as the faster layout."""
ALIGNMENT_BYTES = 16
"""Alignment of the rows that its GEMMs load."""
LARGEST_TILE = 256
"""Rows of an output tile. On Hopper `GemmRS` pads every rank's part of m to whole tiles, within `max_m`."""
NVSHMEM = {
    "NVSHMEM_BOOTSTRAP": "UID",
    "NVSHMEM_DISABLE_CUDA_VMM": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    # Without VMM the heap cannot grow. The default of 1 GB is less than one large input.
    "NVSHMEM_SYMMETRIC_SIZE": str(8 * 2**30),
}
"""Environment that Flux's launch.sh sets on a single node, unless the user has set it."""

_operators: dict[tuple[object, ...], Any] = {}
"""AGKernel and GemmRS objects of the present point, with the buffers that they share with other ranks. These are the
only references, so that `close` frees them, in the same order on every rank."""
_users: set[Ranks] = set()
"""Ranks that share them: one group, or none."""


@cache
def missing() -> str | None:
    """Returns why Flux is not available, or None, without importing it."""
    spec = find_spec("flux")
    if spec is None:
        return f"Flux is not installed; {INSTALL}"
    if find_spec("flux_ths_pybind") is None:
        return f"{spec.origin or 'a folder flux'} is not ByteDance's Flux, or has no compiled part; {INSTALL}"
    return None


def refusal(point: KernelPoint) -> str | None:
    shape = KernelShape.of(point)
    if reason := missing() or needs_gpus(point):
        return reason
    if shape.kernel == "gemm_ar":
        return "Flux has no GEMM with an all-reduce; it has ag_gemm and gemm_rs"
    if reason := lacks_precision(point, PRECISIONS):
        return reason
    _, columns, summed = shape.gemm_shape
    size = 1 if point.precision == "fp8" else 2
    for name, length, size_bytes in (("inputs", summed, size), ("outputs", columns, 2)):
        if length * size_bytes % ALIGNMENT_BYTES:
            return (
                f"Flux requires rows of a multiple of {ALIGNMENT_BYTES} bytes, but a rank's weight has {length} {name}"
            )
    return None


def implementations(point: KernelPoint) -> dict[str, Setting]:
    if point.kernel == "ag_gemm":
        # Its all-to-all by SMs, and with it programmatic dependent launch, is for int8 only. Its two-dimensional ring
        # is for PCIe across NUMA nodes.
        settings: list[Setting] = [
            {"method": "all_to_all", "use_ce": True},
            {"method": "ring_exchange", "use_ce": True},
            {"method": "ring_exchange", "use_ce": False},
        ]
    elif point.kernel == "gemm_rs":
        # ReduceScatterOption keeps its defaults: it only matters without NVLink.
        settings = [{"method": "scatter"}]
        if point.precision == "fp16":
            settings.append({"method": "scatter", "fuse_reduction": True})
    else:
        settings = []
    return {_name(setting): setting for setting in settings}


def _name(setting: Setting) -> str:
    return space.setting_name(setting) + ("_fused" if setting.get("fuse_reduction") else "")


def named(point: KernelPoint, name: str) -> Setting | None:
    """Returns one of `implementations`; with `_transposed` after its name, for a transposed weight."""
    setting = implementations(point).get(name.removesuffix(TRANSPOSED))
    if setting is None or not name.endswith(TRANSPOSED):
        return setting
    return {**setting, "transpose_weight": True} if point.precision != "fp8" else None


def build(point: KernelPoint, setting: Setting, problem: Problem, ranks: Ranks) -> Callable[[int], Outputs]:
    import torch

    found = torch.cuda.get_device_capability(ranks.device)
    if found not in CAPABILITIES:
        known = ", ".join("{}.{}".format(*one) for one in CAPABILITIES)
        raise Refused(f"Flux runs on GPUs of compute capability {known}, but this GPU has {found[0]}.{found[1]}")
    if problem.precision == "fp8" and found != (8, 9):
        raise Refused(f"Flux has FP8 for compute capability 8.9 only, but this GPU has {found[0]}.{found[1]}")
    flux = _load(*NEEDED[problem.shape.kernel], "init_flux_shm")
    _initialise_shared_memory(flux)
    _users.add(ranks)
    transposed = setting.get("transpose_weight", False)
    weight = problem.weight.data.t().contiguous() if transposed else problem.weight.data
    multiply = (_ag_gemm if problem.shape.gathers else _gemm_rs)(flux, setting, problem, weight)
    # The first call allocates the rest of the shared buffers, and fails if Flux was not compiled for the problem.
    with _refusing_failed_checks():
        multiply(0)
    return multiply


@contextmanager
def _refusing_failed_checks(hint: str = "") -> Iterator[None]:
    """Turns Flux's errors on unsupported arguments into Refused, on all ranks alike."""
    try:
        yield
    except RuntimeError as error:
        if "Check failed" not in str(error):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise Refused(f"Flux: {reason}{hint}") from error


def _ag_gemm(flux: ModuleType, setting: Setting, problem: Problem, weight: Tensor) -> Callable[[int], Outputs]:
    import torch
    import torch.distributed as dist

    shape, dtype = problem.shape, weight.dtype
    m, n, k = shape.gemm_shape
    # All settings share one object: they differ only in the arguments of a call.
    key = _keep(
        ("AGKernel", m, n, k, dtype),
        lambda: flux.AGKernel(dist.group.WORLD, 1, m, n, k, dtype, output_dtype=problem.out_dtype),
    )
    option = flux.AllGatherOption()
    output = torch.empty(shape.output_shape, dtype=problem.out_dtype, device=weight.device)
    option.mode = flux.AGRingMode.All2All if setting["method"] == "all_to_all" else flux.AGRingMode.Ring1D
    option.use_cuda_core_local = False
    option.use_cuda_core_ag = not setting["use_ce"]

    def multiply(at: int) -> Outputs:
        _operators[key].forward(
            problem.inputs[at].data,
            weight,
            output=output,
            input_scale=problem.inputs[at].scale,
            weight_scale=problem.weight.scale,
            transpose_weight=setting.get("transpose_weight", False),
            all_gather_option=option,
        )
        return Outputs(output)

    return multiply


def _gemm_rs(flux: ModuleType, setting: Setting, problem: Problem, weight: Tensor) -> Callable[[int], Outputs]:
    import torch.distributed as dist

    shape, dtype = problem.shape, weight.dtype
    fused, transposed = setting.get("fuse_reduction", False), setting.get("transpose_weight", False)
    tiles = -(-shape.m // (shape.tp_size * LARGEST_TILE))
    key = _keep(
        ("GemmRS", shape.m, shape.n, dtype, fused, transposed),
        lambda: flux.GemmRS(
            dist.group.WORLD,
            1,
            tiles * LARGEST_TILE * shape.tp_size,
            shape.n,
            dtype,
            output_dtype=problem.out_dtype,
            transpose_weight=transposed,
            fuse_reduction=fused,
        ),
    )

    def multiply(at: int) -> Outputs:
        output = _operators[key].forward(
            problem.inputs[at].data,
            weight,
            input_scale=problem.inputs[at].scale,
            weight_scale=problem.weight.scale,
        )
        # [1, m / tp, n] of a fused reduction before Hopper.
        return Outputs(output.view(shape.output_shape))

    return multiply


def _keep(key: tuple[object, ...], construct: Callable[[], Any]) -> tuple[object, ...]:
    """Adds the constructed object to `_operators` unless it is there; returns its key. Collective."""
    if key not in _operators:
        with _refusing_failed_checks("; NVSHMEM_SYMMETRIC_SIZE may be too small"):
            _operators[key] = construct()
    return key


def _load(*needed: str) -> ModuleType:
    # The import loads NVSHMEM's libraries, which read the environment.
    for name, value in NVSHMEM.items():
        os.environ.setdefault(name, value)
    try:
        flux = import_module("flux")
    except (ImportError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise Refused(f"Flux cannot be imported ({reason}); was it built for this torch and CUDA? {INSTALL}") from error
    # Parts that a build of Flux left out are instances of its class NotCompiled.
    lacking = [name for name in needed if type(getattr(flux, name, None)).__name__ in ("NoneType", "NotCompiled")]
    if lacking:
        version = getattr(flux, "__version__", "of an unknown version")
        raise Refused(f"Flux {version} has no {', '.join(lacking)}; install {RELEASE}: {INSTALL}")
    return flux


@cache
def _initialise_shared_memory(flux: ModuleType) -> None:
    """Does so once per process. Collective."""
    import torch.distributed as dist

    flux.init_flux_shm(dist.group.WORLD)


def close() -> None:
    for ranks in _users:
        # Another rank's copy engines may still read the buffers.
        ranks.barrier()
    _users.clear()
    _operators.clear()
