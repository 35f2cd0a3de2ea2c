"""Kernels by PyTorch's symmetric memory: the operators of its async-TP pass, and its collectives next to an independent
GEMM. None of them uses multicast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlap_sweep.backends import Outputs, Problem, needs_gpus
from overlap_sweep.backends.symm_mem import close as close
from overlap_sweep.overlap.models import KernelPoint
from overlap_sweep.overlap.space import Setting

if TYPE_CHECKING:
    from overlap_sweep.measure import Ranks

_SETTINGS: dict[str, dict[str, Setting]] = {
    "ag_gemm": {
        "ring": {"method": "ring_exchange"},
        "async_input": {"method": "async_input_mm"},
        "bulk": {"method": "bulk"},
    },
    "gemm_rs": {"ring": {"method": "ring_exchange"}, "bulk": {"method": "bulk"}},
    "gemm_ar": {name: {"method": name} for name in ("one_shot", "two_shot", "scatter_gather")},
}
"""Settings by kernel and name.

ring: fused_all_gather_matmul and fused_matmul_reduce_scatter, where each rank's chunk is copied peer to peer while
another is multiplied. async_input: one GEMM that waits for its input's chunks inside the kernel (what
fused_all_gather_matmul becomes for some sizes under TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP). bulk: the low-contention
collectives, by copy engines. one_shot, two_shot: the GEMM writes into shared memory, then one kernel reduces it: no
overlap, but no NCCL to start. scatter_gather: fused_matmul_reduce_scatter, then a low-contention all-gather."""


def refusal(point: KernelPoint) -> str | None:
    if reason := needs_gpus(point):
        return reason
    if point.kernel == "gemm_ar" and point.precision == "fp8":
        return "symmetric memory has no FP8 GEMM with an all-reduce; backend=torch has one"
    return None


def implementations(point: KernelPoint) -> dict[str, Setting]:
    return {name: dict(setting) for name, setting in _SETTINGS[point.kernel].items() if _takes(point, name)}


def _takes(point: KernelPoint, name: str) -> bool:
    if name == "async_input":
        # Its kernel is for bf16, and splits each rank's rows by the number of ranks.
        return point.precision == "bf16" and point.m % point.tp_size**2 == 0
    if name in ("one_shot", "two_shot"):
        # They sum only in these precisions.
        return point.precision in ("fp32", "bf16")
    if name == "scatter_gather":
        return bool(point.m % point.tp_size == 0)
    return True


def named(point: KernelPoint, name: str) -> Setting | None:
    return None


def build(point: KernelPoint, setting: Setting, problem: Problem, ranks: Ranks) -> Callable[[int], Outputs]:
    from overlap_sweep.backends.symm_mem import operators

    return operators.build_kernel(setting, problem)
