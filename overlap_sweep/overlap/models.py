"""Model sizes, and the shapes of a model's parallel linear operators.

Supported are dense layers: one projection from the hidden state to all heads' queries, keys and values, one back, and
one MLP. `model_forms` says which config fields of an architecture have their sizes. No torch: configs are
transformers'.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overlap_sweep.config import OF_EXPERTS, OF_LATENT_ATTENTION, SIZES
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import model_forms
from overlap_sweep.overlap.model_forms import EXPERTS, INSTEAD_OF_QKV, LATENT, sizes_of
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


def mixed(model: Mapping[str, Any]) -> str | None:
    """Returns in how many of its layers the resolved model has experts next to dense ones, in a sentence, or None."""
    layers = model.get("layers") or {}
    if not layers.get("dense_mlp") or layers["dense_mlp"] == layers["number"]:
        return None
    others = f"{layers['number'] - layers['dense_mlp']} of {layers['number']}" if layers["number"] else "other"
    return f"{model['name']} has experts in {others} layers; give model.ffn_hidden_size to make all layers dense"


def linear_shape(model: Mapping[str, Any], operator: str, tokens: int, tp_size: int) -> LinearShape:
    """Returns the shape of one operator of a resolved model. UserError if the model has no such operator."""
    if lacking := lacks(model, [operator]):
        raise UserError(f"{lacking}.")
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    if operator == "qkv":
        sizes = hidden, (heads + 2 * model["num_kv_heads"]) * model["head_dim"]
    elif operator == "proj":
        # Given, the head's width makes latent attention a dense one.
        sizes = heads * (model.get("head_dim") or model["v_head_dim"]), hidden
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
    if operator == "qkv":
        heads, kv_heads = model["num_attention_heads"], model["num_kv_heads"]
        if heads % kv_heads:
            return f"qkv: {heads} attention heads are not divisible by {kv_heads} key-value heads"
        if kv_heads % tp_size:
            return f"qkv: {kv_heads} key-value heads are not divisible by tp_size={tp_size}"
    reason = linear_shape(model, operator, tokens, tp_size).refusal()
    if not reason and operator == "fc1" and model["ffn_hidden_size"] % tp_size:
        # Both halves of a gated MLP are cut.
        reason = f"ffn_hidden_size={model['ffn_hidden_size']} is not divisible by tp_size={tp_size}"
    return f"{operator}: {reason}" if reason else None


def latent_projections(model: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns the inputs and outputs of what latent attention has instead of `qkv`, by Megatron-Core's names; empty
    without latent attention. Every rank has the down-projections, and the `*up_proj` and `q_proj` are column parallel.
    """
    if not model.get("kv_lora_rank") or "qkv" not in (model.get("instead") or {}):
        return {}
    hidden, heads, rank = model["hidden_size"], model["num_attention_heads"], model["kv_lora_rank"]
    rotary, head = model["qk_pos_emb_head_dim"], model["qk_head_dim"]
    queries = heads * (head + rotary)
    of_queries = {"q_proj": (hidden, queries)}
    if q_rank := model.get("q_lora_rank"):
        of_queries = {"q_down_proj": (hidden, q_rank), "q_up_proj": (q_rank, queries)}
    return {
        **of_queries,
        "kv_down_proj": (hidden, rank + rotary),
        "kv_up_proj": (rank, heads * (head + model["v_head_dim"])),
    }


def short_name(model: Mapping[str, Any]) -> str:
    """Returns the model's name without folders."""
    return str(model["name"]).rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1]


_OURS = re.compile(r"(llama3|gpt3|qwen3)_([0-9_]+)b")
_TITLES = {"qwen3_30b_a3b": "Qwen3 30B-A3B", "mixtral_8x7b": "Mixtral 8x7B", "deepseek_v3": "DeepSeek-V3"}
_FAMILIES = {"llama3": "Llama-3", "gpt3": "GPT-3", "qwen3": "Qwen3"}


