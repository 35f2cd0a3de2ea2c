"""Whole layers made of the backend's parallel linear operators and torch's own norms and attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from overlap_sweep.backends import ParallelLayer, Purpose
from overlap_sweep.backends.torch import refusal as operator_refusal
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.space import Setting

if TYPE_CHECKING:
    from overlap_sweep.measure.ranks import Ranks

HAS_DEFAULT = False

_OFF_ANYWAY = ("set_sm_margin", "atomic_gemm", "fp8_buf")
"""What plain torch and symmetric memory never do, so that a file may say that it is off. Without `use_ce` the copies
would be the SMs', which not all of them are."""


def overlapped_slots(config: OverlapConfig, operators: Collection[str]) -> dict[str, Setting]:
    """Of these operators' slots those that are set and whose switch is on. There is no default for the others."""
    allowed = overlap_cfg.methods_allowed(config.switches)
    return {slot: s for slot, s in config.slots.items() if slot.partition("_")[0] in operators and allowed[slot]}


def refusal(point: Mapping[str, Any], config: OverlapConfig, operators: Collection[str]) -> str | None:
    settings = overlapped_slots(config, operators)
    if not settings:
        return "backend=torch has no default overlap of its own, and no slot of this layer is set and switched on"
    if reason := overlap_cfg.methods_refusal(config.slots):
        return reason
    allowed = overlap_cfg.methods_allowed(config.switches)
    reasons = (slot_refusal(slot, s, allowed[slot], point, operator_refusal) for slot, s in settings.items())
    return next(filter(None, reasons), None)


def slot_refusal(
    slot: str,
    setting: Mapping[str, Any],
    allowed: Collection[str],
    point: Mapping[str, Any],
    operator_refusal: Callable[[Mapping[str, Any]], str | None],
) -> str | None:
    """Why a slot of a layer cannot overlap so, where the switches leave it the methods `allowed` and its backend's
    `operator_refusal` says what a single operator is refused for."""
    operator, _, phase = slot.partition("_")
    backend = f"backend={point['backend']}"
    if "method" not in setting:
        return f"{slot} is given no method, and {backend} has no default to take one from"
    if setting["method"] not in allowed:
        return f"the switches let {slot} overlap by {' or '.join(sorted(allowed))} alone, not by {setting['method']}"
    unknown = sorted(set(setting) - {"method", *space.KNOBS})
    if unknown:
        return f"{slot}: {backend} has no {', '.join(unknown)}"
    asked = {name: value for name, value in setting.items() if value or name not in _OFF_ANYWAY}
    alone = {**point, **dict.fromkeys(space.KNOBS), "phases": None, **asked, "operator": operator, "phase": phase}
    reason = operator_refusal(alone)
    return f"{slot}: {reason}" if reason else None


def build(point: Mapping[str, Any], purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int) -> ParallelLayer:
    from overlap_sweep.backends.torch import modules

    settings = overlapped_slots(config, space.OPERATORS) if purpose == "point" else {}
    return modules.build_layer(point, purpose, settings, ranks, seed)


def attention(point: Mapping[str, Any], ranks: Ranks) -> tuple[str, list[str]]:
    from overlap_sweep.backends.torch import modules

    kernel = modules.attention_kernel(point, ranks)
    # On a CPU there is nothing faster that training would use.
    slow = kernel == "unfused" and ranks.device.type == "cuda"
    warning = "Attention ran unfused, much slower than in training, which makes communication look smaller than it is."
    return f"{kernel} (torch)", [warning] if slow else []
