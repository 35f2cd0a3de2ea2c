"""`layer=moe`: a transformer layer with a mixture of experts, spread over expert-parallel ranks, under several ways for
the experts to communicate. What is not said here is as for other kinds of layers.

Names and rules of these ways are Megatron-Core's 0.16. Without overlap the tokens are dispatched to the ranks of their
experts and combined again by all-to-alls, with nothing beside them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlap_sweep.backends import megatron
from overlap_sweep.backends.megatron import Arguments
from overlap_sweep.config import ResolvedModel
from overlap_sweep.declared import shown
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE
from overlap_sweep.workloads import Workers
from overlap_sweep.workloads.layer.config import DEFAULT_EP_SIZE, Asked, Config, KnobsConfig, Resolved, ResolvedMoe

BACKEND = "megatron"

_OF_OTHERS = {
    **{"num_replicas": 1, "training": False, "tp_comm_overlap_cfg": None, "ub_overlap_rs_dgrad": False},
    **dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_wgrad", "ub_bulk_dgrad")),
}
"""Options of `layer` that the kind does not have, with the values that change nothing."""


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


def complete(config: Asked) -> Asked:
    """Returns the point with its backend, its options and the arguments of each variant. UserError for an unknown
    variant or a knob of tensor-parallel overlap."""
    if config.num_sm != KnobsConfig.num_sm:
        raise UserError(f"layer=moe does not use num_sm={config.num_sm}; set layer.moe.num_sm.")
    for knob in (*space.KNOBS, "with_cublasmp"):
        if knob != "num_sm" and (value := getattr(config, knob)) is not None:
            raise UserError(f"layer=moe does not use {knob}={shown(value)}; leave it out.")
    given = config.layer.moe
    options = ResolvedMoe(
        ep_size=given.ep_size or DEFAULT_EP_SIZE,
        routing=given.routing or "balanced",
        micro_batches=given.micro_batches or 2,
        num_sm=given.num_sm,
        grouped_gemm=config.runtime.device == "cuda" if given.grouped_gemm is None else given.grouped_gemm,
    )
    asked = _asked(replace(config, layer=replace(config.layer, moe=options)))
    options.arguments = {name: arguments(name, options.num_sm) for name in asked}
    backend = BACKEND if config.backend == "auto" else config.backend
    unused: dict[str, Any] = dict.fromkeys(space.KNOBS)
    return replace(config, **unused, backend=backend, layer=replace(config.layer, moe=options))


def _asked(config: Asked) -> list[str]:
    """Returns the variants to measure besides the floor, with those that cannot run if the user names them."""
    asked = config.layer.variants
    if asked is None:
        asked = [name for name in DEFAULT_VARIANTS if variant_refusal(name, config) is None]
    known = (*VARIANTS, FLOOR)
    for name in asked:
        if name not in known:
            raise UserError(f"layer.variants: {name} is not known; with layer=moe choose one of {', '.join(known)}.")
    if not config.layer.comm_overlap:
        asked = [name for name in asked if name == NONE]
    return list(dict.fromkeys(name for name in asked if name != FLOOR)) or [NONE]


def names(point: Resolved) -> list[str]:
    """Returns the variants that can run, in order, `floor` last."""
    refused = refused_variants(point)
    return [*(name for name in point.layer.moe.arguments if name not in refused), FLOOR]


def refused_variants(point: Resolved) -> dict[str, str]:
    """Returns why variants cannot run, by name; without those that can."""
    reasons = {name: variant_refusal(name, point) for name in point.layer.moe.arguments}
    return {name: why for name, why in reasons.items() if why}


def refusal(point: Resolved) -> str | None:
    layer, tp_size, ep_size = point.layer, point.tp_size, point.world_size
    if point.backend != BACKEND:
        return f"layer=moe is a layer of Megatron-Core; backend={BACKEND} has it, not {point.backend}"
    for name, usual in _OF_OTHERS.items():
        if getattr(layer, name) != usual:
            return f"layer=moe has no layer.{name}"
    if reason := model_refusal(point.model, ep_size):
        return reason
    if ep_size % tp_size:
        return f"tp_size={tp_size} must divide layer.moe.ep_size={ep_size}, which is the number of ranks"
    sizes = layer.micro_batch_size, point.workload.tokens, tp_size
    if reason := models.layer_refusal(point.model, "multihead_attention", *sizes):
        return reason
    if (point.model.shared_expert_ffn_hidden_size or 0) % tp_size:
        return f"the width of the shared experts is not divisible by tp_size={tp_size}"
    if reason := megatron.refusal(point):
        return reason
    if layer.moe.grouped_gemm and point.runtime.device != "cuda":
        return "layer.moe.grouped_gemm=true requires GPUs: it is Transformer Engine's"
    refused = refused_variants(point)
    if refused and len(refused) == len(layer.moe.arguments.keys() - {NONE}):
        return "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return None


def ranks(config: Config) -> dict[str, int]:
    """Returns `tp_size` where it is null: experts alone are spread over the ranks."""
    return {"tp_size": 1} if config.tp_size is None else {}


def max_connections(tp_size: int) -> int:
    """Returns the CUDA_DEVICE_MAX_CONNECTIONS to use unless the user gives it: CUDA's default, because with 1 an
    all-to-all shares a queue with the computation beside it; but 1 with tensor parallelism, for which Megatron-LM
    requires that on GPUs before Blackwell."""
    return 8 if tp_size == 1 else 1


def workers(point: Resolved, directory: Path) -> Workers:
    return Workers(max_connections=max_connections(point.tp_size))


def words(config: Config, overrides: Sequence[str]) -> list[str]:
    cut = [f"tp{config.tp_size}"] if config.tp_size != 1 else []
    return [models.short_name(config.model), *cut, f"ep{_ep_size(config)}", "moe"]


def _ep_size(config: Config) -> int:
    return config.layer.moe.ep_size or DEFAULT_EP_SIZE


def fewer_gpus(config: Config) -> tuple[str, str]:
    return f"layer.moe.ep_size={_ep_size(config)}", "a smaller layer.moe.ep_size"


def arguments(name: str, num_sm: int | None) -> Arguments:
    """Returns the variant's arguments; `num_sm`: of DeepEP's kernels, None for the library's default."""
    found = dict(VARIANTS[name])
    return {**found, "moe_deepep_num_sms": num_sm or DEEPEP_SMS} if _DEEPEP.items() <= found.items() else found


