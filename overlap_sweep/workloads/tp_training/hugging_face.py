"""What the stacks share that train a Hugging Face model: the model, without memory until its weights are drawn, and
without waiting for the device; its optimizer; its vocabulary, cut over the ranks, and the loss over that.

Of a cut vocabulary each rank has `padded_vocab_size / tp_size` consecutive rows; the last ranks' may be padding, which
no token looks up and whose logits count as minus infinity. As in Megatron-LM (arXiv:1909.08053, section 3).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import get_total_norm

from overlap_sweep.workloads.tp_training.config import Resolved, ResolvedTraining
from overlap_sweep.workloads.tp_training.language_model import Architecture, LanguageModel, architecture
from overlap_sweep.workloads.tp_training.run import padded_vocab_size

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""Returns the output, and the weights if it has them."""
_CAUSAL = "causal_"
"""Before the name of an attention of Hugging Face's: with a mask of our own."""


def build_on_meta(point: Resolved) -> nn.Module:
    """Returns the whole model in float32 without memory: `to_empty` gives it some, `restore_buffers` and
    `initial_weights` what is to be in it. It is in training mode and keeps no keys and values.

    Its attention is the point's, causal, within the sliding window if there is one. The layers take no mask for it, so
    that Hugging Face does not look into the positions at each step to make one, which waits for the device.
    """
    attention = point.tp_training.attn_impl
    assert attention
    if not architecture(point.trained.model_type).create_model:
        attention = _attention_name(attention)
    with torch.device("meta"):
        return whole_model(point.language_model, attention).train()


def whole_model(language_model: Mapping[str, Any], attention: str) -> nn.Module:
    """Returns the model in float32 on the current default device, as its architecture or AutoModelForCausalLM makes it;
    its parameters are uninitialised. `language_model` is the point's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if create_model := architecture(language_model["model_type"]).create_model:
        own: nn.Module = create_model(language_model, attention)
        return own.float()
    config = AutoConfig.for_model(**language_model)
    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.float()


def _attention_name(attn_impl: str) -> str:
    """Returns Hugging Face's name for the attention of `tp_training.attn_impl`. flash_attention_2 is its own."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    attentions = {"sdpa": _causal(sdpa_attention_forward), "eager": _causal(eager_attention_forward, masked=True)}
    if attn_impl not in attentions:
        return attn_impl
    # For a name that it knows no mask of, Hugging Face makes none.
    AttentionInterface.register(_CAUSAL + attn_impl, attentions[attn_impl])
    return _CAUSAL + attn_impl


