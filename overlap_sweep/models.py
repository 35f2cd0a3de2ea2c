"""From a model's sizes to the shapes of its parallel linear operators."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from overlap_sweep.errors import UserError
from overlap_sweep.space import OPERATORS

SIZES = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_kv_heads", "head_dim", "gated_mlp")
HUB = "https://huggingface.co"
CONNECT_TIMEOUT_S = 0.6


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
        """The same GEMMs as one rank's, as an operator that has nobody to communicate with."""
        out_features, in_features = self.weight_shape
        return replace(self, in_features=in_features, out_features=out_features, tp_size=1)

    def unsharded(self) -> LinearShape:
        return replace(self, tp_size=1)

    def refusal(self) -> str | None:
        """Why these sizes cannot be cut into `tp_size` equal parts, or None."""
        cut = ("outputs", self.out_features) if self.parallel == "column" else ("inputs", self.in_features)
        for what, count in (cut, ("tokens", self.tokens)):
            if count % self.tp_size:
                return f"{count} {what} do not divide by tp_size={self.tp_size}"
        return None


def linear_shape(model: Mapping[str, Any], operator: str, tokens: int, tp_size: int) -> LinearShape:
    """The shape of one operator of a model whose sizes are all known."""
    hidden, ffn, head_dim = model["hidden_size"], model["ffn_hidden_size"], model["head_dim"]
    heads, kv_heads = model["num_attention_heads"], model["num_kv_heads"]
    sizes = {
        "qkv": (hidden, (heads + 2 * kv_heads) * head_dim),
        "proj": (heads * head_dim, hidden),
        "fc1": (hidden, ffn * (2 if model["gated_mlp"] else 1)),
        "fc2": (ffn, hidden),
    }
    in_features, out_features = sizes[operator]
    return LinearShape(OPERATORS[operator], tokens, in_features, out_features, tp_size)


def refusal(model: Mapping[str, Any], operator: str, tokens: int, tp_size: int) -> str | None:
    """Why the operator cannot run at this TP size, or None."""
    if operator in ("qkv", "proj") and model["num_attention_heads"] % tp_size:
        return f"{operator}: {model['num_attention_heads']} attention heads do not divide by tp_size={tp_size}"
    if operator == "qkv" and model["num_kv_heads"] % tp_size:
        return f"qkv: {model['num_kv_heads']} key-value heads do not divide by tp_size={tp_size}"
    reason = linear_shape(model, operator, tokens, tp_size).refusal()
    return f"{operator}: {reason}" if reason else None


def resolve(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model with every size filled in; reads the Hugging Face config where `source=hf`. UserError if it can't."""
    sizes = {name: model[name] for name in SIZES if model[name] is not None}
    if model["source"] == "hf":
        sizes = read_hf_sizes(str(model["name"])) | sizes
    sizes.setdefault("num_kv_heads", sizes.get("num_attention_heads"))
    if "head_dim" not in sizes and sizes.get("num_attention_heads") and sizes.get("hidden_size"):
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    missing = [name for name in SIZES if sizes.get(name) is None]
    if missing:
        raise UserError(f"model {model['name']} has no {', '.join(missing)}; give model.{missing[0]}=... .")
    gated = sizes["gated_mlp"]
    layer = {"normalization": "RMSNorm" if gated else "LayerNorm", "bias": not gated}
    return {**model, **sizes, **layer, **{name: model[name] for name in layer if model.get(name) is not None}}


def read_hf_sizes(name: str) -> dict[str, Any]:
    """Sizes from a local folder, a config.json, the local Hugging Face cache, or the hub, in this order.

    Without a network a hub name fails within a second: transformers would retry for 23.
    """
    config = _read_hf_config(name)
    if not hasattr(config, "num_attention_heads") or not hasattr(config, "hidden_size"):
        raise UserError(f"model.name={name} is no transformer: its config has no attention heads; give its sizes.")
    heads, hidden = config.num_attention_heads, config.hidden_size
    ffn = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    return {
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "gated_mlp": _is_gated(config),
    }


def read_hf_fields(name: str) -> dict[str, Any]:
    """What the config of a language model says that its class does not, from where `read_hf_sizes` looks; without what
    concerns neither weights nor computation, and without dropout."""
    config = _read_hf_config(name)
    fields = {**config.to_diff_dict(), "model_type": config.model_type}
    always = ("num_hidden_layers", "vocab_size", "tie_word_embeddings", "rms_norm_eps", "rope_parameters")
    fields |= {name: value for name in always if (value := getattr(config, name, None)) is not None}
    # Weights are drawn, however others are stored.
    stored = ("dtype", "torch_dtype", "quantization_config", "pretraining_tp")
    idle = (*stored, "architectures", "transformers_version", "use_cache", "_name_or_path", "auto_map")
    return {
        name: value
        for name, value in fields.items()
        if name not in idle and not name.endswith(("_token_id", "_dropout"))
    }


def _read_hf_config(name: str) -> Any:
    source = _find_hf_config(name)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        # Unless it is forbidden, transformers offers to run what a config calls its code.
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        lines = str(error).strip().splitlines()
        # Behind the name of what has checked it.
        reason = lines[-1].strip() if isinstance(error, StrictDataclassError) else lines[0]
        raise UserError(f"model.name={name} is no config that transformers knows ({reason}); give its sizes.") from None
    return config.get_text_config()


def _is_gated(config: Any) -> bool:
    # transformers has no field for it: the SiLU family is only used gated, and Gemma gates a GELU.
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or ""
    return activation in ("silu", "swish") or config.model_type.startswith("gemma")


def _find_hf_config(name: str) -> str:
    path = Path(name).expanduser()
    if path.exists():
        if path.is_dir() and not (path / "config.json").exists():
            raise UserError(f"model.name={name} is a folder without a config.json; give one that has it.")
        return str(path)
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        raise UserError(f"model.name={name} does not exist; give a folder, a config.json or a Hugging Face name.")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise UserError(
            f"model.name={name} is no path and no Hugging Face name; names look like owner/model."
        ) from None
    if isinstance(cached, str):
        return cached
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "") or not _hub_answers():
        raise UserError(
            f"model.name={name} is not in the local cache and the hub cannot be reached; "
            "give a local folder, a config.json, or the sizes (model.hidden_size=... and so on)."
        )
    return name


def _hub_answers() -> bool:
    """Whether a TCP connection to the hub, or to the proxy on the way, opens at once."""
    hub = os.environ.get("HF_ENDPOINT", HUB)
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    address = urlsplit(proxy or hub)
    opened = threading.Event()

    def connect() -> None:
        try:
            port = address.port or (443 if address.scheme == "https" else 80)
            socket.create_connection((address.hostname or "", port), CONNECT_TIMEOUT_S).close()
        except OSError:
            return
        opened.set()

    # In a thread, since the look-up of a name obeys no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    return opened.is_set()
