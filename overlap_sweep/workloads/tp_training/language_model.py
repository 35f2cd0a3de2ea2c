"""A causal language model as the fields of its Hugging Face config, what there is in it to hold and to compute, and how
much of that a GPU can."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.models import read_hf_fields

_LONGEST_CONTEXT = 131_072
"""Of models given by their sizes: no architecture here computes anything else for a shorter one."""


def language_model(model: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, `model_type` among them, of the resolved `model` of a point. What is given there wins over what a
    config.json says. `more`: further fields of the architecture, where there is no config.json.

    UserError where a language model needs more than is given.
    """
    fields = read_hf_fields(str(model["name"])) if model["source"] == "hf" else _by_sizes(model, more)
    if "rope_parameters" not in fields:
        raise UserError(
            f"model.name={model['name']} has no rotary embedding, which every model that can be trained has; choose "
            "another."
        )
    given = {
        "model_type": model["architecture"],
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "num_hidden_layers": model["num_layers"],
        "vocab_size": model["vocab_size"],
        "rms_norm_eps": model["norm_epsilon"],
        "tie_word_embeddings": model["tie_word_embeddings"],
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if len(fields.get("layer_types") or ()) != fields["num_hidden_layers"]:
        # One for each layer: for another number of them the config's class says what they are.
        fields.pop("layer_types", None)
    if model["rope_theta"] is not None:
        fields["rope_parameters"] = {**(fields.get("rope_parameters") or {}), "rope_theta": model["rope_theta"]}
    fields["rope_parameters"] = {"rope_type": "default", **fields["rope_parameters"]}
    return fields


def _by_sizes(model: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for name in ("num_layers", "vocab_size"):
        if model[name] is None:
            raise UserError(
                f"model {model['name']} has no {name}, which a language model needs; give model.{name}=... ."
            )
    return {
        **{"hidden_act": "silu", "max_position_embeddings": _LONGEST_CONTEXT, "rms_norm_eps": 1e-6},
        **{"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 10_000.0}},
        **more,
    }


def layer_parameters(fields: Mapping[str, Any]) -> int:
    """Of the four linear operators of one layer: what its GEMMs multiply with. Norms and biases are left out."""
    hidden, head_dim = fields["hidden_size"], fields["head_dim"]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    return int(attention + 3 * hidden * fields["intermediate_size"])


def parameters(fields: Mapping[str, Any]) -> int:
    """Of the whole model, up to norms and biases, which are some millionths of it."""
    matrices = 1 if fields["tie_word_embeddings"] else 2
    return int(
        fields["num_hidden_layers"] * layer_parameters(fields) + matrices * fields["vocab_size"] * fields["hidden_size"]
    )


def flops_per_token(fields: Mapping[str, Any], seq_length: int) -> float:
    """Forward and backward, as PaLM counts them (arXiv:2204.02311, appendix B): 6 for each parameter that a GEMM
    multiplies with, the output projection's among them and the embedding's not, and 12 x layers x heads x head
    dimension x sequence for attention, as if it were not causal. What checkpointing computes again does not count."""
    projection = fields["vocab_size"] * fields["hidden_size"]
    gemms = 6 * (fields["num_hidden_layers"] * layer_parameters(fields) + projection)
    heads = fields["num_attention_heads"] * fields["head_dim"]
    return float(gemms + 12 * fields["num_hidden_layers"] * heads * seq_length)


LESS_MEMORY = (
    "out of device memory; give a smaller tp_training.batch_size or tp_training.seq_length, "
    "tp_training.activation_checkpointing=true, a larger tp_size, or fewer layers (model.num_layers)"
)
_MASTER, _ADAM = 4, 8
"""Bytes of a parameter: its float32 weight, and the two moments of the optimizer."""


def least_bytes(point: Mapping[str, Any]) -> float:
    """What training takes of each GPU at the very least, before any activation: weights, gradients and the optimizer's
    state when the step is taken. As Rajbhandari et al. count (arXiv:1910.02054, section 3.1), with what each
    implementation shards over the data-parallel ranks."""
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


_PEAK_TFLOPS: dict[str, tuple[float | None, float, float]] = {
    r"GB[23]00": (2500.0, 2500.0, 80.0),
    r"B[23]00": (2250.0, 2250.0, 75.0),
    r"H[12]00 NVL": (835.5, 835.5, 60.0),
    r"H[18]00 PCIe": (756.0, 756.0, 51.0),
    r"(GH200|H100|H200|H800)": (989.4, 989.4, 66.9),
    r"H20": (148.0, 148.0, 44.0),
    r"A[18]00": (312.0, 312.0, 19.5),
    r"L40S": (362.0, 362.0, 91.6),
    r"L40": (181.0, 181.0, 90.5),
    r"L4": (121.0, 121.0, 30.3),
    r"A10": (125.0, 125.0, 31.2),
    r"V100-PCIE": (None, 112.0, 14.0),
    r"V100": (None, 125.0, 15.7),
    r"MI355X": (2516.6, 2516.6, 157.3),
    r"MI350X": (2306.9, 2306.9, 144.2),
    r"MI3(00|25)X": (1307.4, 1307.4, 163.4),
    r"MI300A": (980.6, 980.6, 122.6),
}
"""In bf16, fp16 and fp32 (of the vector units: no TF32), dense, of one GPU, by a word of its name, the first that fits.
Of NVIDIA's data sheets (Blackwell: HGX B200 and B300, GB200 and GB300; Hopper: H100, H200, H20; Ampere: A100, A10; Ada:
L40S, L40, L4; Volta: V100), whose rates with sparsity are halved, and of AMD's (MI300X, MI325X, MI300A, MI350X,
MI355X). At the boost clock, which a GPU under such load does not hold."""


def peak_tflops(gpu: str | None, precision: str) -> float | None:
    """What the GPU computes at most. `gpu` as torch names it, such as `NVIDIA H100 80GB HBM3`; `precision`: bf16, fp16
    or fp32. None where it is not known."""
    for word, peaks in _PEAK_TFLOPS.items():
        if gpu and re.search(rf"\b{word}\b", gpu):
            return dict(zip(("bf16", "fp16", "fp32"), peaks, strict=True)).get(precision)
    return None
