"""Which config fields of each architecture have its sizes.

tests/overlap/test_model_forms.py checks them against transformers' own models. Architectures that FORMS does not list
are refused. No torch: configs are transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from overlap_sweep.errors import UserError


@dataclass(frozen=True)
class Form:
    """The config fields that have an architecture's sizes. The defaults are Llama's."""

    kv_heads: str = "num_key_value_heads"
    """Field of the number of key-value heads; if missing, as many as attention heads."""
    head_dim: str = "head_dim"
    """Field of the head size; if missing, hidden size / number of heads."""
    ffn: str = "intermediate_size"
    """Field of the MLP's size; if missing, four times the hidden size."""
    gated: bool = True
    normalization: str = "RMSNorm"
    attention: str = ""
    """The architecture's replacement of dense attention, such as latent attention; empty if it has none."""
    mlp: str = ""
    """The architecture's replacement of one dense MLP, such as experts; empty if it has none."""
    expert: str = "moe_intermediate_size"
    """Field of the size of one expert."""
    num_shared: str = ""
    """Field of the number of shared experts, each as wide as the others; empty if it has none."""
    shared: str = ""
    """Field of the width of all shared experts together, if they are not counted; empty if it has none."""


_LLAMA = Form()
_GPT = Form(kv_heads="", head_dim="", ffn="n_inner", gated=False, normalization="LayerNorm")
_LATENT = Form(attention="multi-head latent attention")
_LINEAR = Form(attention="linear attention in some layers")
_MIXTURE = Form(mlp="experts")
_COUNTED = replace(_MIXTURE, num_shared="n_shared_experts")
_SHARED = replace(_MIXTURE, shared="shared_expert_intermediate_size")
_WIDE = replace(_MIXTURE, expert="intermediate_size")
_NAMES = (
    (
        _LLAMA,
        "bitnet cwm diffllama ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 granite hunyuan_v1_dense hyperclovax "
        "internlm3 iquestcoder llama ministral ministral3 mistral olmo2 olmo3 phi3 qwen2 qwen3 qwen3_vl_text seed_oss "
        "smollm3 vaultgemma",
    ),
    (replace(_LLAMA, head_dim=""), "glm4v_text qwen2_vl_text qwen2_5_vl_text"),
    (replace(_LLAMA, normalization="LayerNorm"), "cohere cohere2 olmo"),
    (replace(_LLAMA, gated=False), "apertus arcee nanochat"),
    (replace(_LLAMA, gated=False, normalization="LayerNorm"), "jais2 nemotron phi starcoder2"),
    (_GPT, "codegen gpt2 gptj"),
    (replace(_GPT, ffn=""), "bloom mpt openai-gpt"),
    (replace(_GPT, ffn="intermediate_size"), "gpt_neo gpt_neox persimmon"),
    (replace(_GPT, ffn="ffn_dim"), "opt xglm"),
    (_MIXTURE, "mellum qwen3_moe qwen3_vl_moe_text"),
    (_COUNTED, "dots1 glm4_moe glm4v_moe_text solar_open"),
    (replace(_COUNTED, num_shared="num_shared_experts"), "exaone_moe hy_v3"),
    (replace(_COUNTED, num_shared="moe_num_shared_experts"), "ernie4_5_moe"),
    (_SHARED, "flint kolibri1 qwen2_moe"),
    (_WIDE, "flex_olmo gpt_oss granitemoe minimax_m2 mixtral olmoe"),
    (replace(_WIDE, num_shared="moe_num_shared_experts"), "aria_text"),
    (replace(_WIDE, shared="shared_intermediate_size"), "granitemoeshared"),
    (replace(_WIDE, shared="intermediate_size"), "hunyuan_v1_moe llama4_text"),
    (replace(_WIDE, normalization="LayerNorm"), "phimoe"),
    (replace(_WIDE, normalization="LayerNorm", num_shared="num_shared_experts"), "cohere2_moe"),
    (_LATENT, "minicpm3 youtu"),
    (
        replace(_COUNTED, attention=_LATENT.attention),
        "axk1 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa",
    ),
    (_LINEAR, "olmo_hybrid qwen3_5_text"),
    (replace(_SHARED, attention=_LINEAR.attention), "qwen3_5_moe_text qwen3_next"),
)
FORMS = {name: form for form, names in _NAMES for name in names.split()}
"""Forms by transformers' model_type."""


def sizes_of(config: Any, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a language model's sizes and normalization from its config, without the sizes of operators that it lacks,
    and by such operator what it has instead. UserError for an unsupported architecture."""
    form = FORMS.get(config.model_type)
    if form is None or getattr(config, "add_cross_attention", False):
        also = "" if form is None else " with cross-attention"
        raise UserError(
            f"model.name={name}: the architecture {config.model_type}{also} is not supported; "
            "give sizes instead: model.source=sizes model.hidden_size=<size> and so on (see conf/model)."
        )
    sizes = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "normalization": form.normalization,
    }
    instead: dict[str, str] = {}
    if form.attention:
        attention = f"{form.attention} instead of one projection to queries, keys and values"
        instead |= dict.fromkeys(("qkv", "proj"), attention)
    else:
        heads, even = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        sizes["num_kv_heads"] = getattr(config, form.kv_heads, None) or heads
        sizes["head_dim"] = getattr(config, form.head_dim, None) or even
    if form.mlp:
        instead |= dict.fromkeys(("fc1", "fc2"), f"{form.mlp} instead of one dense MLP")
        sizes |= _experts_of(config, form)
    else:
        sizes["ffn_hidden_size"] = getattr(config, form.ffn, None) or 4 * config.hidden_size
        sizes["gated_mlp"] = form.gated
    return sizes, {operator: f"{config.model_type} has {has}" for operator, has in instead.items()}


def _experts_of(config: Any, form: Form) -> dict[str, Any]:
    """Returns the sizes of a mixture's experts."""
    width = getattr(config, form.expert)
    num_shared = getattr(config, form.num_shared, None) or 0
    return {
        "num_experts": _first(config, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
        "experts_per_token": _first(config, "num_experts_per_tok", "moe_topk", "moe_k"),
        "expert_ffn_hidden_size": width,
        "shared_expert_ffn_hidden_size": getattr(config, form.shared, None) or num_shared * width or None,
        "gated_experts": True,
    }


def _first(config: Any, *fields: str) -> Any:
    """Returns the value of the first of these fields that the config has; None if it has none of them."""
    return next((value for field in fields if (value := getattr(config, field, None)) is not None), None)
