"""Model sizes, and the shapes of a model's parallel linear operators.

Supported are dense layers: one projection from the hidden state to all heads' queries, keys and values, one back, and
one MLP. FORMS lists which config fields of an architecture have their sizes (tests/overlap/test_model_forms.py checks
them against transformers' models); other architectures are refused. No torch: configs are transformers'.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from overlap_sweep.config import SIZES
from overlap_sweep.errors import UserError
from overlap_sweep.overlap.space import OPERATORS

SIZES_OF = {
    **dict.fromkeys(("qkv", "proj"), ("num_kv_heads", "head_dim")),
    **dict.fromkeys(("fc1", "fc2"), ("ffn_hidden_size", "gated_mlp")),
}
"""Sizes that an operator needs besides those of the whole model."""
HUB_TIMEOUT_S = 1.0
"""Timeout of a request to the Hugging Face hub."""


@dataclass(frozen=True)
class LinearShape:
    """One linear operator `y = x W^T + b` under tensor and sequence parallelism.

    Column parallel: x [tokens / tp, in] is gathered to [tokens, in], W is [out / tp, in], y [tokens, out / tp].
    Row parallel: x is [tokens, in / tp], W [out, in / tp], and y is reduced and scattered to [tokens / tp, out].
    """

    parallel: str
    tokens: int
    in_features: int
    out_features: int
    tp_size: int

    @property
    def weight_shape(self) -> tuple[int, int]:
        if self.parallel == "column":
            return self.out_features // self.tp_size, self.in_features
        return self.out_features, self.in_features // self.tp_size

    @property
    def input_shape(self) -> tuple[int, int]:
        rows = self.tokens // self.tp_size if self.parallel == "column" else self.tokens
        return rows, self.weight_shape[1]

    @property
    def output_shape(self) -> tuple[int, int]:
        rows = self.tokens // self.tp_size if self.parallel == "row" else self.tokens
        return rows, self.weight_shape[0]

    def local(self) -> LinearShape:
        """Returns one rank's GEMMs as an operator without communication."""
        out_features, in_features = self.weight_shape
        return replace(self, in_features=in_features, out_features=out_features, tp_size=1)

    def unsharded(self) -> LinearShape:
        return replace(self, tp_size=1)

    def refusal(self) -> str | None:
        """Returns why these sizes cannot be cut into `tp_size` equal parts, or None."""
        cut = ("outputs", self.out_features) if self.parallel == "column" else ("inputs", self.in_features)
        for dimension, count in (cut, ("tokens", self.tokens)):
            if count % self.tp_size:
                return f"{count} {dimension} are not divisible by tp_size={self.tp_size}"
        return None


def linear_shape(model: Mapping[str, Any], operator: str, tokens: int, tp_size: int) -> LinearShape:
    """Returns the shape of one operator of a resolved model. UserError if the model has no such operator."""
    if lacking := lacks(model, [operator]):
        raise UserError(f"{lacking}.")
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    if operator == "qkv":
        sizes = hidden, (heads + 2 * model["num_kv_heads"]) * model["head_dim"]
    elif operator == "proj":
        sizes = heads * model["head_dim"], hidden
    elif operator == "fc1":
        sizes = hidden, model["ffn_hidden_size"] * (2 if model["gated_mlp"] else 1)
    else:
        sizes = model["ffn_hidden_size"], hidden
    return LinearShape(OPERATORS[operator], tokens, *sizes, tp_size)


def operator_shape(point: Mapping[str, Any], operator: str) -> LinearShape:
    """Returns the shape of one operator of a resolved point. UserError if its model has no such operator."""
    return linear_shape(point["model"], operator, point["workload"]["tokens"], point["tp_size"])


def lacks(model: Mapping[str, Any], operators: Collection[str] = tuple(OPERATORS)) -> str | None:
    """Returns why the resolved model lacks one of these operators and what to do, or None."""
    instead = model.get("instead") or {}
    for operator in operators:
        if operator in instead:
            left = ",".join(name for name in OPERATORS if name not in instead)
            sweep = f"sweep operator={left}, or " if left and len(operators) == 1 else ""
            sizes = " and ".join(f"model.{name}" for name in SIZES_OF[operator])
            return f"{operator}: {instead[operator]}; {sweep}give {sizes}"
    return None


