"""What a worker process knows about itself and its group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """One rank of an initialised torch.distributed group whose every rank runs the same point."""

    rank: int
    world_size: int
    device: torch.device

    def barrier(self) -> None:
        """Wait on the host until every rank is here and has finished its device's work."""
        self.synchronize()
        self.slowest([0.0])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()
