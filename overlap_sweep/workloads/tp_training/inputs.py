"""What is equal for every implementation: initial weights, each parameter drawn whole by its Hugging Face name, and
batches of tokens, drawn before the first step, so that no loader disturbs what is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap_sweep.measure.ranks import Ranks, stream
from overlap_sweep.workloads.tp_training.language_model import architecture

INIT_STD = 0.02


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """So that every tensor-parallel rank has equally many rows, and as many as a GEMM's kernels like."""
    multiple = 8 * tp_size
    return -(-vocab_size // multiple) * multiple


def initial_weights(point: Mapping[str, Any], ranks: Ranks) -> Callable[[str, Sequence[int]], Tensor]:
    """A function of a parameter's Hugging Face name and whole shape (`model.layers.0.self_attn.q_proj.weight`; of the
    embedding and output projection with the vocabulary's padding) that draws it: float32, on the device, the same on
    all ranks and for whoever asks. Norms are one, biases zero, padding zero, all else normal.

    One parameter is whole at a time: whoever asks cuts out its part and lets go of the rest.
    """
    seed, model = point["tp_training"]["seed"], point["language_model"]
    of = architecture(model["model_type"])
    cut_by_tokens = (f"{of.embedding}.weight", f"{of.output}.weight")
    std, vocabulary = model.get("initializer_range", INIT_STD), model["vocab_size"]

    def draw(name: str, shape: Sequence[int]) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(*shape, device=ranks.device)
        if len(shape) == 1:
            return torch.ones(*shape, device=ranks.device)
        weight = torch.empty(*shape, device=ranks.device)
        of_vocabulary = name in cut_by_tokens
        real = weight[:vocabulary] if of_vocabulary else weight
        # The padding is no part of the draw, which would else depend on the number of ranks.
        real.normal_(std=std, generator=stream(ranks.device, seed, name))
        if of_vocabulary:
            weight[vocabulary:].zero_()
        return weight

    return draw


MOST_BATCHES = 128
"""Micro batches that are different; longer runs begin again. A model that saw few of them many times would know them by
heart, and near a loss of zero rounding decides what it is."""
SKEW = 4
"""Of the draw: low tokens are frequent, as in language, so that there is something to learn, and a loss that moves says
whether the gradients are right."""


class Batch(NamedTuple):
    """[batch, sequence], int64."""

    tokens: Tensor
    labels: Tensor
    """The next token of each."""


class TokenBatches:
    """The same for all implementations; of one data-parallel rank, the same on its tensor-parallel ranks."""

    def __init__(self, point: Mapping[str, Any], ranks: Ranks, dp_rank: int) -> None:
        training, profiled = point["tp_training"], point["workload"]["profiled"]
        # One profiled step is thrown away.
        steps = training["num_training_steps"] + profiled + 1
        count = min(MOST_BATCHES, steps * training["gradient_accumulation_steps"])
        self._batches = [_draw(point, ranks, dp_rank, index) for index in range(count)]

    def __getitem__(self, micro_batch: int) -> Batch:
        """On the device."""
        return self._batches[micro_batch % len(self._batches)]


def _draw(point: Mapping[str, Any], ranks: Ranks, dp_rank: int, index: int) -> Batch:
    training, vocabulary = point["tp_training"], point["language_model"]["vocab_size"]
    generator = stream(torch.device("cpu"), training["seed"], f"micro batch {index}", dp_rank)
    shape = training["batch_size"], training["seq_length"] + 1
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) ** SKEW
    tokens = (drawn * vocabulary).long().to(ranks.device)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
