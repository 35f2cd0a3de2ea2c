"""Reads the sizes of each architecture from the config fields that have them.

tests/overlap/test_model_forms.py checks them against transformers' own models. Architectures that neither FORMS lists
nor another package registers are refused. No torch: configs are transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
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
    """Fields of the dense MLP's size, the first that is set; if none is, four times the hidden size."""
    gated: bool = True
    normalization: str = "RMSNorm"
    attention: str = ""
    """The architecture's replacement of dense attention, such as latent attention; empty if it has none."""
    expert: str = ""
    """Field of the size of one expert; empty if the architecture has none."""
    dense: str = ""
    """Field that says which layers have a dense MLP instead of experts; empty if all have experts."""
    num_shared: str = ""
    """Field of the number of shared experts, each as wide as the others; empty if it has none."""
    shared: str = ""
    """Field of the width of all shared experts together, if they are not counted; empty if it has none."""


_LLAMA = Form()
_GPT = Form(kv_heads="", head_dim="", ffn="n_inner", gated=False, normalization="LayerNorm")
LATENT = "multi-head latent attention"
EXPERTS = "experts instead of one dense MLP"
INSTEAD_OF_QKV = "instead of one projection to queries, keys and values"
_LATENT = Form(attention=LATENT)
_LINEAR = Form(attention="linear attention in some layers")
_MIXTURE = Form(expert="moe_intermediate_size")
_STEPS = replace(_MIXTURE, dense="mlp_only_layers")
_COUNTED = replace(_MIXTURE, num_shared="n_shared_experts", dense="first_k_dense_replace")
_LISTED = replace(_COUNTED, dense="mlp_layer_types")
_SHARED = replace(_MIXTURE, shared="shared_expert_intermediate_size")
_WIDE = Form(expert="intermediate_size")
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
    (_STEPS, "qwen3_moe qwen3_vl_moe_text"),
    (replace(_MIXTURE, dense="mlp_layer_types"), "mellum"),
    (_COUNTED, "dots1 glm4_moe glm4v_moe_text"),
    (replace(_COUNTED, dense=""), "solar_open"),
    (replace(_LISTED, num_shared="num_shared_experts"), "exaone_moe hy_v3"),
    (replace(_COUNTED, num_shared="moe_num_shared_experts", dense="moe_layer_interval"), "ernie4_5_moe"),
    (_SHARED, "kolibri1"),
    (replace(_STEPS, shared=_SHARED.shared), "flint qwen2_moe"),
    (_WIDE, "flex_olmo gpt_oss granitemoe minimax_m2 mixtral olmoe"),
    (replace(_WIDE, num_shared="moe_num_shared_experts"), "aria_text"),
    (replace(_WIDE, shared="shared_intermediate_size"), "granitemoeshared"),
    (replace(_WIDE, shared="intermediate_size"), "hunyuan_v1_moe"),
    (replace(_WIDE, shared="intermediate_size", ffn="intermediate_size_mlp", dense="moe_layers"), "llama4_text"),
    (replace(_WIDE, normalization="LayerNorm"), "phimoe"),
    (
        replace(
            _WIDE,
            ffn="prefix_dense_intermediate_size intermediate_size",
            normalization="LayerNorm",
            num_shared="num_shared_experts",
            dense="mlp_layer_types",
        ),
        "cohere2_moe",
    ),
    (_LATENT, "minicpm3 youtu"),
    (replace(_COUNTED, attention=LATENT), "deepseek_v2 deepseek_v3"),
    (replace(_LISTED, attention=LATENT), "axk1 deepseek_v32 glm4_moe_lite glm_moe_dsa"),
    (_LINEAR, "olmo_hybrid qwen3_5_text"),
    (replace(_SHARED, attention=_LINEAR.attention), "qwen3_5_moe_text"),
    (replace(_STEPS, shared=_SHARED.shared, attention=_LINEAR.attention), "qwen3_next"),
)
FORMS = {name: form for form, names in _NAMES for name in names.split()}
"""Forms by transformers' model_type."""


