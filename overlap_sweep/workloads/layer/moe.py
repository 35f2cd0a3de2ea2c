"""`layer=moe`: a transformer layer with a mixture of experts, spread over expert-parallel ranks, under several ways for
the experts to communicate. What is not said here is as for other kinds of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap_sweep.backends import megatron
from overlap_sweep.declared import shown
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import expert_parallel, models, space
from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE
from overlap_sweep.workloads import Workers
from overlap_sweep.workloads.layer.config import KnobsConfig

BACKEND = "megatron"

_DEFAULTS: Mapping[str, Any] = {"ep_size": 2, "routing": "balanced", "micro_batches": 2}
_OF_OTHERS = {
    **{"num_replicas": 1, "training": False, "tp_comm_overlap_cfg": None, "ub_overlap_rs_dgrad": False},
    **dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_wgrad", "ub_bulk_dgrad")),
}
"""Options of `layer` that the kind does not have, with the values that change nothing."""


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the point with its backend, its options and the arguments of each variant. UserError for an unknown
    variant or a knob of tensor-parallel overlap."""
    if point["num_sm"] != KnobsConfig.num_sm:
        raise UserError(f"layer=moe does not use num_sm={point['num_sm']}; set layer.moe.num_sm.")
    knobs = [knob for knob in (*space.KNOBS, "with_cublasmp") if knob != "num_sm"]
    if idle := next((knob for knob in knobs if point.get(knob) is not None), None):
        raise UserError(f"layer=moe does not use {idle}={shown(point[idle])}; leave it out.")
    given = {name: value for name, value in point["layer"]["moe"].items() if value is not None}
    on_gpu = point["runtime"]["device"] == "cuda"
    options = {"num_sm": None, "grouped_gemm": on_gpu, **_DEFAULTS, **given}
    backend = BACKEND if point["backend"] == "auto" else point["backend"]
    layer = {**point["layer"], "moe": options, "configurations": {}}
    completed = {**point, **dict.fromkeys(space.KNOBS), "backend": backend, "layer": layer}
    recorded = {name: expert_parallel.arguments(name, options["num_sm"]) for name in _asked(completed)}
    return {**completed, "layer": {**layer, "moe": {**options, "arguments": recorded}}}


def _asked(point: Mapping[str, Any]) -> list[str]:
    """Returns the variants to measure besides the floor, with those that cannot run if the user names them."""
    asked = point["layer"]["variants"]
    if asked is None:
        others = expert_parallel.DEFAULT_VARIANTS
        asked = [name for name in others if expert_parallel.variant_refusal(name, point) is None]
    known = (*expert_parallel.VARIANTS, FLOOR)
    for name in asked:
        if name not in known:
            raise UserError(f"layer.variants: {name} is not known; with layer=moe choose one of {', '.join(known)}.")
    if not point["layer"]["comm_overlap"]:
        asked = [name for name in asked if name == NONE]
    return list(dict.fromkeys(name for name in asked if name != FLOOR)) or [NONE]


def names(point: Mapping[str, Any]) -> list[str]:
    """Returns the variants that can run, in order, `floor` last."""
    refused = refused_variants(point)
    return [*(name for name in point["layer"]["moe"]["arguments"] if name not in refused), FLOOR]


def refused_variants(point: Mapping[str, Any]) -> dict[str, str]:
    """Returns why variants cannot run, by name; without those that can."""
    reasons = {name: expert_parallel.variant_refusal(name, point) for name in point["layer"]["moe"]["arguments"]}
    return {name: why for name, why in reasons.items() if why}


def refusal(point: Mapping[str, Any]) -> str | None:
    layer, model, tokens = point["layer"], point["model"], point["workload"]["tokens"]
    if point["backend"] != BACKEND:
        return f"layer=moe is a layer of Megatron-Core; backend={BACKEND} has it, not {point['backend']}"
    for name, usual in _OF_OTHERS.items():
        if layer[name] != usual:
            return f"layer=moe has no layer.{name}"
    tp_size, ep_size = point["tp_size"], layer["moe"]["ep_size"]
    if reason := expert_parallel.model_refusal(model, ep_size):
        return reason
    if ep_size % tp_size:
        return f"tp_size={tp_size} must divide layer.moe.ep_size={ep_size}, which is the number of ranks"
    for operator in ("qkv", "proj"):
        if reason := models.refusal(model, operator, tokens, tp_size):
            return reason
    if (model.get("shared_expert_ffn_hidden_size") or 0) % tp_size:
        return f"the width of the shared experts is not divisible by tp_size={tp_size}"
    if tokens % (layer["micro_batch_size"] * tp_size):
        return (
            f"workload.tokens={tokens} is not divisible by layer.micro_batch_size={layer['micro_batch_size']} "
            f"times tp_size={tp_size}"
        )
    if reason := megatron.refusal(point):
        return reason
    if layer["moe"]["grouped_gemm"] and point["runtime"]["device"] != "cuda":
        return "layer.moe.grouped_gemm=true requires GPUs: it is Transformer Engine's"
    refused = refused_variants(point)
    if refused and len(refused) == len(layer["moe"]["arguments"].keys() - {NONE}):
        return "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    return None


def ranks(point: Mapping[str, Any]) -> dict[str, int]:
    """Returns `tp_size` where it is null: experts alone are spread over the ranks."""
    return {"tp_size": 1} if point["tp_size"] is None else {}


def world_size(point: Mapping[str, Any]) -> int:
    return int(point["layer"]["moe"]["ep_size"] or _DEFAULTS["ep_size"])


def workers(point: Mapping[str, Any], directory: Path) -> Workers:
    return Workers(max_connections=expert_parallel.max_connections(point["tp_size"]))


def words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    cut = [f"tp{point['tp_size']}"] if point["tp_size"] > 1 else []
    return [models.short_name(point["model"]), *cut, f"ep{world_size(point)}", "moe"]


def fewer_gpus(point: Mapping[str, Any]) -> tuple[str, str]:
    return f"layer.moe.ep_size={world_size(point)}", "a smaller layer.moe.ep_size"
