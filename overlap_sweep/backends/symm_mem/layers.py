"""Whole layers of torch's own modules, whose parallel linear operators overlap by symmetric memory.

A slot that is not set, and whose overlap is switched on, overlaps as under async TP: by the fused operators if they fit
it. That a switch would leave a dgrad nothing but `bulk` holds only for those that are set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from overlap_sweep.backends import ParallelLayer, Purpose
from overlap_sweep.backends.symm_mem import ASYNC_TP
from overlap_sweep.backends.symm_mem import refusal as operator_refusal
from overlap_sweep.backends.torch.layers import attention, overlapped_slots, slot_refusal
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.overlap.space import Setting

if TYPE_CHECKING:
    from overlap_sweep.measure.ranks import Ranks

__all__ = ["HAS_DEFAULT", "attention", "build", "refusal"]

HAS_DEFAULT = True


def slots(config: OverlapConfig, operators: Collection[str]) -> dict[str, Setting]:
    """What each of these operators' slots that overlaps is given."""
    allowed = overlap_cfg.methods_allowed(config.switches)
    unset = {
        slot: setting
        for slot, setting in ASYNC_TP.items()
        if slot not in config.slots and slot.partition("_")[0] in operators and allowed[slot]
    }
    return unset | overlapped_slots(config, operators)


def refusal(point: Mapping[str, Any], config: OverlapConfig, operators: Collection[str]) -> str | None:
    given = slots(config, operators)
    if not given:
        return "its switches leave no slot of this layer to overlap"
    if reason := overlap_cfg.methods_refusal(given):
        return reason
    allowed = overlap_cfg.methods_allowed(config.switches)
    set_slots = overlapped_slots(config, operators)
    reasons = (slot_refusal(slot, s, allowed[slot], point, operator_refusal) for slot, s in set_slots.items())
    return next(filter(None, reasons), None)


def build(point: Mapping[str, Any], purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int) -> ParallelLayer:
    from overlap_sweep.backends.symm_mem.operators import SymmetricMemory, group_name
    from overlap_sweep.backends.torch import modules
    from overlap_sweep.measure.ranks import parallel_groups

    settings = slots(config, space.OPERATORS) if purpose == "point" else {}
    group, _ = parallel_groups(point["tp_size"], ranks.world_size)
    return modules.build_layer(
        *(point, purpose, settings, ranks, seed), overlapped=lambda _: SymmetricMemory(group_name(group))
    )
