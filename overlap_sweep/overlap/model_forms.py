"""Reads a model's sizes: of its options, or by architecture from the fields of its Hugging Face config.

tests/overlap/test_model_forms.py checks them against transformers' own models. Architectures that neither FORMS lists
nor another package registers are refused. No torch: configs are transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.config import OF_LATENT_ATTENTION, SIZES, Model, ModelLayers, ResolvedModel
from overlap_sweep.errors import UserError
from overlap_sweep.overlap.models import SIZES_OF

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

HUB_TIMEOUT_S = 1.0


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


def resolve(model: Model) -> ResolvedModel:
    """Returns the model with all sizes, with `source=hf` from its Hugging Face config. UserError if one is missing.

    Sizes of operators that the model lacks are None; `instead` has by operator what the model has instead. `layers` is
    None if all layers are dense.
    """
    given: dict[str, Any] = {name: value for name, value in vars(model).items() if value is not None}
    read = sizes_of(read_hf_config(model.name), model.name) if model.source == "hf" else _not_dense(model)
    found = replace(read, **given)
    if "qkv" not in read.instead:
        found.num_kv_heads = found.num_kv_heads or found.num_attention_heads
        if found.head_dim is None and found.num_attention_heads and found.hidden_size:
            found.head_dim = found.hidden_size // found.num_attention_heads
    # Sizes that the user gives make the operator dense.
    found.instead = {name: has for name, has in read.instead.items() if given.keys().isdisjoint(SIZES_OF[name])}
    if found.layers and not model.num_dense_layers and not given.keys().isdisjoint(SIZES_OF["fc1"]):
        found.layers = replace(found.layers, dense_mlp=found.layers.number)
    unsized = {name for operator in found.instead for name in SIZES_OF[operator]}
    latent_sizes = [name for name in OF_LATENT_ATTENTION if name != "q_lora_rank"] if found.kv_lora_rank else []
    needed = [name for name in (*SIZES, *latent_sizes) if name not in unsized]
    missing = [name for name in needed if getattr(found, name) is None]
    if missing:
        raise UserError(f"model {model.name} has no {', '.join(missing)}; give model.{missing[0]}.")
    for name in unsized:
        setattr(found, name, None)
    plain = found.gated_mlp is False
    found.normalization = found.normalization or ("LayerNorm" if plain else "RMSNorm")
    found.bias = plain if found.bias is None else found.bias
    return found


def _not_dense(model: Model) -> ResolvedModel:
    """Returns what follows from the given sizes of a model's experts and latent attention, as `sizes_of`."""
    has_experts, is_latent = bool(model.num_experts), bool(model.kv_lora_rank)
    instead = {"qkv": f"{LATENT} {INSTEAD_OF_QKV}"} if is_latent else {}
    if has_experts and not model.num_dense_layers:
        instead |= dict.fromkeys(("fc1", "fc2"), EXPERTS)
    number = model.num_layers
    dense = model.num_dense_layers or 0 if has_experts else number
    return ResolvedModel(
        name=model.name,
        gated_experts=True if has_experts else None,
        layers=ModelLayers(number, dense, model.shared_expert_ffn_hidden_size) if has_experts or is_latent else None,
        instead={operator: f"{model.name} has {has}" for operator, has in instead.items()},
    )


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields of a language model's config that differ from every config's defaults, without dropout and
    those that change neither weights nor computation."""
    fields = {**config.to_diff_dict(), "model_type": config.model_type}
    always = ("num_hidden_layers", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_parameters")
    fields |= {name: value for name in always if (value := getattr(config, name, None)) is not None}
    # Weights are random, so it does not matter how the checkpoint stores them.
    stored = ("dtype", "torch_dtype", "quantization_config", "pretraining_tp")
    idle = (*stored, "architectures", "transformers_version", "use_cache", "_name_or_path", "auto_map")
    return {
        name: value
        for name, value in fields.items()
        if name not in idle and not name.endswith(("_token_id", "_dropout", "_pdrop"))
    }


def read_hf_config(name: str) -> PreTrainedConfig:
    """Returns the config from a local folder, a config.json, the local Hugging Face cache, or the hub, in this order.

    Without a network it fails within seconds; transformers would retry for 23.
    """
    source = _find_hf_config(name)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedConfig

    try:
        model_type = PreTrainedConfig.get_config_dict(source)[0].get("model_type")
        if model_type in registered_architectures():
            load_architecture(model_type)
        # By default transformers offers to run code that a config names.
        return AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        lines = str(error).strip().splitlines()
        # The first line names the validator.
        reason = lines[-1].strip() if isinstance(error, StrictDataclassError) else lines[0]
        raise UserError(
            f"model.name={name} is not a config that transformers knows ({reason}); give its sizes."
        ) from None


def _find_hf_config(name: str) -> str:
    path = Path(name).expanduser()
    if path.exists():
        if path.is_dir() and not (path / "config.json").exists():
            raise UserError(f"model.name={name} is a folder without a config.json; give a folder with one.")
        return str(path)
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise UserError(f"model.name={name} does not exist; give a folder, a config.json or a Hugging Face name.")
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise UserError(f"model.name={name} is neither a path nor a Hugging Face name, such as owner/model.") from None
    if isinstance(cached, str):
        return cached
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        # The hub answered; transformers reports what is wrong.
        return name
    except Exception as error:
        # The type depends on the HTTP client of the installed huggingface_hub.
        raise UserError(
            f"model.name={name} is not in the local cache and the hub cannot be reached ({error}); "
            "give a local folder, a config.json, or the sizes (model.hidden_size and so on)."
        ) from None
    return name


def sizes_of(config: PreTrainedConfig, name: str) -> ResolvedModel:
    """Returns a language model's sizes and normalization from its config, without the sizes of operators that it lacks.

    UserError for an unsupported architecture.
    """
    form: Form | None = FORMS.get(config.model_type)
    if form is None and config.model_type in registered_architectures():
        form = getattr(load_architecture(config.model_type), "form", None)
    if form is None or getattr(config, "add_cross_attention", False):
        also = "" if form is None else " with cross-attention"
        raise UserError(
            f"model.name={name}: the architecture {config.model_type}{also} is not supported; "
            "give sizes instead: model.source=sizes model.hidden_size=<size> and so on (see conf/model)."
        )
    number = config.num_hidden_layers
    dense = _dense_mlps(config, form) if form.expert else number
    model = ResolvedModel(
        name=name,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_layers=number,
        normalization=form.normalization,
    )
    instead: dict[str, str] = {}
    if form.attention == LATENT:
        instead["qkv"] = f"{LATENT} {INSTEAD_OF_QKV}"
        for ours, theirs in _LATENT_FIELDS.items():
            setattr(model, ours, getattr(config, theirs))
    elif form.attention:
        instead |= dict.fromkeys(("qkv", "proj"), f"{form.attention} {INSTEAD_OF_QKV}")
    else:
        heads, even = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        model.num_kv_heads = getattr(config, form.kv_heads, None) or heads
        model.head_dim = getattr(config, form.head_dim, None) or even
    if dense:
        model.ffn_hidden_size = _first(config, *form.ffn.split()) or 4 * config.hidden_size
        model.gated_mlp = form.gated
    else:
        instead |= dict.fromkeys(("fc1", "fc2"), EXPERTS)
    if dense < number:
        _add_experts(model, config, form)
        model.num_dense_layers = dense
    if instead or dense < number:
        model.layers = ModelLayers(number, dense, model.shared_expert_ffn_hidden_size)
    model.instead = {operator: f"{config.model_type} has {has}" for operator, has in instead.items()}
    return model


_LATENT_FIELDS = {
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Fields of latent attention by our names, which are Megatron-Core's."""


def _dense_mlps(config: PreTrainedConfig, form: Form) -> int:
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


def _add_experts(model: ResolvedModel, config: PreTrainedConfig, form: Form) -> None:
    width = getattr(config, form.expert)
    num_shared = getattr(config, form.num_shared, None) or 0
    model.num_experts = _first(config, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    model.experts_per_token = _first(config, "num_experts_per_tok", "moe_topk", "moe_k")
    model.expert_ffn_hidden_size = width
    model.shared_expert_ffn_hidden_size = getattr(config, form.shared, None) or num_shared * width or None
    model.gated_experts = True


def _first(config: PreTrainedConfig, *fields: str) -> int | None:
    return next((value for field in fields if (value := getattr(config, field, None)) is not None), None)
