"""Which of a layer's overlaps are switched on: Transformer Engine's arguments, and Megatron-Core's names for them.

A slot that initialize_ub knows is used only by a layer whose switch for it is on.
"""

from __future__ import annotations

from collections.abc import Mapping

from overlap_sweep.backends import Purpose
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS
from overlap_sweep.overlap.space import OPERATORS, Setting, slot

MEGATRON_NAMES = {
    "ub_overlap_ag": "tp_comm_overlap_ag",
    "ub_overlap_rs": "tp_comm_overlap_rs",
    "ub_overlap_rs_dgrad": "tp_comm_overlap_rs_dgrad",
    "ub_bulk_dgrad": "tp_comm_bulk_dgrad",
    "ub_bulk_wgrad": "tp_comm_bulk_wgrad",
}

Switches = dict[str, bool]

DEFAULTS: Switches = {ours: SWITCH_DEFAULTS[theirs] for ours, theirs in MEGATRON_NAMES.items()}
"""Of Megatron-Core and of `te.TransformerLayer`."""

_OF_PARALLEL = {
    "column": ("ub_overlap_ag", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
    "row": ("ub_overlap_ag", "ub_overlap_rs"),
}


def operator_switches(operator: str, purpose: Purpose, settings: Mapping[str, Setting]) -> Switches:
    """Of one operator's layer: on for the slots in `settings` and off for its others, or all at their default."""
    names = _OF_PARALLEL[OPERATORS[operator]]
    if purpose == "default":
        return {name: DEFAULTS[name] for name in names}
    if purpose != "point":
        return dict.fromkeys(names, False)
    method = {phase: settings.get(slot(operator, phase), {}).get("method") for phase in ("fprop", "dgrad", "wgrad")}
    if OPERATORS[operator] == "row":
        return {"ub_overlap_ag": bool(method["dgrad"]), "ub_overlap_rs": bool(method["fprop"])}
    return {
        "ub_overlap_ag": bool(method["fprop"]),
        "ub_overlap_rs_dgrad": method["dgrad"] in ("ring_exchange", "pipeline"),
        "ub_bulk_dgrad": method["dgrad"] == "bulk",
        "ub_bulk_wgrad": method["wgrad"] == "bulk",
    }
