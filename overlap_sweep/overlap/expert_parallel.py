"""Expert parallelism: how a layer's experts communicate, as arguments of Megatron-Core, and what each way needs.

Names and rules are Megatron-Core's 0.16. Without overlap the tokens are dispatched to the ranks of their experts and
combined again by all-to-alls, with nothing beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE

Arguments = dict[str, bool | int | str]

_ALL_TO_ALL: Arguments = {"moe_token_dispatcher_type": "alltoall"}
_DEEPEP: Arguments = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
_MICRO_BATCHES: Arguments = {"overlap_moe_expert_parallel_comm": True}
VARIANTS: Mapping[str, Arguments] = {
    NONE: _ALL_TO_ALL,
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "shared_experts": {**_ALL_TO_ALL, "moe_shared_expert_overlap": True},
    "micro_batches": {**_ALL_TO_ALL, **_MICRO_BATCHES},
    "deepep": _DEEPEP,
    "deepep_micro_batches": {**_DEEPEP, **_MICRO_BATCHES},
}
"""Arguments of `TransformerConfig` by variant."""
DEFAULT_VARIANTS = tuple(name for name in VARIANTS if name != "allgather")
"""The variants that are measured if the user names none, as far as they can run. An all-gather moves every token to
every rank."""

DEEPEP_SMS = 20
"""Megatron-Core's default of moe_deepep_num_sms."""


def max_connections(tp_size: int) -> int:
    """Returns the CUDA_DEVICE_MAX_CONNECTIONS to use unless the user gives it: CUDA's default, because with 1 an
    all-to-all shares a queue with the computation beside it; but 1 with tensor parallelism, for which Megatron-LM
    requires that on GPUs before Blackwell."""
    return 8 if tp_size == 1 else 1


def arguments(name: str, num_sm: int | None) -> Arguments:
    """Returns the variant's arguments; `num_sm`: of DeepEP's kernels, None for the library's default."""
    found = dict(VARIANTS[name])
    return {**found, "moe_deepep_num_sms": num_sm or DEEPEP_SMS} if _DEEPEP.items() <= found.items() else found


def overlaps_micro_batches(given: Arguments) -> bool:
    """Returns whether one micro batch's forward runs beside another's backward."""
    return bool(given.get("overlap_moe_expert_parallel_comm"))


def model_refusal(model: Mapping[str, Any], ep_size: int) -> str | None:
    """Returns why the resolved model's experts cannot be spread over the ranks, or None."""
    experts, taken = model.get("num_experts"), model.get("experts_per_token")
    if not experts:
        return f"model {model['name']} has no experts; choose one that has, or give model.num_experts"
    for size in ("experts_per_token", "expert_ffn_hidden_size"):
        if not model.get(size):
            return f"model {model['name']} has no {size}; give model.{size}"
    if taken > experts:
        return f"experts_per_token={taken} is more than the model's {experts} experts"
    if experts % ep_size:
        return f"{experts} experts are not divisible by layer.moe.ep_size={ep_size}"
    return None


def variant_refusal(name: str, point: Mapping[str, Any]) -> str | None:
    """Returns why the point cannot run the variant, or None."""
    options, given = point["layer"]["moe"], VARIANTS[name]
    if name in (NONE, FLOOR):
        return None
    if options["ep_size"] == 1:
        return "layer.moe.ep_size=1 has no communication to overlap"
    if given.get("moe_shared_expert_overlap") and not point["model"].get("shared_expert_ffn_hidden_size"):
        return f"model {point['model']['name']} has no shared experts"
    if overlaps_micro_batches(given):
        if point["precision"] not in ("bf16", "fp16"):
            return f"overlap_moe_expert_parallel_comm requires bf16 or fp16, not {point['precision']}"
        if options["micro_batches"] == 1:
            return "layer.moe.micro_batches=1 leaves no other micro batch to compute"
    if not _DEEPEP.items() <= given.items():
        return None
    if point["runtime"]["device"] != "cuda":
        return "DeepEP requires GPUs"
    if find_spec("deep_ep") is None:
        return "deep_ep is not installed; see https://github.com/deepseek-ai/DeepEP"
    num_sm = options["num_sm"] or DEEPEP_SMS
    return f"DeepEP requires an even number of SMs, not {num_sm}" if num_sm % 2 else None


def megatron_arguments(given: Arguments, ep_size: int) -> list[str]:
    """Returns Megatron-LM's command line arguments for the variant, a line for each choice."""
    lines = [f"--expert-model-parallel-size {ep_size}"]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        lines.append(flag if value is True else f"{flag} {value}")
    return lines