def _causal(attention: Attention, *, masked: bool = False) -> Attention:
    """Returns `attention` with the mask of the sliding window, or if `masked` with a causal one: others are causal if
    they are given no mask."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        sliding_window: int | None = None,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        length = query.shape[2]
        window, mask = sliding_window or length, None
        if masked or window < length:
            hidden = torch.full((length, length), -torch.inf, dtype=query.dtype, device=query.device)
            # Below the diagonal it sees what is in the window, above it nothing.
            mask = hidden.triu(1) + hidden.tril(-window)
        return attention(module, query, key, value, mask, sliding_window=sliding_window, **options)

    return forward


def parameter_dtype(training: ResolvedTraining) -> torch.dtype:
    """Returns the dtype of parameters in computation. Autocast casts them itself."""
    dtype: torch.dtype = torch.float32 if training.autocast else getattr(torch, training.dtype)
    return dtype


def adamw(parameters: Iterable[Tensor], training: Mapping[str, Any], device: torch.device) -> torch.optim.AdamW:
    """Returns the optimizer. `training`: the options of `tp_training`, as a mapping, as other packages have them."""
    return torch.optim.AdamW(
        parameters,
        lr=training["learning_rate"],
        weight_decay=training["weight_decay"],
        fused=device.type == "cuda",
        foreach=device.type != "cuda",
    )


def clip(
    cut: list[Tensor], whole: list[Tensor], limit: float, tp_size: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Clips gradients, those cut over the tensor-parallel ranks and those that these have alike, by their norm over all
    ranks of the group, and returns the norm. Takes one collective. A limit of 0 is none."""
    square: Tensor = get_total_norm(cut) ** 2 + get_total_norm(whole) ** 2 / tp_size
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    if limit:
        torch._foreach_mul_([*cut, *whole], (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def decoder_layers(model: nn.Module, of: Architecture) -> Sequence[nn.Module]:
    return list(model.get_submodule(of.layers).children())


def restore_buffers(model: nn.Module, of: Architecture, device: torch.device) -> None:
    """Recomputes the frequencies of the rotary embedding: a model from `meta` has lost them."""
    if of.rotary:
        rotary: Any = model.get_submodule(of.rotary)
        _replace(model, of.rotary, type(rotary)(config=model.config).to(device))


def pad_vocabulary(model: nn.Module, of: Architecture, hidden: int, rows: int) -> None:
    """Gives embedding and output projection `rows` rows, on `meta`. Their weights are not tied then (`tie_weights`)."""
    # Hugging Face's embedding leaves out the gradient of config.pad_token_id; no token here is for padding.
    _replace(model, of.embedding, nn.Embedding(rows, hidden, device="meta"))
    _replace(model, of.output, nn.Linear(hidden, rows, bias=False, device="meta"))


def share_vocabulary(model: nn.Module, of: Architecture, trained: LanguageModel, group: dist.ProcessGroup) -> None:
    """Gives embedding and output projection this rank's rows of the padded vocabulary, on `meta`. The model's logits
    are those of these rows then. Not tied (`tie_weights`)."""
    tp_size, hidden = dist.get_world_size(group), trained.hidden_size
    rows = padded_vocab_size(trained.vocab_size, tp_size) // tp_size
    with torch.device("meta"):
        _replace(model, of.embedding, VocabParallelEmbedding(rows, hidden, group))
        output = nn.Linear(hidden, rows, bias=False)
    output.register_forward_pre_hook(partial(_sum_gradient, group))
    _replace(model, of.output, output)


def tie_weights(model: nn.Module, of: Architecture, trained: LanguageModel) -> None:
    """Gives embedding and output projection one parameter, if the model's config says so. Plain tensors lose that by
    `to_empty`, DTensors keep it."""
    if trained.tie_word_embeddings:
        embedding = model.get_submodule(of.embedding)
        model.get_submodule(of.output).register_parameter("weight", next(embedding.parameters()))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


class VocabParallelEmbedding(nn.Module):
    """An embedding that is zero for rows of other ranks; the sum over the ranks is the embedding."""

    def __init__(self, rows: int, hidden: int, group: dist.ProcessGroup) -> None:
        """Creates the embedding; `rows` are this rank's."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self._group = group
        self._first = rows * dist.get_rank(group)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns [..., hidden] of tokens [...]."""
        local = tokens - self._first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        embedded = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return _Sum.apply(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


def _sum_gradient(group: dist.ProcessGroup, _output: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Sums the parts of the input's gradient from each rank's logits; its other uses have their own gradients."""
    own = inputs[0].view_as(inputs[0])
    own.register_hook(partial(summed, group=group))
    return (own,)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum over the group: of a gradient, if all ranks have a tensor and each uses it for something else."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Returns the mean over all tokens, float32, the same on all ranks of the group.

    logits: [..., rows], this rank's part of the padded vocabulary, in any floating type; labels: [...]. `vocab_size`
    is without padding. Without a group the logits are whole.
    """
    losses: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocab_size, group)
    return losses.mean()


class _Sum(torch.autograd.Function):
    """The sum over the group; its gradient, which all ranks have, is each one's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _CrossEntropy(torch.autograd.Function):
    """Per token log(sum(exp(logits))) - logit of its label, with the largest logit taken out of the sum."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> Tensor:
        rows = logits.shape[-1]
        first = rows * dist.get_rank(group) if group else 0
        exponentials = logits.float()
        if exponentials is logits:
            exponentials = logits.clone()
        if vocab_size < first + rows:
            exponentials[:, max(vocab_size - first, 0) :] = -torch.inf
        largest = exponentials.amax(dim=-1)
        if group:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        exponentials -= largest.unsqueeze(-1)
        local = labels - first
        elsewhere = (local < 0) | (local >= rows)
        local = local.masked_fill(elsewhere, 0)
        of_label = exponentials.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials.exp_()
        total = exponentials.sum(dim=-1)
        if group:
            both = torch.stack((total, of_label))
            dist.all_reduce(both, group=group)
            total, of_label = both.unbind()
        # From here on the softmax.
        exponentials /= total.unsqueeze(-1)
        ctx.save_for_backward(exponentials, local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - of_label

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, elsewhere = ctx.saved_tensors
        of_logits = softmax.scatter_add(-1, local.unsqueeze(-1), (elsewhere.to(softmax.dtype) - 1.0).unsqueeze(-1))
        return (of_logits * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None
