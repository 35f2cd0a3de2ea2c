"""The model architectures that can be trained: what must be known of each to build it and to cut it over the ranks.
Adding one is adding its line to ARCHITECTURES.

No torch: the launcher reads them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Architecture:
    """The defaults are Llama's, which most decoders follow. Names of modules are relative to a decoder layer."""

    column_parallel: tuple[str, ...] = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    """Their outputs are cut: heads, columns of the MLP."""
    row_parallel: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    """Their inputs are cut, and their outputs summed over the ranks."""
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms of the residual stream."""
    head_norms: tuple[str, ...] = ()
    """Norms within each head: every rank has the whole weight and sees its own heads, so that gradients are summed."""
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    rotary: str = "model.rotary_emb"
    output: str = "lm_head"
    qkv_bias: bool = False
    megatron: bool = False
    """Megatron-Core's model, as `megatron_model` configures it, computes what Hugging Face's does: in
    tests/workloads/tp_training/test_megatron_architectures.py it is held to that. impl=megatron refuses all others."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its Hugging Face config, where no config.json gives them."""

    def build(self, language_model: Mapping[str, Any], attn_impl: str) -> nn.Module:
        """The whole model in float32 on the current default device (also `meta`), as AutoModelForCausalLM makes it;
        its parameters hold nothing of use yet. `language_model` is the point's."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**language_model)
        config.use_cache = False
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attn_impl)
        return model.float()


ARCHITECTURES = {
    # Llama 1 to 3.
    "llama": Architecture(megatron=True),
    # With or without its sliding window.
    "mistral": Architecture(megatron=True, more={"sliding_window": None}),
    # Also 2.5: Llama with biases in its attention.
    "qwen2": Architecture(qkv_bias=True, megatron=True),
    # Queries and keys are normalised within each head.
    "qwen3": Architecture(head_norms=("self_attn.q_norm", "self_attn.k_norm"), megatron=True),
}
"""By Hugging Face's model_type, which decides config class and model class."""


def architecture(model_type: str) -> Architecture:
    """UserError for one that there is not."""
    if model_type not in ARCHITECTURES:
        raise UserError(
            f"model.architecture={model_type} cannot be trained; choose one of {', '.join(sorted(ARCHITECTURES))}, or "
            "add it (docs/tp_training.md)."
        )
    return ARCHITECTURES[model_type]
