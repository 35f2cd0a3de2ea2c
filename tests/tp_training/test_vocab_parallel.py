"""Embedding, output projection and loss over a cut vocabulary are those of the whole one, gradients too."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from overlap_sweep.ranks import Ranks
from overlap_sweep.tp_training.initial_weights import padded_vocab_size
from overlap_sweep.tp_training.vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelLinear,
    vocab_parallel_cross_entropy,
)
from tests.processes import run_ranks

HIDDEN, TOKENS = 16, (3, 20)


class Case(NamedTuple):
    """Drawn by the seed, the same on all ranks."""

    vocab_size: int
    embedding: Tensor
    output: Tensor
    tokens: Tensor
    labels: Tensor


class Computed(NamedTuple):
    loss: float
    of_embedding: Tensor
    """Gradients, of all rows of the padded vocabulary."""
    of_output: Tensor


def case(seed: int, vocab_size: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    rows = padded_vocab_size(vocab_size, 2)
    # Padding with large logits: whoever counts it finds another loss.
    embedding, output = (torch.randn(rows, HIDDEN, generator=generator) * 3 for _ in range(2))
    tokens, labels = (torch.randint(vocab_size, TOKENS, generator=generator) for _ in range(2))
    # First and last of each part.
    ends = torch.tensor([0, rows // 2 - 1, rows // 2, vocab_size - 1]).clamp(max=vocab_size - 1)
    tokens.view(-1)[:4] = labels.view(-1)[:4] = ends
    return Case(vocab_size, embedding, output, tokens, labels)


def whole(of: Case) -> Computed:
    embedding, output = of.embedding.clone().requires_grad_(), of.output.clone().requires_grad_()
    logits = functional.embedding(of.tokens, embedding) @ output.T
    loss = functional.cross_entropy(logits.flatten(0, 1)[:, : of.vocab_size], of.labels.flatten())
    loss.backward()
    assert embedding.grad is not None
    assert output.grad is not None
    return Computed(loss.item(), embedding.grad, output.grad)


def cut(ranks: Ranks, seed: int, vocab_size: int, dtype: torch.dtype) -> Computed:
    of, group = case(seed, vocab_size), torch.distributed.group.WORLD
    assert group is not None
    rows = len(of.embedding) // ranks.world_size
    mine = slice(rows * ranks.rank, rows * (ranks.rank + 1))
    embedding = VocabParallelEmbedding(rows, HIDDEN, group, dtype)
    output = VocabParallelLinear(HIDDEN, rows, group, dtype)
    with torch.no_grad():
        embedding.weight.copy_(of.embedding[mine])
        output.weight.copy_(of.output[mine])
    loss = vocab_parallel_cross_entropy(output(embedding(of.tokens)), of.labels, vocab_size, group)
    loss.backward()
    assert loss.dtype == torch.float32
    assert embedding.weight.grad is not None
    assert output.weight.grad is not None
    return Computed(loss.item(), embedding.weight.grad.float(), output.weight.grad.float())


def errors(found: list[Computed], expected: Computed) -> list[float]:
    """Relative, of the loss of each rank and of the gradients put together."""
    gradients = [
        (torch.cat([getattr(of_rank, name) for of_rank in found]), getattr(expected, name))
        for name in ("of_embedding", "of_output")
    ]
    return [
        *(abs(of_rank.loss / expected.loss - 1) for of_rank in found),
        *(((mine - theirs).norm() / theirs.norm()).item() for mine, theirs in gradients),
    ]


def _cut_all(ranks: Ranks, seed: int) -> list[Computed]:
    asked = [(1019, torch.float32), (64, torch.float32), (3, torch.float32), (1019, torch.bfloat16)]
    return [cut(ranks, seed, *each) for each in asked]


def test_two_ranks_compute_what_one_does() -> None:
    seed = secrets.randbits(30)
    found = list(zip(*run_ranks(2, _cut_all, seed), strict=True))
    for of_case, vocab_size, most in zip(found, (1019, 64, 3, 1019), (1e-5, 1e-5, 1e-5, 0.05), strict=True):
        expected = whole(case(seed, vocab_size))
        assert max(errors(list(of_case), expected)) < most, (seed, vocab_size)
        # The padding learns nothing.
        for name in ("of_embedding", "of_output"):
            gradient = torch.cat([getattr(of_rank, name) for of_rank in of_case])
            assert not gradient[vocab_size:].any()
            assert gradient[:vocab_size].any()


def test_without_a_group_it_is_the_usual_loss() -> None:
    of = case(secrets.randbits(30), 1019)
    logits = (functional.embedding(of.tokens, of.embedding) @ of.output.T).requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, of.labels, of.vocab_size, None)
    (mine,) = torch.autograd.grad(loss, logits)
    expected = functional.cross_entropy(logits.flatten(0, 1)[:, : of.vocab_size], of.labels.flatten())
    (theirs,) = torch.autograd.grad(expected, logits)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(mine, theirs, atol=1e-8)


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(4, 24)
    before = logits.clone()
    vocab_parallel_cross_entropy(logits, torch.zeros(4, dtype=torch.int64), 20, None)
    assert torch.equal(logits, before)
