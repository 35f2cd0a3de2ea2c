"""What a parallel linear asks for each of its slots, and how collectives do it.

Another backend's way may be an operator of a library that communicates and multiplies at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from overlap_sweep.backends.torch.communicator import Communicator, MakeCommunicator, Pending, communicator
from overlap_sweep.backends.torch.overlap import gather_multiply, multiply_by_matrix, multiply_scatter
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.overlap.space import Setting


class Overlap(Protocol):
    """How one slot communicates and multiplies. Rows come in contiguous, a matrix in any layout."""

    def gather_multiply(self, shard: Tensor, matrix: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gather `shard` [rows, k] and multiply by `matrix` [k, n]: ([world * rows, k], [world * rows, n])."""

    def multiply_scatter(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """Multiply `rows` [world * m, k] by `matrix` [k, n]: this rank's [m, n] of the sum over the ranks."""

    def all_gather(self, shard: Tensor) -> Pending:
        """[rows, columns] of every rank -> [world * rows, columns], beside whatever runs until it is waited for."""

    def reduce_scatter(self, full: Tensor) -> Pending:
        """[world * rows, columns] of every rank -> this rank's [rows, columns] of their sum, beside whatever runs until
        it is waited for."""


MakeOverlap = Callable[[Setting], Overlap]
"""Of a slot's setting, {} where it does not overlap. Collective."""


def by_collectives(ranks: Ranks, make_communicator: MakeCommunicator | None = None) -> MakeOverlap:
    """`ranks` are the operator's, and communicate through what `make_communicator` makes: by default, all ranks of the
    worker group."""
    make = make_communicator or partial(communicator, ranks)
    return lambda setting: Collectives(make(setting.get("num_sm"), setting.get("cga_size")), ranks, setting)


@dataclass(frozen=True)
class Collectives:
    """By collectives and sends of torch.distributed, cut as the setting says."""

    comm: Communicator
    ranks: Ranks
    setting: Setting

    def gather_multiply(self, shard: Tensor, matrix: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        product = shard.new_empty(self.ranks.world_size * shard.shape[0], matrix.shape[1])
        full = gather_multiply(shard, product, multiply_by_matrix(matrix, bias), self.comm, self.ranks, self.setting)
        return full, product

    def multiply_scatter(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return multiply_scatter(rows, matrix.shape[1], multiply_by_matrix(matrix), self.comm, self.ranks, self.setting)

    def all_gather(self, shard: Tensor) -> Pending:
        return self.comm.all_gather(shard)

    def reduce_scatter(self, full: Tensor) -> Pending:
        return self.comm.reduce_scatter(full)
