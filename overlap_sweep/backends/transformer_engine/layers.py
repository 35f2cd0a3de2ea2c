"""Transformer Engine's own layers, whole and in parts, overlapped by its userbuffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from overlap_sweep.backends import ParallelLayer, Purpose
from overlap_sweep.backends.transformer_engine import userbuffers_refusal
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig

if TYPE_CHECKING:
    from overlap_sweep.measure.ranks import Ranks

HAS_DEFAULT = True


def refusal(point: Mapping[str, Any], config: OverlapConfig, operators: Collection[str]) -> str | None:
    if point["tp_size"] not in space.USERBUFFERS_RANKS:
        return f"userbuffers have no kernels for tp_size={point['tp_size']}; they are for 2, 4 and 8 ranks"
    if config.switches["tp_comm_overlap_disable_fc1"] and "fc1" in operators:
        return "Transformer Engine's layers cannot switch off fc1's overlap alone, as tp_comm_overlap_disable_fc1 asks"
    if reason := overlap_cfg.slots_refusal(config.slots) or overlap_cfg.switches_refusal(config, operators):
        return reason
    for slot, setting in config.slots.items():
        operator, _, phase = slot.partition("_")
        if operator in operators and "method" in setting:
            unset = {**dict.fromkeys(space.KNOBS), "phases": None}
            alone = {**point, **unset, **setting, "operator": operator, "phase": phase}
            if reason := userbuffers_refusal(alone):
                return reason
    return None


def build(point: Mapping[str, Any], purpose: Purpose, config: OverlapConfig, ranks: Ranks, seed: int) -> ParallelLayer:
    from overlap_sweep.backends.transformer_engine import modules

    return modules.build_layer(point, purpose, config, ranks, seed)


def attention(point: Mapping[str, Any], ranks: Ranks) -> tuple[str | None, list[str]]:
    from overlap_sweep.backends.transformer_engine.attention import attention_backend, attention_warnings

    backend = attention_backend()
    return backend, attention_warnings(backend)
