"""A rank's micro batches: drawn once and kept on its device, or drawn again by worker processes of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from overlap_sweep.measure import Ranks, stream
from overlap_sweep.workloads.fsdp.ranking_model import Batch

POOL = 8
"""Number of different micro batches."""


class MicroBatches(Iterator[Batch]):
    """This rank's parts of the micro batches, in turn for ever. The samples depend neither on the number of ranks nor
    on that of workers."""

    def __init__(self, point: Mapping[str, Any], ranks: Ranks) -> None:
        """Draws them, so that no loader disturbs the measurement, or with `training.num_workers` starts a loader."""
        drawn, workers = _Drawn(point, ranks), point["training"].get("num_workers") or 0
        self._device = ranks.device
        self._batches: Iterator[Batch] = cycle([self._moved(drawn[index]) for index in range(0 if workers else POOL)])
        if workers:
            on_gpu = ranks.device.type == "cuda"
            self._batches = iter(
                DataLoader(drawn, batch_size=None, sampler=cycle(range(POOL)), num_workers=workers, pin_memory=on_gpu)
            )

    def __next__(self) -> Batch:
        return self._moved(next(self._batches))

    def close(self) -> None:
        """Ends the loader's workers, and waits for them."""
        self._batches = iter(())

    def _moved(self, batch: Batch) -> Batch:
        return Batch(*(part.to(self._device, non_blocking=True) for part in batch))


class _Drawn(Dataset[Batch]):
    """The micro batches by number, on the CPU."""

    def __init__(self, point: Mapping[str, Any], ranks: Ranks) -> None:
        self._point, self._ranks = point, ranks

    def __getitem__(self, index: int) -> Batch:
        ranking, per_rank = self._point["ranking"], self._point["training"]["batch_size"]
        samples = per_rank * self._ranks.world_size
        generator = stream(torch.device("cpu"), self._point["workload"]["seed"], f"micro batch {index}")
        rows, dense_features = ranking["vocab_size"], ranking["num_dense_features"]

        def ids(count: int) -> torch.Tensor:
            return torch.randint(rows, (samples, count), generator=generator)

        dense = torch.randn(samples, dense_features, generator=generator)
        # A learnable label, so that the loss shows whether the gradients are right.
        clicked = (dense.mean(dim=1) > 0).float()
        whole = Batch(ids(ranking["num_sparse_features"]), ids(ranking["sequence_length"]), dense, clicked)
        mine = slice(self._ranks.rank * per_rank, (self._ranks.rank + 1) * per_rank)
        return Batch(*(part[mine] for part in whole))