def title_of(name: str) -> str:
    """Returns a title such as `Llama-3 8B` for `llama3_8b`; names that are not in conf/model are returned unchanged."""
    ours = _OURS.fullmatch(name)
    return f"{_FAMILIES[ours[1]]} {ours[2].replace('_', '.')}B" if ours else _TITLES.get(name, name)


def resolve(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model with all sizes, with `source=hf` from its Hugging Face config. UserError if one is missing.

    Sizes of operators that the model lacks are None; `instead` has by operator what the model has instead. `layers`
    has, if not all are dense, their `number` (None: unknown), how many have a `dense_mlp`, and the width of a
    `shared_expert`.
    """
    names = (*SIZES, *OF_EXPERTS, *OF_LATENT_ATTENTION, "num_layers")
    given = {name: model[name] for name in names if model.get(name) is not None}
    read, instead = read_hf(str(model["name"])) if model["source"] == "hf" else _not_dense(model)
    sizes = read | given
    if "qkv" not in instead:
        sizes.setdefault("num_kv_heads", sizes.get("num_attention_heads"))
        if "head_dim" not in sizes and sizes.get("num_attention_heads") and sizes.get("hidden_size"):
            sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    # Sizes that the user gives make the operator dense.
    instead = {operator: has for operator, has in instead.items() if given.keys().isdisjoint(SIZES_OF[operator])}
    if "layers" in sizes and not given.get("num_dense_layers") and not given.keys().isdisjoint(SIZES_OF["fc1"]):
        sizes["layers"] = {**sizes["layers"], "dense_mlp": sizes["layers"]["number"]}
    unsized = {name for operator in instead for name in SIZES_OF[operator]}
    of_latent = [name for name in OF_LATENT_ATTENTION if name != "q_lora_rank"] if sizes.get("kv_lora_rank") else []
    needed = [*SIZES, *of_latent]
    missing = [name for name in needed if sizes.get(name) is None and name not in unsized]
    if missing:
        raise UserError(f"model {model['name']} has no {', '.join(missing)}; give model.{missing[0]}.")
    sizes |= dict.fromkeys(unsized)
    plain = sizes["gated_mlp"] is False
    layer = {"normalization": "LayerNorm" if plain else "RMSNorm", "bias": plain, **sizes}
    layer |= {name: model[name] for name in ("normalization", "bias") if model.get(name) is not None}
    return {**model, **layer, **({"instead": instead} if instead else {})}


def _not_dense(model: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns what follows from the given sizes of a model's experts and latent attention, as `sizes_of`."""
    has_experts, is_latent = bool(model.get("num_experts")), bool(model.get("kv_lora_rank"))
    if not (has_experts or is_latent):
        return {}, {}
    found: dict[str, Any] = {"gated_experts": True} if has_experts else {}
    number, dense = model.get("num_layers"), model.get("num_dense_layers") or 0
    shared = model.get("shared_expert_ffn_hidden_size")
    found["layers"] = {"number": number, "dense_mlp": dense if has_experts else number, "shared_expert": shared}
    instead = {"qkv": f"{LATENT} {INSTEAD_OF_QKV}"} if is_latent else {}
    if has_experts and not dense:
        instead |= dict.fromkeys(("fc1", "fc2"), EXPERTS)
    return found, {operator: f"{model['name']} has {has}" for operator, has in instead.items()}


def without_experts(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the resolved model without the sizes of its experts, for points that run none: they measure the same."""
    return {name: value for name, value in model.items() if name not in OF_EXPERTS}


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


def _read_hf_config(name: str) -> Any:
    """Returns the config from a local folder, a config.json, the local Hugging Face cache, or the hub, in this order.

    Without a network it fails within seconds; transformers would retry for 23.
    """
    source = _find_hf_config(name)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PreTrainedConfig

    try:
        model_type = PreTrainedConfig.get_config_dict(source)[0].get("model_type")
        if model_type in model_forms.registered_architectures():
            model_forms.load_architecture(model_type)
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
