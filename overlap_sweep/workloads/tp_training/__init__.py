"""Training steps of a language model by one of several tensor-parallel stacks, under equal settings: what a point of it
is, and which points cannot be trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlap_sweep.backends.transformer_engine import missing
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import models, overlap_cfg, space
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import Workers, Workload, run_of
from overlap_sweep.workloads.tp_training.config import (
    DEFAULT_IMPL,
    PRECISION_OF,
    SEQUENCE_PARALLEL,
    TP_TRAINING_ON,
    TpTraining,
)
from overlap_sweep.workloads.tp_training.language_model import ARCHITECTURES, architecture, language_model

_OF_ALL = ("runtime", "profile", "repetition", "model", "tp_size")
_ONLY_OF = {
    "zero_stage": ("autotp",),
    "attn_impl": ("autotp", "fsdp_dtensor", "async_tp"),
    "tp_comm_overlap": ("megatron",),
    "tp_comm_overlap_cfg": ("megatron",),
}
"""Options that the others ignore."""
_LIBRARIES = {
    "autotp": ("transformers", "deepspeed"),
    "fsdp_dtensor": ("transformers",),
    "async_tp": ("transformers",),
    "megatron": (),
}
"""Whose version is part of the point, beside those that every result's environment is compared by."""


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the point with the model's whole config, steps and precision, without whatever this has no use for."""
    device, impl = point["runtime"]["device"], point["impl"] or DEFAULT_IMPL
    if point["backend"] != "auto":
        raise UserError(f"backend={point['backend']}: who trains is said by impl; leave backend out.")
    dp_size, training = point["dp_size"] or 1, dict(point["tp_training"])
    unasked = TP_TRAINING_ON[device] | {name: getattr(TpTraining(), name) for name in _ONLY_OF}
    training |= {name: value for name, value in unasked.items() if training[name] is None}
    # It says where results go, not what is measured.
    training.pop("output_dir")
    if training["warmup_steps"] >= training["num_training_steps"]:
        raise UserError(
            f"tp_training.warmup_steps={training['warmup_steps']} leaves nothing of "
            f"tp_training.num_training_steps={training['num_training_steps']} to be timed; give more steps."
        )
    training |= {name: None for name, impls in _ONLY_OF.items() if impl not in impls}
    if training["sequence_parallel"] is None:
        training["sequence_parallel"] = impl in SEQUENCE_PARALLEL
    # One rank has the whole sequence.
    training["sequence_parallel"] &= point["tp_size"] > 1
    training["compile"] |= impl == "async_tp"
    sequences = training["batch_size"] * training["gradient_accumulation_steps"] * dp_size
    completed = {
        **{name: point[name] for name in _OF_ALL},
        **{"impl": impl, "backend": impl, "dp_size": dp_size, "tp_training": training},
        "language_model": language_model(point["model"]),
        "libraries": {name: version(name) for name in _LIBRARIES[impl] if find_spec(name)},
        "precision": PRECISION_OF[training["dtype"]],
        "workload": {
            **point["workload"],
            "tokens": sequences * training["seq_length"],
            "repeats": training["num_training_steps"] - training["warmup_steps"],
        },
    }
    if training["tp_comm_overlap_cfg"] is not None:
        # Its content, so that the result says what was run.
        read = overlap_cfg.read(Path(training["tp_comm_overlap_cfg"]).expanduser())
        completed["overlap_cfg"] = {"slots": read.slots, "switches": read.switches}
    return completed


def overlap_configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    """Returns Megatron-Core's, where a file was given; Transformer Engine's defaults are in none."""
    given = point.get("overlap_cfg")
    return {"": OverlapConfig(given["slots"], given["switches"])} if given else {}


def refusal(point: Mapping[str, Any]) -> str | None:
    """Returns why the completed point cannot be trained, or not by its implementation; or None."""
    model, tp_size, training = point["language_model"], point["tp_size"], point["tp_training"]
    of_model, heads, kv_heads = point["model"]["name"], model["num_attention_heads"], model["num_key_value_heads"]
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        if model[name] % tp_size:
            return f"{name}={model[name]} of {of_model} does not divide by tp_size={tp_size}; use a divisor"
    if heads % kv_heads:
        return (
            f"num_attention_heads={heads} of {of_model} does not divide by num_key_value_heads={kv_heads}; give "
            "model.num_kv_heads a divisor"
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
    """Returns where Megatron-Core would compute something else than the other implementations, or cannot overlap as it
    is told to; or None."""
    on_gpu = point["runtime"]["device"] == "cuda"
    return (
        (missing() if on_gpu else None)
        or _architecture_refusal(point["language_model"], point["tp_training"]["seq_length"])
        or (_overlap_refusal(point) if on_gpu else None)
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
    """Returns whether the tensor-parallel communication of the point is overlapped by userbuffers."""
    training, given = point["tp_training"], point.get("overlap_cfg")
    # With one rank the point has no sequence_parallel.
    asked = training["tp_comm_overlap"] and training["sequence_parallel"] and point["runtime"]["device"] == "cuda"
    return bool(asked and (given is None or given["switches"]["tp_comm_overlap"]))


def _overlap_refusal(point: Mapping[str, Any]) -> str | None:
    training, tp_size = point["tp_training"], point["tp_size"]
    config = overlap_configs(point).get("")
    if config and tp_size > 1 and not training["sequence_parallel"]:
        return "tp_training.tp_comm_overlap_cfg overlaps nothing without tp_training.sequence_parallel"
    if not overlaps(point):
        return None
    if point["precision"] != "bf16":
        return (
            f"userbuffers are set up for bfloat16, not {training['dtype']}; give tp_training.tp_comm_overlap=false or "
            "tp_training.dtype=bfloat16"
        )
    if config:
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


def _words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    sizes = [f"tp{point['tp_size']}", f"dp{point['dp_size'] or 1}"]
    return [models.short_name(point["model"]), *sizes, point["impl"] or DEFAULT_IMPL]


def _workers(point: Mapping[str, Any], directory: Path) -> Workers:
    """Stacks patch what others run, and are compared by the memory that they take: none shares a process with
    another."""
    # With eight queues, NCCL's kernels wait for a GEMM that has taken all SMs: a ring exchange took 22 % longer.
    return Workers(max_connections=1 if point["impl"] == "megatron" else 8, company=point["impl"])


WORKLOAD = Workload(
    name="tp_training",
    package=__name__,
    complete=complete,
    refusal=refusal,
    run=run_of(__name__),
    overlap_configs=overlap_configs,
    subject=lambda point: f"{point['impl']} step",
    words=_words,
    named={"tp_size", "impl", "dp_size", "tp_training.output_dir"},
    world_size=lambda point: int(point["tp_size"] * (point["dp_size"] or 1)),
    fewer_gpus=lambda point: (
        f"tp_size={point['tp_size']} x dp_size={point['dp_size']}",
        "sizes whose product is smaller",
    ),
    workers=_workers,
    output_option="tp_training.output_dir",
    names_in_output=True,
)
