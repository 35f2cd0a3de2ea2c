"""Plain torch.distributed: overlap by asynchronous collectives and sends, on gloo or NCCL. Layers use torch's own norms
and attention around the parallel linear operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from overlap_sweep.backends import (
    KnobsPoint,
    LayerPoint,
    LinearPoint,
    ParallelLayer,
    ParallelLinear,
    Purpose,
    lacks_cublasmp,
    lacks_precision,
)
from overlap_sweep.config import TensorParallelPoint
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.models import LinearShape
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.space import KnobValue, OperatorPoint, Setting

if TYPE_CHECKING:
    from torch import Tensor

    from overlap_sweep.measure import Ranks

_KNOBS = {"num_sm", "aggregate", "num_splits"}
SUPPORTED_KNOBS = {"cpu": _KNOBS, "cuda": {*_KNOBS, "cga_size"}}
PRECISIONS = ("fp32", "fp16", "bf16")
LAYER_HAS_DEFAULT = False

_OFF_ANYWAY = ("set_sm_margin", "atomic_gemm", "fp8_buf")
"""Knobs that plain torch and symmetric memory never use, which a file may set to off. `use_ce` is not one of them:
without it the SMs would copy, which not all backends do."""


def refusal(point: LinearPoint, operator: str, settings: Mapping[str, Setting]) -> str | None:
    if reason := lacks_precision(point, PRECISIONS) or lacks_cublasmp(point):
        return reason
    if foreign := {knob for setting in settings.values() for knob in setting} - {"method", *knobs(point)}:
        return f"backend=torch has no {', '.join(sorted(foreign))} on {point.runtime.device}"
    if point.tp_size % 2 and any(setting.get("aggregate") for setting in settings.values()):
        return f"aggregate requires an even tp_size, not {point.tp_size}"
    return None


def knobs(point: KnobsPoint) -> Collection[str]:
    return SUPPORTED_KNOBS[point.runtime.device]


def default_knobs(method: str) -> Mapping[str, KnobValue]:
    return {}


def has_default(point: OperatorPoint) -> bool:
    return False


def parameter_shapes(point: TensorParallelPoint, shape: LinearShape) -> Mapping[str, tuple[int, ...]]:
    return {"weight": shape.weight_shape, "bias": shape.weight_shape[:1]}


def prepare(point: OperatorPoint, purpose: Purpose) -> None:
    """Does nothing: communicators are created once per worker and kept."""


def build(point: OperatorPoint, purpose: Purpose, ranks: Ranks, parameters: Mapping[str, Tensor]) -> ParallelLinear:
    from overlap_sweep.backends.torch import modules, overlap

    settings = space.settings(point) if purpose == "point" else {}
    return modules.build_operator(point, purpose, settings, parameters, overlap.by_collectives(ranks))


def close() -> None:
    """Does nothing: communicators end with the process group."""


def overlapped_slots(config: OverlapConfig, operators: Collection[str]) -> dict[str, Setting]:
    """Returns the settings of these operators' slots that are configured and switched on."""
    allowed = overlap_cfg.methods_allowed(config.switches)
    return {slot: s for slot, s in config.slots.items() if slot.partition("_")[0] in operators and allowed[slot]}


def layer_refusal(point: LayerPoint, config: OverlapConfig, operators: Collection[str]) -> str | None:
    settings = overlapped_slots(config, operators)
    if not settings:
        return "backend=torch has no default overlap of its own, and no slot of this layer is set and switched on"
    return overlap_cfg.methods_refusal(config.slots) or slots_refusal(point, config, settings, refusal)


def slots_refusal(
    point: LinearPoint,
    config: OverlapConfig,
    settings: Mapping[str, Setting],
    operator_refusal: Callable[[LinearPoint, str, Mapping[str, Setting]], str | None],
) -> str | None:
    """Returns why a slot of a layer cannot overlap as configured, or None. `operator_refusal`: the backend's `refusal`
    of a single operator."""
    allowed, backend = overlap_cfg.methods_allowed(config.switches), f"backend={point.backend}"
    for slot, setting in settings.items():
        if "method" not in setting:
            return f"{slot} has no method, and {backend} has no default method"
        if (method := setting["method"]) not in allowed[slot]:
            return f"the switches allow {slot} only {' or '.join(sorted(allowed[slot])) or 'no overlap'}, not {method}"
        if unknown := sorted(set(setting) - {"method", *space.KNOBS}):
            return f"{slot}: {backend} has no {', '.join(unknown)}"
        configured = {name: value for name, value in setting.items() if value or name not in _OFF_ANYWAY}
        operator, _, phase = slot.partition("_")
        if reason := operator_refusal(point, operator, space.slots_of(operator, {phase: configured})):
            return f"{slot}: {reason}"
    return None


def build_layer(point: LayerPoint, purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int) -> ParallelLayer:
    from overlap_sweep.backends.torch import modules

    settings = overlapped_slots(config, space.OPERATORS) if purpose == "point" else {}
    return modules.build_layer(point, purpose, settings, ranks, seed)


def attention(point: LayerPoint, ranks: Ranks) -> tuple[str, list[str]]:
    from overlap_sweep.backends.torch import modules

    kernel = modules.attention_kernel(point, ranks)
    # On a CPU there is no faster kernel that training would use.
    slow = kernel == "unfused" and ranks.device.type == "cuda"
    warning = "Attention ran unfused and much slower than in training, so communication looks smaller than it is."
    return f"{kernel} (torch)", [warning] if slow else []
