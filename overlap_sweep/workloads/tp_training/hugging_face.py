"""A Hugging Face model as it is trained here: no memory until its weights are drawn, no waiting for the device, and a
vocabulary that the ranks can share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap_sweep.workloads.tp_training.inputs import padded_vocab_size
from overlap_sweep.workloads.tp_training.language_model import Architecture
from overlap_sweep.workloads.tp_training.vocab_parallel import VocabParallelEmbedding, VocabParallelLinear

_CAUSAL = "causal_"
"""Before the name of an attention of Hugging Face's: with a mask of our own."""


def build_on_meta(point: Mapping[str, Any]) -> nn.Module:
    """The whole model in float32 without memory: `to_empty` gives it some, `restore_buffers` and `initial_weights` what
    is to be in it. It is in training mode and keeps no keys and values.

    Its attention is the point's, causal, within the sliding window if there is one. The layers take no mask for it, so
    that Hugging Face does not look into the positions at each step to make one, which waits for the device.
    """
    with torch.device("meta"):
        model = whole_model(point["language_model"], attention_name(point["tp_training"]["attn_impl"]))
    return model.train()


def whole_model(language_model: Mapping[str, Any], attention: str) -> nn.Module:
    """Returns the model in float32 on the current default device, as AutoModelForCausalLM makes it; its parameters hold
    nothing of use yet. `language_model` is the point's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**language_model)
    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.float()


def attention_name(attn_impl: str) -> str:
    """What Hugging Face knows the attention by that `tp_training.attn_impl` asks for. flash_attention_2 is its own."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attentions: dict[str, Callable[..., Any]] = {"sdpa": _causal(sdpa_attention_forward), "eager": _eager}
    if attn_impl not in attentions:
        return attn_impl
    # For a name that it knows no mask of, Hugging Face makes none.
    AttentionInterface.register(_CAUSAL + attn_impl, attentions[attn_impl])
    return _CAUSAL + attn_impl


def _causal(attention: Callable[..., Any]) -> Callable[..., Any]:
    """`attention`, which is causal where it is given no mask."""

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
    ) -> Any:
        window = options.get("sliding_window")
        mask = None if window is None or window >= query.shape[2] else _visible(query, window)
        return attention(module, query, key, value, mask, **options)

    return forward


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """query: [batch, heads, sequence, head], key and value with fewer heads -> [batch, sequence, heads, head]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    hidden = ~_visible(query, options.get("sliding_window") or query.shape[2])
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), None


def _visible(query: Tensor, window: int) -> Tensor:
    """[sequence, sequence], whether the position of a row may look at that of a column."""
    positions = torch.arange(query.shape[2], device=query.device)
    back = positions[:, None] - positions[None, :]
    return (back >= 0) & (back < window)


def restore_buffers(model: nn.Module, architecture: Architecture, device: torch.device) -> None:
    """The frequencies of the rotary embedding, which no weight is drawn for: a model from `meta` has lost them."""
    rotary = model.get_submodule(architecture.rotary)
    whole_again = type(rotary)(config=model.config).to(device)
    parent, _, name = architecture.rotary.rpartition(".")
    setattr(model.get_submodule(parent), name, whole_again)


def pad_vocabulary(model: nn.Module, architecture: Architecture, rows: int) -> None:
    """Give embedding and output projection `rows` rows, on `meta`. Their weights are not tied then (`tie_weights`)."""
    hidden = _config(model).hidden_size
    # Hugging Face's embedding leaves out the gradient of config.pad_token_id; no token here is for padding.
    _replace(model, architecture.embedding, nn.Embedding(rows, hidden, device="meta"))
    _replace(model, architecture.output, nn.Linear(hidden, rows, bias=False, device="meta"))


def share_vocabulary(model: nn.Module, architecture: Architecture, vocab_size: int, group: dist.ProcessGroup) -> None:
    """Embedding and output projection with this rank's rows of the padded vocabulary instead of the whole ones, on
    `meta`. The model's logits are those of this rank's rows then. Not tied (`tie_weights`)."""
    tp_size = dist.get_world_size(group)
    hidden, rows = _config(model).hidden_size, padded_vocab_size(vocab_size, tp_size) // tp_size
    with torch.device("meta"):
        _replace(model, architecture.embedding, VocabParallelEmbedding(rows, hidden, group))
        _replace(model, architecture.output, VocabParallelLinear(hidden, rows, group))


def tie_weights(model: nn.Module, architecture: Architecture) -> None:
    """One parameter for embedding and output projection, if the model's config says so. Plain tensors lose that by
    `to_empty`, DTensors keep it."""
    if _config(model).tie_word_embeddings:
        embedding = model.get_submodule(architecture.embedding)
        model.get_submodule(architecture.output).register_parameter("weight", next(embedding.parameters()))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _config(model: nn.Module) -> Any:
    """Hugging Face's."""
    return model.config


def decoder_layers(model: nn.Module, architecture: Architecture) -> Sequence[nn.Module]:
    layers = model.get_submodule(architecture.layers)
    assert isinstance(layers, nn.ModuleList)
    return list(layers)
