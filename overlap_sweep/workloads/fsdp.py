"""Training steps of a ranking model under FSDP2 or DDP: what of their communication is hidden."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap_cfg import OverlapConfig
from overlap_sweep.training_config import TRAINING_ON

if TYPE_CHECKING:
    from overlap_sweep.ranks import Ranks

PRECISION_OF = {"bf16": "bf16", "fp16": "fp16", "none": "fp32"}

_KEPT = ("model", "ranking", "fsdp", "training", "distributed", "streams", "compile", "profiling", "telemetry")
_OF_ALL = ("runtime", "profile", "repetition")
_ENVIRONMENT = re.compile(r"(NCCL|RCCL|TORCH_NCCL|HSA|GPU|HIP|ROCR|CUDA_DEVICE|UCX|FI|MSCCLPP)_[A-Z0-9_]+")
_MULTICAST = ("NCCL_NVLS_ENABLE",)
"""What runtime.multicast decides."""


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """With batch, steps and precision: the point without whatever training has no use for."""
    device, distributed, profiling = point["runtime"]["device"], dict(point["distributed"]), dict(point["profiling"])
    if point["backend"] != "auto":
        raise UserError(f"backend={point['backend']}: who shards is said by distributed.strategy; leave backend out.")
    training = {**TRAINING_ON[device], **{name: v for name, v in point["training"].items() if v is not None}}
    # It says where results go, not what is measured.
    training.pop("output_dir", None)
    if profiling["enabled"] is None:
        profiling["enabled"] = point["profile"] != "none"
    distributed["env"] = _environment(distributed["env"])
    ranking, fsdp = point["ranking"], dict(point["fsdp"])
    fsdp["forward_prefetch"] = _layers_ahead(fsdp["forward_prefetch"])
    _check_reshard(fsdp["reshard_after_forward"])
    micro_batches = training["batch_size"] * training["gradient_accumulation"] * distributed["dp_size"]
    return {
        **{name: point[name] for name in (*_OF_ALL, *_KEPT)},
        **{"training": training, "distributed": distributed, "profiling": profiling, "fsdp": fsdp},
        "workload": {**point["workload"], "tokens": micro_batches * tokens_per_sample(ranking)},
        "backend": distributed["strategy"],
        "precision": PRECISION_OF[training["mixed_precision"]],
        "tp_size": 1,
    }


def tokens_per_sample(ranking: Mapping[str, Any]) -> int:
    """Of the backbone's input."""
    return int(ranking["sequence_length"] + ranking["num_sparse_features"] + 1)


def _environment(asked: Mapping[str, Any]) -> dict[str, str]:
    """Without what is not set. UserError for what is no variable of NCCL, RCCL or their transports."""
    for name in asked:
        if not _ENVIRONMENT.fullmatch(name):
            raise UserError(f"distributed.env.{name} is no variable of NCCL, RCCL or HIP; set it in your shell.")
        if name == "CUDA_DEVICE_MAX_CONNECTIONS":
            raise UserError(f"distributed.env.{name}: give runtime.max_connections instead.")
        if name in _MULTICAST:
            raise UserError(f"distributed.env.{name}: give runtime.multicast instead.")
    return {name: str(int(v) if isinstance(v, bool) else v) for name, v in asked.items() if v is not None}


def _layers_ahead(asked: Any) -> int:
    if isinstance(asked, bool | int) and 0 <= asked <= 1024:
        return int(asked)
    raise UserError(f"fsdp.forward_prefetch={asked} is neither true, false nor a number of layers; give one of them.")


def _check_reshard(asked: Any) -> None:
    if not isinstance(asked, bool) and not (isinstance(asked, int) and asked > 1):
        raise UserError(
            f"fsdp.reshard_after_forward={asked} is neither true, false nor a number of ranks; give one of them."
        )


def refusal(point: Mapping[str, Any]) -> str | None:
    distributed, fsdp, ranks = point["distributed"], point["fsdp"], point["distributed"]["dp_size"]
    if point["model"]["num_attention_heads"] % point["model"]["num_kv_heads"]:
        return "the attention heads do not divide by the key-value heads"
    if point["compile"]["mode"] and point["compile"]["options"]:
        return "torch.compile takes compile.mode or compile.options, not both"
    if distributed["strategy"] == "ddp":
        return _ddp_refusal(point)
    if not fsdp["use_orig_params"]:
        return "FSDP2 has no flat parameters: fsdp.use_orig_params=false was FSDP1's"
    if ranks % fsdp["replicas"]:
        return f"distributed.dp_size={ranks} does not divide by fsdp.replicas={fsdp['replicas']}"
    shards, group = ranks // fsdp["replicas"], fsdp["reshard_after_forward"]
    if not isinstance(group, bool) and (shards % group or group >= shards):
        return f"fsdp.reshard_after_forward={group} is no smaller part of {shards} ranks"
    if distributed["overlap_reduce_scatter"]:
        return "distributed.overlap_reduce_scatter is for DDP; FSDP2 reduces and scatters anyway"
    return _streams_refusal(point)


def _ddp_refusal(point: Mapping[str, Any]) -> str | None:
    distributed, fsdp = point["distributed"], point["fsdp"]
    unused = {"forward_prefetch": 0, "backward_prefetch": "BACKWARD_PRE", "limit_all_gathers": False}
    unused |= {"reshard_after_forward": True, "replicas": 1, "reduce_dtype": None, "use_orig_params": True}
    if idle := next((name for name, usual in unused.items() if fsdp[name] != usual), None):
        return f"fsdp.{idle} changes nothing under DDP"
    if distributed["overlap_reduce_scatter"] and not distributed["enable_overlap"]:
        return "distributed.overlap_reduce_scatter needs distributed.enable_overlap"
    return _streams_refusal(point)


def _streams_refusal(point: Mapping[str, Any]) -> str | None:
    usual = {"compute": "normal", "all_reduce": "high", "reduce_scatter": "high", "auxiliary": "high"}
    changed = [name for name, priority in point["streams"].items() if priority != usual[name]]
    if changed and not point["distributed"]["enable_overlap"]:
        return f"streams.{changed[0]} is a stream of distributed.enable_overlap, which is off"
    return None


def overlap_configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    """None: no library reads these settings from a file."""
    return {}


def run(point: Mapping[str, Any], directory: Path, ranks: Ranks) -> dict[str, Any]:
    """Train with telemetry, profile, and compare with no overlap and no communication."""
    from overlap_sweep.training.run import forget, run_training

    try:
        return run_training(point, directory, ranks)
    finally:
        forget(ranks)
