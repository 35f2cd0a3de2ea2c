"""Which points cannot be trained, or not by their implementation, and why.

No torch: the launcher asks, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from overlap_sweep.backends.transformer_engine import missing
from overlap_sweep.overlap import overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads.tp_training.architectures import ARCHITECTURES, architecture


def refusal(point: Mapping[str, Any]) -> str | None:
    """Why the completed point cannot be trained, or None."""
    model, tp_size, training = point["language_model"], point["tp_size"], point["tp_training"]
    for name, count in (
        ("num_key_value_heads", model["num_key_value_heads"]),
        ("num_attention_heads", model["num_attention_heads"]),
        ("intermediate_size", model["intermediate_size"]),
    ):
        if count % tp_size:
            return f"{name}={count} of {point['model']['name']} does not divide by tp_size={tp_size}; use a divisor"
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    if heads % kv_heads:
        return (
            f"num_attention_heads={heads} of {point['model']['name']} does not divide by "
            f"num_key_value_heads={kv_heads}; give model.num_kv_heads a divisor"
        )
    if model["head_dim"] % 2:
        return f"head_dim={model['head_dim']} is odd, and rotary embeddings turn pairs; give an even model.head_dim"
    if training["sequence_parallel"] and training["seq_length"] % tp_size:
        return f"tp_training.seq_length={training['seq_length']} does not divide by tp_size={tp_size}; use a multiple"
    return _REFUSALS[point["impl"]](point)


def _autotp_refusal(point: Mapping[str, Any]) -> str | None:
    if find_spec("deepspeed") is None:
        return "impl=autotp needs DeepSpeed, which is not installed; pip install 'overlap-sweep[autotp]'"
    if point["tp_training"]["sequence_parallel"]:
        return "AutoTP has no sequence parallelism: leave tp_training.sequence_parallel out"
    return _hugging_face_refusal(point)


def _async_tp_refusal(point: Mapping[str, Any]) -> str | None:
    if not point["tp_training"]["sequence_parallel"] and point["tp_size"] > 1:
        return "asynchronous TP overlaps nothing without tp_training.sequence_parallel"
    if point["runtime"]["device"] == "cpu":
        return "asynchronous TP copies from GPU to GPU, and runtime.device is cpu; use impl=fsdp_dtensor"
    if point["tp_size"] == 1:
        return "at tp_size=1 there is nothing for asynchronous TP to overlap; use impl=fsdp_dtensor"
    return _hugging_face_refusal(point)


def _hugging_face_refusal(point: Mapping[str, Any]) -> str | None:
    if point["tp_training"]["attn_impl"] != "flash_attention_2":
        return None
    if point["runtime"]["device"] == "cpu":
        return "tp_training.attn_impl=flash_attention_2 needs a GPU; use sdpa"
    if find_spec("flash_attn") is None:
        return "tp_training.attn_impl=flash_attention_2 needs the package flash-attn; install it, or use sdpa"
    if point["precision"] == "fp32" and not point["tp_training"]["autocast"]:
        return "tp_training.attn_impl=flash_attention_2 computes in bfloat16 and float16 only; use sdpa"
    return None


def _megatron_refusal(point: Mapping[str, Any]) -> str | None:
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        return "impl=megatron needs Megatron-Core, which is not installed; pip install 'overlap-sweep[gpu]'"
    training = point["tp_training"]
    if training["autocast"]:
        return "Megatron-Core computes in the type of its parameters: leave tp_training.autocast out"
    if training["compile"]:
        return "Megatron-Core's layers are not compiled as a whole: leave tp_training.compile out"
    if not training["vocab_parallel"]:
        return "Megatron-Core always cuts the vocabulary: leave tp_training.vocab_parallel out"
    return megatron_core_refusal(point)


def megatron_core_refusal(point: Mapping[str, Any]) -> str | None:
    """Where Megatron-Core would compute something else than the other implementations, or cannot overlap as it is told
    to; or None."""
    model, on_gpu = point["language_model"], point["runtime"]["device"] == "cuda"
    if on_gpu and (reason := missing()):
        return reason
    return _architecture_refusal(model, point["tp_training"]["seq_length"]) or (
        _overlap_refusal(point) if on_gpu else None
    )


def _architecture_refusal(model: Mapping[str, Any], seq_length: int) -> str | None:
    if not architecture(model["model_type"]).megatron:
        same = [name for name, known in sorted(ARCHITECTURES.items()) if known.megatron]
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


_REFUSALS = {
    "autotp": _autotp_refusal,
    "fsdp_dtensor": _hugging_face_refusal,
    "async_tp": _async_tp_refusal,
    "megatron": _megatron_refusal,
}
