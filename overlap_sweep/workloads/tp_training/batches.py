"""Micro batches of tokens that are drawn before the first step, so that no loader disturbs what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap_sweep.measure.ranks import Ranks, stream

MOST = 128
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
        count = min(MOST, steps * training["gradient_accumulation_steps"])
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
