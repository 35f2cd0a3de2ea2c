"""A worker process's ranks and groups, and its random generators."""

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Ranks:
    """One rank of an initialised torch.distributed group whose ranks all run the same point."""

    rank: int
    world_size: int
    device: torch.device
    node: int = 0
    """The machine that this rank is on; ranks are in order of the machines."""
    nodes: int = 1

    @property
    def local_rank(self) -> int:
        """Returns this rank's number among those of its machine."""
        return self.rank % self.ranks_per_node

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    def barrier(self) -> None:
        """Waits on the host until every rank has arrived and finished its device's work."""
        self.synchronize()
        self.slowest([0.0])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """Returns the maximum of each value over the ranks."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    @contextmanager
    def memory_freed(self) -> Iterator[None]:
        """Frees at its end the memory of a model that nothing refers to any more, which the next point needs: models
        and their hooks refer to each other."""
        try:
            yield
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


@cache
def parallel_groups(tp_size: int, world_size: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns this rank's tensor-parallel group of neighbouring ranks, and its data-parallel group: None with a single
    replica."""
    if tp_size == world_size:
        return dist.group.WORLD, None
    replicas = [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
    tensor, _ = dist.new_subgroups_by_enumeration(replicas)
    data, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*replicas, strict=True)])
    return tensor, data


def stream_seed(seed: int, name: str, rank: int | None = None) -> int:
    """Returns a seed for the random numbers of this name; without a rank the same on all ranks."""
    digest = hashlib.sha256(f"{seed} {name} {rank}".encode()).digest()
    return int.from_bytes(digest[:6])


def stream(device: torch.device, seed: int, name: str, rank: int | None = None) -> torch.Generator:
    """Returns a generator seeded by `stream_seed`."""
    return torch.Generator(device).manual_seed(stream_seed(seed, name, rank))
