"""Plain torch.distributed: overlap written with asynchronous collectives and sends, on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlap_sweep import space

SUPPORTED_KNOBS = {
    "cpu": {"num_sm", "aggregate", "num_splits"},
    "cuda": {"num_sm", "aggregate", "num_splits", "cga_size"},
}


def refusal(point: Mapping[str, Any]) -> str | None:
    settings = space.settings(point)
    device = point["runtime"]["device"]
    given = {knob for setting in settings.values() for knob in setting} - {"method"}
    foreign = sorted(given - SUPPORTED_KNOBS[device])
    if foreign:
        return f"backend=torch has no {', '.join(foreign)} on {device}"
    if point["tp_size"] % 2 and any(setting.get("aggregate") for setting in settings.values()):
        return f"aggregate pairs the ranks, and tp_size={point['tp_size']} is odd"
    return None


def build(*args: Any, **kwargs: Any) -> Any:
    from overlap_sweep.backends.torch.linear import parallel_linear

    return parallel_linear(*args, **kwargs)