def overlaps_micro_batches(given: Arguments) -> bool:
    """Returns whether one micro batch's forward runs beside another's backward."""
    return bool(given.get("overlap_moe_expert_parallel_comm"))


def model_refusal(model: ResolvedModel, ep_size: int) -> str | None:
    """Returns why the resolved model's experts cannot be spread over the ranks, or None."""
    experts, taken = model.num_experts, model.experts_per_token
    if not experts:
        return f"model {model.name} has no experts; choose one that has, or give model.num_experts"
    for size in ("experts_per_token", "expert_ffn_hidden_size"):
        if not getattr(model, size):
            return f"model {model.name} has no {size}; give model.{size}"
    assert taken
    if taken > experts:
        return f"experts_per_token={taken} is more than the model's {experts} experts"
    if experts % ep_size:
        return f"{experts} experts are not divisible by layer.moe.ep_size={ep_size}"
    return None


def variant_refusal(name: str, config: Asked) -> str | None:
    """Returns why the point cannot run the variant, or None."""
    options, given = config.layer.moe, VARIANTS[name]
    if name in (NONE, FLOOR):
        return None
    if options.ep_size == 1:
        return "layer.moe.ep_size=1 has no communication to overlap"
    if given.get("moe_shared_expert_overlap") and not config.model.shared_expert_ffn_hidden_size:
        return f"model {config.model.name} has no shared experts"
    if overlaps_micro_batches(given):
        if config.precision not in ("bf16", "fp16"):
            return f"overlap_moe_expert_parallel_comm requires bf16 or fp16, not {config.precision}"
        if options.micro_batches == 1:
            return "layer.moe.micro_batches=1 leaves no other micro batch to compute"
    if not _DEEPEP.items() <= given.items():
        return None
    if config.runtime.device != "cuda":
        return "DeepEP requires GPUs"
    if find_spec("deep_ep") is None:
        return "deep_ep is not installed; see https://github.com/deepseek-ai/DeepEP"
    num_sm = options.num_sm or DEEPEP_SMS
    return f"DeepEP requires an even number of SMs, not {num_sm}" if num_sm % 2 else None


def megatron_arguments(given: Arguments, ep_size: int) -> list[str]:
    """Returns Megatron-LM's command line arguments for the variant, a line for each choice."""
    lines = [f"--expert-model-parallel-size {ep_size}"]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        lines.append(flag if value is True else f"{flag} {value}")
    return lines
