"""Whether Megatron-Core's GPTModel, as `megatron` builds it, computes what a Hugging Face config says. No torch: the
launcher asks before processes start.

What it computes is listed, not what it doesn't: a field of a config that is not known here is refused, since it may
change the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from overlap_sweep.workloads.tp_training.language_model import ARCHITECTURES, Architecture, architecture

_CONFIGURED = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "rope_parameters"),
    "initializer_range",
}
"""Fields that the model is built by, or its weights are drawn by."""
_OF_WINDOW = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
"""Fields of sliding windows, which are refused where they would be narrower than the sequence."""
_NO_DIFFERENCE = {"max_position_embeddings", "original_max_position_embeddings", "max_length", "rope_scaling"}
"""Fields without effect on the default rotary embedding; transformers has moved `rope_scaling` to rope_parameters."""
_ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)}
"""Values that Megatron-Core is configured for. A missing bias is none."""
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_ROPE = {"rope_type": "default", "partial_rotary_factor": 1.0}
_LLAMA = Architecture()
_FORM = ("column_parallel", "row_parallel", "layer_norms")
"""Fields of an Architecture in which GPTModel is Llama's."""
_HEAD_NORMS = ((), ("self_attn.q_norm", "self_attn.k_norm"))


def refusals(model: Mapping[str, Any], seq_length: int) -> Iterator[tuple[Any, str]]:
    """Yields pairs of a condition under which Megatron-Core would train the model as another one, and what differs.
    `model`: the fields of its config."""
    model_type = model["model_type"]
    of = architecture(model_type)
    same = ", ".join(name for name, one in sorted(ARCHITECTURES.items()) if one.megatron)
    yield not of.megatron, f"impl=megatron supports the architectures {same}, not {model_type}"
    differs = [name for name in _FORM if getattr(of, name) != getattr(_LLAMA, name)]
    differs += ["head_norms"] if of.head_norms not in _HEAD_NORMS else []
    for name in differs:
        yield True, f"impl=megatron has Llama's layers; those of {model_type} have {name}={_listed(getattr(of, name))}"
    yield from _field_refusals(model)
    window = model.get("sliding_window") if model.get("use_sliding_window", True) else None
    reason = f"impl=megatron has no sliding window; the model's sliding_window={window} is shorter than the sequence"
    yield window is not None and window < seq_length, reason


def _field_refusals(model: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    for name, value in model["rope_parameters"].items():
        only = _ROPE.get(name, value)
        known = name in ("rope_theta", *_ROPE, *_NO_DIFFERENCE)
        reason = f"impl=megatron supports only the default rotary embedding; the model's has {name}={value}"
        yield not known or value != only, reason
    for name, values in _ONLY.items():
        own = model.get(name, values[0])
        yield own not in values, f"impl=megatron supports only {name}={values[0]}; the model has {name}={own}"
    types = set(model.get("layer_types") or ()) - _LAYER_TYPES
    yield types, f"impl=megatron supports only full attention; the model has layer_types={_listed(sorted(types))}"
    yield "rms_norm_eps" not in model, "impl=megatron normalises by RMSNorm; the model's config has no rms_norm_eps"
    for name in sorted(model.keys() - {*_CONFIGURED, *_OF_WINDOW, *_NO_DIFFERENCE, *_ONLY}):
        # What is switched off changes nothing.
        off = model[name] is None or model[name] is False
        reason = f"impl=megatron does not compute {name}={model[name]} of the model's config; use another impl"
        yield not off, reason


def _listed(names: Any) -> str:
    return ",".join(names) or "none"
