"""Kernels by Transformer Engine's userbuffers, straight through its communicators: no layer around them.

The input lies elsewhere and is copied into the communicator's buffer in each call, as in Transformer Engine's layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from overlap_sweep.backends import Outputs, Problem, lacks_precision, needs_gpus
from overlap_sweep.backends.installed import unusable
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import KernelPoint
from overlap_sweep.overlap.space import Setting

if TYPE_CHECKING:
    from overlap_sweep.measure import Ranks

PRECISIONS = ("fp16", "bf16", "fp8")
SHARES = (4, 8, 16)
"""num_sm of the implementations that are measured by default."""

_KNOBS_OF_ALL = {"num_sm", "cga_size", "set_sm_margin", *space.PRIORITIES}
_KNOBS = {
    "ring_exchange": {*_KNOBS_OF_ALL, "aggregate", "use_ce"},
    "pipeline": {*_KNOBS_OF_ALL, "num_splits", "pipeline_rs_overlap_first_gemm"},
    "bulk": _KNOBS_OF_ALL,
}


def refusal(point: KernelPoint) -> str | None:
    if reason := unusable() or needs_gpus(point):
        return reason
    if point.kernel == "gemm_ar":
        return "Transformer Engine's userbuffers have no all-reduce"
    if reason := lacks_precision(point, PRECISIONS):
        return reason
    if point.precision == "fp16" and point.kernel == "gemm_rs":
        return "Transformer Engine's userbuffers sum in bf16, not in fp16"
    return None


def implementations(point: KernelPoint) -> dict[str, Setting]:
    settings: list[Setting] = [{"method": "ring_exchange"}]
    if point.kernel == "ag_gemm":
        settings.append({"method": "ring_exchange", "aggregate": True})
    # Without multicast more SMs computed wrong results wherever it was tried, and right ones only by chance.
    settings.append({"method": "ring_exchange", "use_ce": False, "num_sm": 1})
    if point.kernel == "gemm_rs":
        settings += [{"method": "pipeline", "num_splits": 4, "num_sm": share} for share in SHARES]
        settings.append({"method": "pipeline", "num_splits": 2, "num_sm": SHARES[-1]})
    settings += [{"method": "bulk", "num_sm": share} for share in SHARES]
    completed = {space.setting_name(setting): _completed(point, setting) for setting in settings}
    return {name: setting for name, setting in completed.items() if setting}


def named(point: KernelPoint, name: str) -> Setting | None:
    setting = space.setting_of(name)
    return _completed(point, setting) if setting else None


def _completed(point: KernelPoint, setting: Setting) -> Setting | None:
    """Returns the setting with Transformer Engine's defaults filled in; None if it does not support the setting."""
    method, ranks = space.method_of(setting), point.tp_size
    if method != "ring_exchange" and ranks not in space.USERBUFFERS_RANKS:
        return None
    if set(setting) - {"method", *_KNOBS[method]}:
        return None
    gathers = point.kernel == "ag_gemm"
    # Two ranks are one pair, which leaves nothing to overlap.
    if setting.get("aggregate") and not (gathers and ranks > 2 and ranks % 2 == 0):
        return None
    if method == "pipeline" and (gathers or (point.n % int(setting.get("num_splits", 4)))):
        return None
    if space.num_sm_of(setting) > space.USERBUFFERS_MOST_SMS:
        return None
    return space.without_idle_knobs({"num_sm": SHARES[-1], **space.USERBUFFERS_DEFAULTS[method], **setting})


def build(point: KernelPoint, setting: Setting, problem: Problem, ranks: Ranks) -> Callable[[int], Outputs]:
    from overlap_sweep.backends.transformer_engine import userbuffers

    return userbuffers.build_kernel(point, setting, problem, ranks)


def close() -> None:
    # Importing it would load Transformer Engine, which a refused point does not need.
    userbuffers = sys.modules.get("overlap_sweep.backends.transformer_engine.userbuffers")
    if userbuffers:
        userbuffers.close_kernels()
