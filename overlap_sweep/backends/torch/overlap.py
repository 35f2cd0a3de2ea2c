"""The overlapped halves of a parallel linear: an all-gather with the GEMM after it, a GEMM with the
reduce-scatter after it.

The GEMM comes in as a function of row chunks, so that the same code serves forward and backward. Rows are cut
by rank: chunk `c` is the rows that rank `c` holds when sequence parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from overlap_sweep.backends import Operand, Problem
from overlap_sweep.backends.torch.communicator import Communicator, MakeCommunicator, Pending, communicator
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.overlap.space import Setting

Multiply = Callable[[Tensor, Tensor], Any]
"""Multiply the rows of the first tensor, [m, k] or [batch, m, k], by the weight and write them into the second."""


def multiply_by_matrix(matrix: Tensor, bias: Tensor | None = None) -> Multiply:
    """Multiplication by `matrix` [k, n] from the right; of [m, k] also with a bias [n]."""

    def multiply(rows: Tensor, product: Tensor) -> None:
        if rows.dim() == 3:
            torch.bmm(rows, matrix.expand(rows.shape[0], -1, -1), out=product)
        elif bias is None:
            torch.mm(rows, matrix, out=product)
        else:
            torch.addmm(bias, rows, matrix, out=product)

    return multiply


def gather_multiply(
    shard: Tensor, product: Tensor, multiply: Multiply, comm: Communicator, ranks: Ranks, setting: dict[str, Any]
) -> Tensor:
    """Gather `shard` [rows, k] over the ranks and multiply all of it into `product` [world * rows, n].

    Returns the gathered [world * rows, k].
    """
    if setting.get("method") == "ring_exchange" and setting.get("aggregate"):
        return _ring_gather_pairs(shard, product, multiply, comm, ranks)
    if setting.get("method") == "ring_exchange":
        return _ring_gather(shard, product, multiply, comm, ranks)
    full = comm.all_gather(shard).wait()
    multiply(full, product)
    return full


def _ring_gather(shard: Tensor, product: Tensor, multiply: Multiply, comm: Communicator, ranks: Ranks) -> Tensor:
    rank, world = ranks.rank, ranks.world_size
    full = shard.new_empty(world * shard.shape[0], *shard.shape[1:])
    chunks, products = full.chunk(world), product.chunk(world)
    chunks[rank].copy_(shard)
    for step in range(world):
        here = (rank - step) % world
        moving = None
        if step < world - 1:
            moving = comm.exchange(chunks[here], chunks[here - 1], (rank + 1) % world, (rank - 1) % world)
        multiply(chunks[here], products[here])
        if moving:
            moving.wait()
    return full


def _ring_gather_pairs(shard: Tensor, product: Tensor, multiply: Multiply, comm: Communicator, ranks: Ranks) -> Tensor:
    """Neighbours swap chunks first; then pairs of chunks move around the ring of pairs."""
    rank, world = ranks.rank, ranks.world_size
    full = shard.new_empty(world * shard.shape[0], *shard.shape[1:])
    chunks = full.chunk(world)
    pairs, products = full.chunk(world // 2), product.chunk(world // 2)
    chunks[rank].copy_(shard)
    comm.exchange(chunks[rank], chunks[rank ^ 1], rank ^ 1, rank ^ 1).wait()
    for step in range(world // 2):
        here = (rank // 2 - step) % (world // 2)
        moving = None
        if step < world // 2 - 1:
            moving = comm.exchange(pairs[here], pairs[here - 1], (rank + 2) % world, (rank - 2) % world)
        multiply(pairs[here], products[here])
        if moving:
            moving.wait()
    return full


def pipelined_gather_multiply(
    shard: Tensor, product: Tensor, multiply: Multiply, comm: Communicator, ranks: Ranks, num_splits: int
) -> None:
    """As `gather_multiply`, but nobody gets what was gathered: each split holds some rows of every rank's shard, and
    moves while the one before it is multiplied."""
    splits = shard.tensor_split(min(num_splits, shard.shape[0]))
    moving = [comm.all_gather(split) for split in splits]
    by_rank = product.view(ranks.world_size, shard.shape[0], -1).tensor_split(len(splits), dim=1)
    for pending, into in zip(moving, by_rank, strict=True):
        multiply(pending.wait().view(*into.shape[:2], -1), into)


def multiply_reduce(rows: Tensor, product: Tensor, multiply: Multiply, comm: Communicator, num_splits: int) -> Tensor:
    """Multiply `rows` [m, k] into `product` [m, n], and sum it over the ranks, in splits. Returns the sum."""
    moving, splits = [], min(num_splits, rows.shape[0])
    for part, into in zip(rows.tensor_split(splits), product.tensor_split(splits), strict=True):
        multiply(part, into)
        moving.append(comm.all_reduce(into))
    for pending in moving:
        pending.wait()
    return product


def multiply_scatter(
    rows: Tensor,
    columns: int,
    multiply: Multiply,
    comm: Communicator,
    ranks: Ranks,
    setting: dict[str, Any],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply `rows` [world * m, k] into [world * m, columns] of `dtype`, None that of `rows`, and sum over the ranks.

    Returns this rank's [m, columns] of the sum.
    """
    form = rows.new_empty(0, dtype=dtype)
    if setting.get("method") == "ring_exchange":
        return _ring_scatter(rows, columns, multiply, comm, ranks, form)
    if setting.get("method") == "pipeline":
        return _pipelined_scatter(rows, columns, multiply, comm, ranks, setting.get("num_splits", 4), form)
    product = form.new_empty(rows.shape[0], columns)
    multiply(rows, product)
    return comm.reduce_scatter(product).wait()