def refusal(model: Mapping[str, Any], operator: str, tokens: int, tp_size: int) -> str | None:
    """Returns why the operator cannot run at this TP size, or None."""
    if lacking := lacks(model, [operator]):
        return lacking
    if operator in ("qkv", "proj") and model["num_attention_heads"] % tp_size:
        return f"{operator}: {model['num_attention_heads']} attention heads are not divisible by tp_size={tp_size}"
    if operator == "qkv" and model["num_kv_heads"] % tp_size:
        return f"qkv: {model['num_kv_heads']} key-value heads are not divisible by tp_size={tp_size}"
    reason = linear_shape(model, operator, tokens, tp_size).refusal()
    return f"{operator}: {reason}" if reason else None


def short_name(model: Mapping[str, Any]) -> str:
    """Returns the model's name without folders."""
    return str(model["name"]).rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]


_OURS = re.compile(r"(llama3|gpt3|qwen3)_([0-9_]+)b")
_FAMILIES = {"llama3": "Llama-3", "gpt3": "GPT-3", "qwen3": "Qwen3"}


def title_of(name: str) -> str:
    """Returns a title such as `Llama-3 8B` for `llama3_8b`; names that are not in conf/model are returned unchanged."""
    ours = _OURS.fullmatch(name)
    return f"{_FAMILIES[ours[1]]} {ours[2].replace('_', '.')}B" if ours else name


def resolve(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model with all sizes, with `source=hf` from its Hugging Face config. UserError if one is missing.

    Sizes of operators that the model lacks are None; `instead` has by operator what the model has instead.
    """
    given = {name: model[name] for name in SIZES if model[name] is not None}
    read, instead = read_hf(str(model["name"])) if model["source"] == "hf" else ({}, {})
    sizes = read | given
    if "qkv" not in instead:
        sizes.setdefault("num_kv_heads", sizes.get("num_attention_heads"))
        if "head_dim" not in sizes and sizes.get("num_attention_heads") and sizes.get("hidden_size"):
            sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    # Sizes that the user gives make the operator dense.
    instead = {operator: has for operator, has in instead.items() if given.keys().isdisjoint(SIZES_OF[operator])}
    unsized = {name for operator in instead for name in SIZES_OF[operator]}
    missing = [name for name in SIZES if sizes.get(name) is None and name not in unsized]
    if missing:
        raise UserError(f"model {model['name']} has no {', '.join(missing)}; give model.{missing[0]}.")
    sizes |= dict.fromkeys(unsized)
    plain = sizes["gated_mlp"] is False
    layer = {"normalization": "LayerNorm" if plain else "RMSNorm", "bias": plain, **sizes}
    layer |= {name: model[name] for name in ("normalization", "bias") if model.get(name) is not None}
    return {**model, **layer, **({"instead": instead} if instead else {})}


def read_hf(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns `sizes_of` for the config of this name."""
    return sizes_of(_read_hf_config(name), name)


def read_hf_fields(name: str) -> dict[str, Any]:
    """Returns `fields_of` the config of this name."""
    return fields_of(_read_hf_config(name))


def fields_of(config: Any) -> dict[str, Any]:
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


def _read_hf_config(name: str) -> Any:
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


_LLAMA = Form()
_GPT = Form(kv_heads="", head_dim="", ffn="n_inner", gated=False, normalization="LayerNorm")
_MIXTURE = Form(mlp="experts")
_LATENT = Form(attention="multi-head latent attention")
_LINEAR = Form(attention="linear attention in some layers")
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
    (
        _MIXTURE,
        "aria_text dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4v_moe_text gpt_oss granitemoe "
        "granitemoeshared hunyuan_v1_moe hy_v3 kolibri1 llama4_text mellum minimax_m2 mixtral olmoe qwen2_moe "
        "qwen3_moe qwen3_vl_moe_text solar_open",
    ),
    (replace(_MIXTURE, normalization="LayerNorm"), "cohere2_moe phimoe"),
    (_LATENT, "minicpm3 youtu"),
    (replace(_LATENT, mlp="experts"), "axk1 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa"),
    (_LINEAR, "olmo_hybrid qwen3_5_text"),
    (replace(_LINEAR, mlp="experts"), "qwen3_5_moe_text qwen3_next"),
)
FORMS = {name: form for form, names in _NAMES for name in names.split()}
"""Forms by transformers' model_type."""


def sizes_of(config: Any, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a language model's sizes and normalization from its config, without the sizes of operators that it lacks,
    and by such operator what it has instead. UserError for an unsupported architecture."""
    form = _form_of(config.model_type)
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
    else:
        sizes["ffn_hidden_size"] = getattr(config, form.ffn, None) or 4 * config.hidden_size
        sizes["gated_mlp"] = form.gated
    return sizes, {operator: f"{config.model_type} has {has}" for operator, has in instead.items()}
