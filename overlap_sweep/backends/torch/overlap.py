"""Communication and multiplication of one slot of a parallel linear operator.

The GEMM is passed as a function of row chunks, so that the same code serves forward and backward. Rows are split by
rank: chunk `c` has the rows of rank `c` under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from overlap_sweep.backends import Operand, Outputs, Problem
from overlap_sweep.backends.communicator import Communicator, Pending, SilentCommunicator, as_bytes, communicator
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap.space import Setting, SlotSetting

Multiply = Callable[[Tensor, Tensor], object]
"""Multiplies the rows of the first tensor, [m, k] or [batch, m, k], by the weight and writes them into the second."""


DEFAULT_SPLITS = 4
"""Parts of a pipeline, as Transformer Engine's."""


class Overlap(Protocol):
    """Communication and multiplication of one slot. Rows are contiguous, a matrix has any layout."""

    def gather_multiply(self, shard: Tensor, matrix: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Gathers `shard` [rows, k] and multiplies by `matrix` [k, n].

        Returns ([world * rows, k], [world * rows, n]).
        """

    def multiply_scatter(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """Multiplies `rows` [world * m, k] by `matrix` [k, n]. Returns this rank's [m, n] of the sum over the ranks."""

    def all_gather(self, shard: Tensor) -> Pending:
        """Returns [world * rows, columns] from [rows, columns] of every rank, asynchronously."""

    def reduce_scatter(self, full: Tensor) -> Pending:
        """Returns this rank's [rows, columns] of the sum of every rank's [world * rows, columns], asynchronously."""


MakeOverlap = Callable[[Setting], Overlap]
"""Returns the Overlap for a slot's setting; {} means no overlap. Collective."""


def by_collectives(ranks: Ranks, replicas: int = 1, *, silent: bool = False) -> Callable[[Setting], Collectives]:
    """Returns the factory of `Collectives` among `ranks`, one of `replicas` groups; `silent`: collectives move
    nothing."""
    if silent:
        nothing = SilentCommunicator(ranks)
        return lambda setting: Collectives(nothing, ranks, SlotSetting.of(setting))

    def made(setting: Setting) -> Collectives:
        knobs = SlotSetting.of(setting)
        return Collectives(communicator(ranks, knobs.num_sm, knobs.cga_size, replicas), ranks, knobs)

    return made


@dataclass(frozen=True)
class Collectives:
    """`Overlap` by collectives and sends of torch.distributed, split by the setting."""

    comm: Communicator
    ranks: Ranks
    knobs: SlotSetting

    def gather_multiply(self, shard: Tensor, matrix: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        product = shard.new_empty(self.ranks.world_size * shard.shape[0], matrix.shape[1])
        return self.gather_into(shard, product, multiply_by_matrix(matrix, bias)), product

    def multiply_scatter(self, rows: Tensor, matrix: Tensor) -> Tensor:
        return self.scatter(rows, matrix.shape[1], multiply_by_matrix(matrix))

    def all_gather(self, shard: Tensor) -> Pending:
        return self.comm.all_gather(shard)

    def reduce_scatter(self, full: Tensor) -> Pending:
        return self.comm.reduce_scatter(full)

    def gather_into(self, shard: Tensor, product: Tensor, multiply: Multiply) -> Tensor:
        """Gathers `shard` [rows, k] over the ranks and multiplies all of it into `product` [world * rows, n].

        Returns the gathered [world * rows, k].
        """
        if self.knobs.method == "ring_exchange":
            return self._ring_gather(shard, product, multiply)
        full = self.comm.all_gather(shard).wait()
        multiply(full, product)
        return full

    def _ring_gather(self, shard: Tensor, product: Tensor, multiply: Multiply) -> Tensor:
        """Gathers and multiplies chunks that move around the ring of ranks; with `aggregate` neighbours first swap
        chunks, and pairs of chunks move around the ring of pairs."""
        rank, world = self.ranks.rank, self.ranks.world_size
        width = 2 if self.knobs.aggregate else 1
        full = shard.new_empty(world * shard.shape[0], *shard.shape[1:])
        chunks = full.chunk(world)
        chunks[rank].copy_(shard)
        if width == 2:
            self.comm.exchange(chunks[rank], chunks[rank ^ 1], rank ^ 1, rank ^ 1).wait()
        parts, products = full.chunk(world // width), product.chunk(world // width)
        for step in range(len(parts)):
            here = (rank // width - step) % len(parts)
            moving = None
            if step < len(parts) - 1:
                to, source = (rank + width) % world, (rank - width) % world
                moving = self.comm.exchange(parts[here], parts[here - 1], to, source)
            multiply(parts[here], products[here])
            if moving:
                moving.wait()
        return full

    def pipelined_gather_into(self, shard: Tensor, product: Tensor, multiply: Multiply) -> None:
        """Multiplies the gathered shards into `product`, in splits; the gathered input is not kept. A split has some
        rows of every rank's shard, and moves while the previous one is multiplied."""
        splits = shard.tensor_split(self._splits(shard.shape[0]))
        moving = [self.comm.all_gather(split) for split in splits]
        by_rank = product.view(self.ranks.world_size, shard.shape[0], -1).tensor_split(len(splits), dim=1)
        for pending, into in zip(moving, by_rank, strict=True):
            multiply(pending.wait().view(*into.shape[:2], -1), into)

    def reduce_into(self, rows: Tensor, product: Tensor, multiply: Multiply) -> Tensor:
        """Multiplies `rows` [m, k] into `product` [m, n], and sums it over the ranks, in splits. Returns the sum."""
        moving, splits = [], self._splits(rows.shape[0])
        for part, into in zip(rows.tensor_split(splits), product.tensor_split(splits), strict=True):
            multiply(part, into)
            moving.append(self.comm.all_reduce(into))
        for pending in moving:
            pending.wait()
        return product

    def scatter(self, rows: Tensor, columns: int, multiply: Multiply, dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies `rows` [world * m, k] into [world * m, columns] and sums over the ranks, in `dtype`, by default
        that of `rows`.

        Returns this rank's [m, columns] of the sum.
        """
        form = rows.new_empty(0, dtype=dtype)
        if self.knobs.method == "ring_exchange":
            return self._ring_scatter(rows, columns, multiply, form)
        if self.knobs.method == "pipeline":
            return self._pipelined_scatter(rows, columns, multiply, form)
        product = form.new_empty(rows.shape[0], columns)
        multiply(rows, product)
        return self.comm.reduce_scatter(product).wait()

    def _splits(self, rows: int) -> int:
        """Returns the number of parts in which a pipeline moves so many rows."""
        return min(self.knobs.num_splits or DEFAULT_SPLITS, rows)

    def _ring_scatter(self, rows: Tensor, columns: int, multiply: Multiply, form: Tensor) -> Tensor:
        """Sums along the ring: the sum for each rank travels towards it; every rank adds its part on the way."""
        rank, world = self.ranks.rank, self.ranks.world_size
        chunks = rows.chunk(world)
        moving: Pending | None = None
        for step in range(world):
            partial = form.new_empty(chunks[0].shape[0], columns)
            multiply(chunks[(rank - step - 1) % world], partial)
            if moving:
                partial += moving.wait()
            if step < world - 1:
                incoming = partial.new_empty(partial.shape)
                moving = self.comm.exchange(partial, incoming, (rank + 1) % world, (rank - 1) % world)
        return partial

    def _pipelined_scatter(self, rows: Tensor, columns: int, multiply: Multiply, form: Tensor) -> Tensor:
        """Multiplies and scatters in splits of some rows of every rank's chunk: each fills some of each shard."""
        by_rank = rows.view(self.ranks.world_size, -1, rows.shape[1])
        shard = form.new_empty(by_rank.shape[1], columns)
        splits = self._splits(by_rank.shape[1])
        moving = []
        for part, into in zip(by_rank.tensor_split(splits, dim=1), shard.tensor_split(splits), strict=True):
            product = form.new_empty(*part.shape[:2], columns)
            # Batched, because that reads the split's rows in place. Copying them together first made the four
            # splits of an 8192x3584x4096 GEMM take 28 % longer than the GEMM in one piece, against 3 % (H200, bf16).
            multiply(part, product)
            moving.append(self.comm.reduce_scatter(product.flatten(0, 1), into))
        for pending in moving:
            pending.wait()
        return shard


def multiply_by_matrix(matrix: Tensor, bias: Tensor | None = None) -> Multiply:
    """Returns the multiplication by `matrix` [k, n] from the right; for [m, k] also with a bias [n]."""

    def multiply(rows: Tensor, product: Tensor) -> None:
        if rows.dim() == 3:
            torch.bmm(rows, matrix.expand(rows.shape[0], -1, -1), out=product)
        elif bias is None:
            torch.mm(rows, matrix, out=product)
        else:
            torch.addmm(bias, rows, matrix, out=product)

    return multiply


def multiply_by(weight: Operand, scale: Tensor | None) -> Multiply:
    """Returns the multiplication of rows with this scale by the transpose of `weight` [n, k].

    The rows may be FP8 as bytes, which is how they are communicated.
    """
    matrix = weight.data.t()

    def multiply_fp8(rows: Tensor, product: Tensor) -> None:
        assert scale is not None
        assert weight.scale is not None
        if rows.dim() == 3:
            for part, into in zip(rows, product, strict=True):
                multiply_fp8(part, into)
            return
        # Fast accumulation, as in the forward of FP8 training.
        scaled = partial(torch._scaled_mm, scale_a=scale, scale_b=weight.scale, out_dtype=product.dtype, out=product)
        scaled(rows.view(weight.data.dtype), matrix, use_fast_accum=True)

    return multiply_by_matrix(matrix) if weight.scale is None else multiply_fp8


def multiplied(problem: Problem, at: int, rows: Tensor, product: Tensor | None = None) -> Tensor:
    """Returns this rank's whole GEMM on `rows` of input `at`, in `product` or newly allocated."""
    if product is None:
        product = rows.new_empty(rows.shape[0], problem.shape.gemm_shape[1], dtype=problem.out_dtype)
    multiply_by(problem.weight, problem.inputs[at].scale)(rows, product)
    return product


def multiply_beside(problem: Problem, at: int, overlap: Overlap) -> Outputs:
    """Runs the GEMM next to an independent collective, and returns both results: the gather of the same input, or the
    reduction of the same product computed earlier."""
    whole = problem.whole[at].data
    if problem.shape.gathers:
        gathering = overlap.all_gather(as_bytes(problem.inputs[at].data))
        output = multiplied(problem, at, whole)
        return Outputs(output, moved=gathering.wait().view(whole.dtype))
    scattering = overlap.reduce_scatter(whole)
    product = multiplied(problem, at, problem.inputs[at].data)
    return Outputs(scattering.wait(), product=product)