def _ring_scatter(
    rows: Tensor, columns: int, multiply: Multiply, comm: Communicator, ranks: Ranks, form: Tensor
) -> Tensor:
    """A partial sum for each rank travels the ring towards it; every rank adds its part while it holds it."""
    rank, world = ranks.rank, ranks.world_size
    chunks = rows.chunk(world)
    moving: Pending | None = None
    for step in range(world):
        partial = form.new_empty(chunks[0].shape[0], columns)
        multiply(chunks[(rank - step - 1) % world], partial)
        if moving:
            partial += moving.wait()
        if step < world - 1:
            moving = comm.exchange(partial, partial.new_empty(partial.shape), (rank + 1) % world, (rank - 1) % world)
    return partial


def _pipelined_scatter(
    rows: Tensor,
    columns: int,
    multiply: Multiply,
    comm: Communicator,
    ranks: Ranks,
    num_splits: int,
    form: Tensor,
) -> Tensor:
    """Each split holds some rows of every rank's chunk, so that its reduce-scatter fills some rows of every rank."""
    by_rank = rows.view(ranks.world_size, -1, rows.shape[1])
    shard = form.new_empty(by_rank.shape[1], columns)
    splits = min(num_splits, by_rank.shape[1])
    moving = []
    for part, into in zip(by_rank.tensor_split(splits, dim=1), shard.tensor_split(splits), strict=True):
        product = form.new_empty(*part.shape[:2], columns)
        # Batched, since that reads the split's rows where they lie. Copying them together first made the four splits
        # of an 8192x3584x4096 GEMM take 28 % longer than the GEMM in one piece, against 3 % (H200, bf16).
        multiply(part, product)
        moving.append(comm.reduce_scatter(product.flatten(0, 1), into))
    for pending in moving:
        pending.wait()
    return shard


def multiply_by(weight: Operand, scale: Tensor | None) -> Multiply:
    """Multiplication by the transpose of `weight` [n, k], of rows that have this scale: (rows, product) -> None.

    `rows` may be FP8 as bytes, which is how it is communicated.
    """
    matrix = weight.data.t()

    def multiply_fp8(rows: Tensor, product: Tensor) -> None:
        assert scale is not None
        assert weight.scale is not None
        if rows.dim() == 3:
            for part, into in zip(rows, product, strict=True):
                multiply_fp8(part, into)
            return
        # Accumulated fast, as in the forward of FP8 training.
        form: dict[str, Any] = {"out_dtype": product.dtype, "use_fast_accum": True, "out": product}
        torch._scaled_mm(rows.view(weight.data.dtype), matrix, scale_a=scale, scale_b=weight.scale, **form)

    return multiply_by_matrix(matrix) if weight.scale is None else multiply_fp8


def multiplied(problem: Problem, at: int, rows: Tensor, product: Tensor | None = None) -> Tensor:
    """This rank's whole GEMM on `rows`, which belong to that input: into `product`, or newly made."""
    if product is None:
        product = rows.new_empty(rows.shape[0], problem.shape.gemm_shape[1], dtype=problem.out_dtype)
    multiply_by(problem.weight, problem.inputs[at].scale)(rows, product)
    return product


def as_bytes(data: Tensor) -> Tensor:
    """FP8 as what every library communicates; other types as they are."""
    return data.view(torch.uint8) if data.element_size() == 1 else data


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
