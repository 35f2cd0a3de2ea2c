"""Micro batches that are drawn once and used in turn, so that no loader disturbs what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overlap_sweep.measure.ranks import Ranks, stream
from overlap_sweep.workloads.fsdp.ranking_model import Batch

POOL = 8
"""Micro batches that are different."""


class SyntheticData:
    """The same samples whatever the number of ranks that share them."""

    def __init__(self, point: Mapping[str, Any], ranks: Ranks) -> None:
        self._batches = [_draw(point, ranks, index) for index in range(POOL)]

    def __getitem__(self, micro_batch: int) -> Batch:
        """This rank's part of it, on the device; they repeat."""
        return self._batches[micro_batch % POOL]


def _draw(point: Mapping[str, Any], ranks: Ranks, index: int) -> Batch:
    ranking, per_rank = point["ranking"], point["training"]["batch_size"]
    samples = per_rank * ranks.world_size
    generator = stream(torch.device("cpu"), point["workload"]["seed"], f"micro batch {index}")
    rows, dense_features = ranking["vocab_size"], ranking["num_dense_features"]

    def ids(count: int) -> torch.Tensor:
        return torch.randint(rows, (samples, count), generator=generator)

    dense = torch.randn(samples, dense_features, generator=generator)
    # Something that can be learnt, so that the loss says whether the gradients are right.
    clicked = (dense.mean(dim=1) > 0).float()
    whole = Batch(ids(ranking["num_sparse_features"]), ids(ranking["sequence_length"]), dense, clicked)
    mine = slice(ranks.rank * per_rank, (ranks.rank + 1) * per_rank)
    return Batch(*(part[mine].to(ranks.device) for part in whole))
