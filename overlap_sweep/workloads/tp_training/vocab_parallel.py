"""Embedding, output projection and cross-entropy over a vocabulary that is cut over the tensor-parallel ranks.

Each rank has `padded_vocab_size / tp_size` consecutive rows; the last ranks' may be padding, which no token looks up
and whose logits count as minus infinity. As in Megatron-LM (arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class VocabParallelEmbedding(nn.Module):
    """Rows that a rank does not have are zero there; the sum over the ranks is the embedding."""

    def __init__(self, rows: int, hidden: int, group: dist.ProcessGroup) -> None:
        """`rows`: of this rank."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self._group = group
        self._first = rows * dist.get_rank(group)

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., hidden]."""
        local = tokens - self._first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        embedded = functional.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return _Sum.apply(embedded.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._group)


class VocabParallelLinear(nn.Module):
    """The output projection: the same input on all ranks, to the logits of this rank's rows."""

    def __init__(self, hidden: int, rows: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self._group = group

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., rows]."""
        own = hidden.view_as(hidden)
        # Its other uses have gradients of their own.
        own.register_hook(partial(summed, group=self._group))
        return functional.linear(own, self.weight)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group: of a gradient, where all ranks have a tensor and each uses it for something else."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The mean over all tokens, float32, the same on all ranks of the group.

    logits: [..., rows], this rank's part of the padded vocabulary, in any floating type; labels: [...]. `vocab_size`
    is without padding. Without a group the logits are whole.
    """
    losses: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), vocab_size, group)
    return losses.mean()


class _Sum(torch.autograd.Function):
    """Over the group; its gradient, which all ranks have, is each one's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _CrossEntropy(torch.autograd.Function):
    """Of each token: log(sum(exp(logits))) - logit of its label, with the largest logit taken out of the sum."""

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
