"""Which architectures have the layers that are swept, and what their configs call the sizes of those.

Swept is the dense form: in every layer one projection from the hidden state to all heads' queries, keys and values, one
back, and one MLP. What an architecture has of that and in which fields, tests/overlap/test_model_forms.py holds to
transformers' own models. What is on no list here is refused. No torch: configs are transformers'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from overlap_sweep.errors import UserError

Size = Callable[[Any], int]
"""From a config."""


def _kv_heads(config: Any) -> int:
    return int(config.num_key_value_heads or config.num_attention_heads)


def _heads(config: Any) -> int:
    return int(config.num_attention_heads)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or _even(config))


def _even(config: Any) -> int:
    return int(config.hidden_size // config.num_attention_heads)


def _intermediate(config: Any) -> int:
    return int(config.intermediate_size)


def _inner(config: Any) -> int:
    return int(config.n_inner or 4 * config.hidden_size)


def _four_times(config: Any) -> int:
    return int(4 * config.hidden_size)


@dataclass(frozen=True)
class Form:
    """How one architecture is sized. The defaults are Llama's."""

    kv_heads: Size = _kv_heads
    head_dim: Size = _head_dim
    ffn: Size = _intermediate
    gated: bool = True
    normalization: str = "RMSNorm"
    attention: str | None = None
    """What it has instead of dense attention."""
    mlp: Callable[[Any], str] | None = None
    """What it has instead of one dense MLP."""


def _experts(config: Any) -> str:
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = next((value for name in names if isinstance(value := getattr(config, name, None), int)), "several")
    columns = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    return f"{count} experts" + (f" of {columns} columns" if isinstance(columns, int) else "")


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else _heads(config)


_LLAMA = Form()
_COHERE = Form(normalization="LayerNorm")
_APERTUS = Form(gated=False)
_PHI = Form(gated=False, normalization="LayerNorm")
_GPT = Form(kv_heads=_heads, head_dim=_even, ffn=_inner, gated=False, normalization="LayerNorm")
_BERT = replace(_GPT, ffn=_intermediate)
_MIXTURE = Form(mlp=_experts)
_LATENT = Form(attention="multi-head latent attention")
_LINEAR = Form(attention="linear attention in some layers")

FORMS: dict[str, Form] = {
    **dict.fromkeys(
        [
            *("bitnet", "cwm", "diffllama", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text"),
            *("glm", "glm4", "granite", "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder"),
            *("llama", "ministral", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3"),
            *("qwen3_vl_text", "seed_oss", "smollm3", "vaultgemma"),
        ],
        _LLAMA,
    ),
    **dict.fromkeys(["glm4v_text", "qwen2_vl_text", "qwen2_5_vl_text"], replace(_LLAMA, head_dim=_even)),
    **dict.fromkeys(["cohere", "cohere2", "olmo"], _COHERE),
    "stablelm": replace(_COHERE, head_dim=_even),
    **dict.fromkeys(["apertus", "arcee", "nanochat"], _APERTUS),
    **dict.fromkeys(["jais2", "nemotron", "phi", "starcoder2"], _PHI),
    **dict.fromkeys(["codegen", "gpt2", "gptj"], _GPT),
    **dict.fromkeys(["bloom", "mpt", "openai-gpt"], replace(_GPT, ffn=_four_times)),
    **dict.fromkeys(
        [
            *("bert", "bert-generation", "big_bird", "biogpt", "camembert", "data2vec-text", "electra", "ernie"),
            *("gpt_neox", "megatron-bert", "persimmon", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
            *("roformer", "xlm-roberta", "xlm-roberta-xl"),
        ],
        _BERT,
    ),
    "ctrl": replace(_GPT, ffn=lambda config: int(config.dff)),
    "falcon": replace(_GPT, kv_heads=_falcon_kv_heads, ffn=lambda config: int(config.ffn_hidden_size)),
    "gpt_bigcode": replace(_GPT, kv_heads=lambda config: 1 if config.multi_query else _heads(config)),
    "gpt_neo": replace(_GPT, ffn=lambda config: int(config.intermediate_size or _four_times(config))),
    **dict.fromkeys(["opt", "xglm"], replace(_GPT, ffn=lambda config: int(config.ffn_dim))),
    **dict.fromkeys(
        [
            *("aria_text", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe"),
            *("glm4v_moe_text", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kolibri1"),
            *("llama4_text", "mellum", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"),
            "solar_open",
        ],
        _MIXTURE,
    ),
    **dict.fromkeys(["cohere2_moe", "phimoe"], replace(_MIXTURE, normalization="LayerNorm")),
    **dict.fromkeys(["minicpm3", "youtu"], _LATENT),
    **dict.fromkeys(
        ["axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"],
        replace(_LATENT, mlp=_experts),
    ),
    **dict.fromkeys(["olmo_hybrid", "qwen3_5_text"], _LINEAR),
    **dict.fromkeys(["qwen3_5_moe_text", "qwen3_next"], replace(_LINEAR, mlp=_experts)),
}
"""By transformers' model_type."""


def sizes_of(config: Any, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The sizes and the normalization of a language model by its config, without the sizes of operators that it lacks;
    and by such an operator what it has instead. UserError for an architecture that is on no list."""
    form = FORMS.get(config.model_type)
    if form is None or getattr(config, "add_cross_attention", False):
        also = "" if form is None else " with cross-attention"
        raise UserError(
            f"model.name={name} is a {config.model_type}{also}, which is not known to have the layers that are swept; "
            "give sizes instead of a config: model.source=sizes model.hidden_size=... (see conf/model)."
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
        sizes |= {"num_kv_heads": form.kv_heads(config), "head_dim": form.head_dim(config)}
    if form.mlp:
        instead |= dict.fromkeys(("fc1", "fc2"), f"{form.mlp(config)} instead of one dense MLP")
    else:
        sizes |= {"ffn_hidden_size": form.ffn(config), "gated_mlp": form.gated}
    return sizes, {operator: f"{config.model_type} has {has}" for operator, has in instead.items()}
