"""Megatron-Core's parallel linear layers with `tp_comm_overlap`: the modules that Megatron-LM trains with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlap_sweep.backends import ParallelLinear, Purpose
from overlap_sweep.backends.transformer_engine import (
    close,
    default_knobs,
    has_default,
    knobs,
    missing,
    parameter_shapes,
    prepare,
    userbuffers_refusal,
)

if TYPE_CHECKING:
    from torch import Tensor

    from overlap_sweep.measure.ranks import Ranks

__all__ = ["build", "close", "default_knobs", "has_default", "knobs", "parameter_shapes", "prepare", "refusal"]


def refusal(point: Mapping[str, Any]) -> str | None:
    return missing() or missing("megatron.core") or userbuffers_refusal(point)


def build(point: Mapping[str, Any], purpose: Purpose, ranks: Ranks, parameters: Mapping[str, Tensor]) -> ParallelLinear:
    from overlap_sweep.backends.megatron.modules import megatron_module
    from overlap_sweep.backends.transformer_engine import linear

    return linear.build(point, purpose, ranks, parameters, megatron_module)
