"""A causal language model as the fields of its Hugging Face config, and how much there is in it to hold and compute."""

from __future__ import annotations

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
