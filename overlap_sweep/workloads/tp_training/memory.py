"""What a training run takes of a GPU at the very least, before any activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlap_sweep.workloads.tp_training.language_model import parameters

LESS_MEMORY = (
    "out of device memory; give a smaller tp_training.batch_size or tp_training.seq_length, "
    "tp_training.activation_checkpointing=true, a larger tp_size, or fewer layers (model.num_layers)"
)

_MASTER, _ADAM = 4, 8
"""Bytes of a parameter: its float32 weight, and the two moments of the optimizer."""


def least_bytes(point: Mapping[str, Any]) -> float:
    """Of each rank: weights, gradients and the optimizer's state when the step is taken. As Rajbhandari et al. count
    (arXiv:1910.02054, section 3.1), with what each implementation shards over the data-parallel ranks."""
    count = parameters(point["language_model"]) / point["tp_size"]
    of_dp = count / point["dp_size"]
    state = _MASTER + _ADAM
    computed = 4 if point["precision"] == "fp32" or point["tp_training"]["autocast"] else 2
    # Megatron-Core and ZeRO 0 compute float32 with the master weights themselves.
    copied = computed if computed != _MASTER else 0
    zero_stage = point["tp_training"]["zero_stage"]
    if point["impl"] in ("fsdp_dtensor", "async_tp"):
        # FSDP2 gathers weights and sheds them layer by layer; gradients are the master weights' type.
        return of_dp * (state + _MASTER)
    if point["impl"] == "megatron":
        return count * (copied + computed) + of_dp * state
    if zero_stage == 0:
        return count * (copied + computed + state)
    gradients = of_dp if zero_stage == 2 else count
    return count * computed + gradients * computed + of_dp * state