ARCHITECTURES_GROUP = "overlap_sweep.architectures"
"""Entry point group for architectures of other packages, which tp_training trains: a name is a model_type."""


@cache
def registered_architectures() -> dict[str, EntryPoint]:
    """Returns the entry points of other packages' architectures, by model_type."""
    return {entry.name: entry for entry in entry_points(group=ARCHITECTURES_GROUP)}


@cache
def load_architecture(model_type: str) -> Any:
    """Returns another package's architecture, which is registered. Its package may make its model known to transformers
    when it is imported. UserError if it cannot be."""
    entry = registered_architectures()[model_type]
    try:
        return entry.load()
    except Exception as error:
        # Importing another package's code can raise anything.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"model.architecture={model_type} cannot be loaded from {entry.value} ({reason}); fix or uninstall that "
            "package."
        ) from error


def _form_of(model_type: str) -> Form | None:
    if model_type in FORMS or model_type not in registered_architectures():
        return FORMS.get(model_type)
    form: Form | None = getattr(load_architecture(model_type), "form", None)
    return form


def sizes_of(config: Any, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a language model's sizes and normalization from its config, without the sizes of operators that it lacks,
    and by such operator what it has instead. `layers` is among the sizes if not all layers are dense.

    UserError for an unsupported architecture.
    """
    form = _form_of(config.model_type)
    if form is None or getattr(config, "add_cross_attention", False):
        also = "" if form is None else " with cross-attention"
        raise UserError(
            f"model.name={name}: the architecture {config.model_type}{also} is not supported; "
            "give sizes instead: model.source=sizes model.hidden_size=<size> and so on (see conf/model)."
        )
    number = config.num_hidden_layers
    dense = _dense_mlps(config, form) if form.expert else number
    sizes = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": number,
        "normalization": form.normalization,
    }
    instead: dict[str, str] = {}
    if form.attention == LATENT:
        instead["qkv"] = f"{LATENT} {INSTEAD_OF_QKV}"
        sizes |= {ours: getattr(config, theirs) for ours, theirs in _LATENT_FIELDS.items()}
    elif form.attention:
        instead |= dict.fromkeys(("qkv", "proj"), f"{form.attention} {INSTEAD_OF_QKV}")
    else:
        heads, even = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        sizes["num_kv_heads"] = getattr(config, form.kv_heads, None) or heads
        sizes["head_dim"] = getattr(config, form.head_dim, None) or even
    if dense:
        sizes["ffn_hidden_size"] = _first(config, *form.ffn.split()) or 4 * config.hidden_size
        sizes["gated_mlp"] = form.gated
    else:
        instead |= dict.fromkeys(("fc1", "fc2"), EXPERTS)
    if dense < number:
        sizes |= {**_experts_of(config, form), "num_dense_layers": dense}
    if instead or dense < number:
        shared = sizes.get("shared_expert_ffn_hidden_size")
        sizes["layers"] = {"number": number, "dense_mlp": dense, "shared_expert": shared}
    return sizes, {operator: f"{config.model_type} has {has}" for operator, has in instead.items()}


_LATENT_FIELDS = {
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Fields of latent attention by our names, which are Megatron-Core's."""


def _dense_mlps(config: Any, form: Form) -> int:
    """Returns how many layers of a mixture have a dense MLP."""
    number = int(config.num_hidden_layers)
    layers = range(number)
    match form.dense:
        case "mlp_layer_types":
            return list(config.mlp_layer_types).count("dense")
        case "first_k_dense_replace":
            return min(config.first_k_dense_replace or 0, number)
        case "moe_layers":
            return number - len(set(config.moe_layers) & {*layers})
        case "mlp_only_layers":
            step, only = config.decoder_sparse_step, config.mlp_only_layers
            return sum(layer in only or (layer + 1) % step != 0 for layer in layers)
        case "moe_layer_interval":
            mixed = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
            return sum(layer not in mixed or (layer + 1) % config.moe_layer_interval != 0 for layer in layers)
    return 0


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
