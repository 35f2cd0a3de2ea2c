"""Plain torch.distributed: overlap written with asynchronous collectives and sends, on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from overlap_sweep.backends import ParallelLinear, Purpose
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import LinearShape

if TYPE_CHECKING:
    from torch import Tensor

    from overlap_sweep.measure.ranks import Ranks

SUPPORTED_KNOBS = {
    "cpu": {"num_sm", "aggregate", "num_splits"},
    "cuda": {"num_sm", "aggregate", "num_splits", "cga_size"},
}
PRECISIONS = ("fp32", "fp16", "bf16")


def refusal(point: Mapping[str, Any]) -> str | None:
    settings = space.settings(point)
    device = point["runtime"]["device"]
    if point["precision"] not in PRECISIONS:
        return f"backend=torch has no precision={point['precision']}; it has {', '.join(PRECISIONS)}"
    given = {knob for setting in settings.values() for knob in setting} - {"method"}
    foreign = sorted(given - SUPPORTED_KNOBS[device])
    if foreign:
        return f"backend=torch has no {', '.join(foreign)} on {device}"
    if point["tp_size"] % 2 and any(setting.get("aggregate") for setting in settings.values()):
        return f"aggregate pairs the ranks, and tp_size={point['tp_size']} is odd"
    return None


def knobs(point: Mapping[str, Any]) -> Collection[str]:
    return SUPPORTED_KNOBS[point["runtime"]["device"]]


def default_knobs(method: str) -> Mapping[str, Any]:
    return {}


def has_default(point: Mapping[str, Any]) -> bool:
    return False


def parameter_shapes(point: Mapping[str, Any], shape: LinearShape) -> Mapping[str, tuple[int, ...]]:
    return {"weight": shape.weight_shape, "bias": shape.weight_shape[:1]}


def prepare(point: Mapping[str, Any], purpose: Purpose) -> None:
    """Communicators are made once per worker and kept."""


def build(point: Mapping[str, Any], purpose: Purpose, ranks: Ranks, parameters: Mapping[str, Tensor]) -> ParallelLinear:
    from overlap_sweep.backends.torch.modules import build_operator
    from overlap_sweep.backends.torch.overlap import by_collectives

    settings = space.settings(point) if purpose == "point" else {}
    return build_operator(point, purpose, settings, parameters, by_collectives(ranks))


def close() -> None:
    """Its communicators end with the process group."""
