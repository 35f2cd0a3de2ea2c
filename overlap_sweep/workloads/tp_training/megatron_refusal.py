"""Where Megatron-Core would compute something else than the other implementations, or cannot overlap as it is told to.

No torch: the launcher asks, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlap_sweep.backends.transformer_engine import missing
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads.tp_training.architectures import architecture, known


def refusal(point: Mapping[str, Any]) -> str | None:
    """Why the resolved point cannot be trained by Megatron-Core, or None."""
    model, on_gpu = point["language_model"], point["runtime"]["device"] == "cuda"
    if on_gpu and (reason := missing()):
        return reason
    return _architecture_refusal(model, point["tp_training"]["seq_length"]) or (
        _overlap_refusal(point) if on_gpu else None
    )


def _architecture_refusal(model: Mapping[str, Any], seq_length: int) -> str | None:
    if not architecture(model["model_type"]).megatron:
        same = [name for name in known() if architecture(name).megatron]
        return (
            f"impl=megatron is not known to compute what Hugging Face's {model['model_type']} does, as it is for "
            f"{', '.join(same)}; use impl=fsdp_dtensor or autotp"
        )
    rope = model["rope_parameters"]
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"impl=megatron has the default rotary embedding only, and the model's is {rope['rope_type']}"
    if model["hidden_act"] != "silu":
        return f"impl=megatron has SiLU only, and the model's hidden_act is {model['hidden_act']}"
    for name in ("attention_bias", "mlp_bias"):
        if model.get(name):
            return f"impl=megatron trains without {name}, and the model has {name}={model[name]}"
    # Mistral's is used whenever there is one, that of others where they say so.
    window = model.get("sliding_window") if model.get("use_sliding_window", model["model_type"] == "mistral") else None
    if window is not None and window < seq_length:
        return (
            f"impl=megatron attends to the whole sequence, and the model's sliding_window={window} is shorter than "
            f"tp_training.seq_length={seq_length}"
        )
    return None


def overlaps(point: Mapping[str, Any]) -> bool:
    """Whether the tensor-parallel communication of the point is overlapped by userbuffers."""
    training, given = point["tp_training"], point.get("overlap_cfg")
    # With one rank the point has no sequence_parallel.
    asked = training["tp_comm_overlap"] and training["sequence_parallel"] and point["runtime"]["device"] == "cuda"
    return bool(asked and (given is None or given["switches"]["tp_comm_overlap"]))


def _overlap_refusal(point: Mapping[str, Any]) -> str | None:
    training, given, tp_size = point["tp_training"], point.get("overlap_cfg"), point["tp_size"]
    if given and tp_size > 1 and not training["sequence_parallel"]:
        return "tp_training.tp_comm_overlap_cfg overlaps nothing without tp_training.sequence_parallel"
    if not overlaps(point):
        return None
    if point["precision"] != "bf16":
        return (
            f"userbuffers are set up for bfloat16, not {training['dtype']}; give tp_training.tp_comm_overlap=false or "
            "tp_training.dtype=bfloat16"
        )
    if given:
        config = OverlapConfig(given["slots"], given["switches"])
        return overlap_cfg.slots_refusal(config.slots) or overlap_cfg.switches_refusal(config)
    if tp_size not in space.USERBUFFERS_RANKS:
        return (
            f"Transformer Engine's defaults have no kernels for tp_size={tp_size}; they are for 2, 4 and 8 ranks; give "
            "tp_training.tp_comm_overlap=false or a tp_comm_overlap_cfg"
        )
    return None
