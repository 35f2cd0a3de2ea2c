"""Collectives that may use only a share of the machine, and run beside computation until waited for.

A communicator has four operations, each returning a `Pending` result. `num_sm` is its share: the CTAs of an NCCL
communicator; on gloo the number of chunks that move at once, each on a worker thread of its own. None is the
library's own choice on the group that the worker began with, which is what does-not-overlap is measured with.
`SilentCommunicator` moves nothing at all, for the floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_sweep.measure.ranks import Ranks

# torch 2.13 renames these and warns about the old names; 2.11 has only the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# torch's type stubs know neither the constructor nor the methods that Python may override.
_ProcessGroup: Any = dist.ProcessGroup

_c10d: Any = torch._C._distributed_c10d


def _all_reduce(tensor: Tensor, group: Any) -> Waitable:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work


def all_gather_now(shard: Tensor, ranks: Ranks) -> Tensor:
    """By the library's own choice on the group that the worker began with, and in the stream's order: what is called
    where nothing overlaps. [rows, columns] of every rank -> [world_size * rows, columns]."""
    full = shard.new_empty(ranks.world_size * shard.shape[0], *shard.shape[1:])
    _all_gather(full, shard)
    return full


def reduce_scatter_now(full: Tensor, ranks: Ranks) -> Tensor:
    """As `all_gather_now`. [world_size * rows, columns] of every rank -> this rank's [rows, columns] of their sum."""
    shard = full.new_empty(full.shape[0] // ranks.world_size, *full.shape[1:])
    _reduce_scatter(shard, full)
    return shard


def all_reduce_now(partial: Tensor) -> Tensor:
    """As `all_gather_now`: `partial` becomes the sum over the ranks."""
    dist.all_reduce(partial)
    return partial


class Waitable(Protocol):
    def wait(self) -> Any: ...


class Pending:
    """A tensor that is complete once every part of its communication has been waited for."""

    def __init__(self, result: Tensor, works: Sequence[Waitable], sources: Sequence[Tensor] = ()) -> None:
        self._result, self._works = result, works
        # Kept so that nothing is written over memory that is still being sent.
        self._sources = sources

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._result


class Communicator(Protocol):
    def all_gather(self, shard: Tensor) -> Pending:
        """[rows, columns] of every rank -> [world_size * rows, columns], by rank."""

    def reduce_scatter(self, full: Tensor, shard: Tensor | None = None) -> Pending:
        """[world_size * rows, columns] of every rank -> this rank's [rows, columns] of their sum, into `shard`."""

    def all_reduce(self, partial: Tensor) -> Pending:
        """`partial` of every rank -> their sum, in its place."""

    def exchange(self, outgoing: Tensor, incoming: Tensor, to: int, source: int) -> Pending:
        """Send `outgoing` to one rank while `incoming` is filled by another; both contiguous."""


MakeCommunicator = Callable[[int | None, int | None], Communicator]
"""(num_sm, cga_size) -> the communicator with this share."""


@cache
def communicator(
    ranks: Ranks, num_sm: int | None = None, cga_size: int | None = None, replicas: int = 1
) -> Communicator:
    """The communicator with this share, made once per worker: a collective call, alike on every rank.

    `ranks` are those that communicate. Where there are several `replicas` of them, neighbours among all ranks of the
    worker group, each replica gets one of its own.
    """
    if ranks.device.type == "cuda":
        return _Nccl(ranks, num_sm, cga_size, replicas)
    return _Gloo(ranks, num_sm, replicas)


def _own_group(
    ranks: Ranks, replicas: int, backend: str, make_options: Callable[[], Any]
) -> tuple[dist.ProcessGroup | None, int]:
    """A new process group of this rank's replica, and the first of its ranks among all."""
    if replicas == 1:
        return dist.new_group(backend=backend, pg_options=make_options()), 0
    firsts = range(0, replicas * ranks.world_size, ranks.world_size)
    # Every rank of the worker group has to take part in making every group.
    groups = [
        dist.new_group(list(range(first, first + ranks.world_size)), backend=backend, pg_options=make_options())
        for first in firsts
    ]
    replica = dist.get_rank() // ranks.world_size
    return groups[replica], firsts[replica]


class _Nccl:
    def __init__(self, ranks: Ranks, num_sm: int | None, cga_size: int | None, replicas: int) -> None:
        self._world_size = ranks.world_size
        self._group: Any = None
        self._first = 0

        def options() -> Any:
            if num_sm is None:
                return None
            share = dist.ProcessGroupNCCL.Options()
            share.config.min_ctas = share.config.max_ctas = num_sm
            if cga_size is not None:
                share.config.cga_cluster_size = cga_size
            return share

        if num_sm is not None or replicas > 1:
            self._group, self._first = _own_group(ranks, replicas, "nccl", options)

    def all_gather(self, shard: Tensor) -> Pending:
        full = shard.new_empty(self._world_size * shard.shape[0], *shard.shape[1:])
        return Pending(full, [_all_gather(full, shard, group=self._group, async_op=True)], [shard])

    def reduce_scatter(self, full: Tensor, shard: Tensor | None = None) -> Pending:
        if shard is None:
            shard = full.new_empty(full.shape[0] // self._world_size, *full.shape[1:])
        return Pending(shard, [_reduce_scatter(shard, full, group=self._group, async_op=True)], [full])

    def all_reduce(self, partial: Tensor) -> Pending:
        return Pending(partial, [_all_reduce(partial, self._group)])

    def exchange(self, outgoing: Tensor, incoming: Tensor, to: int, source: int) -> Pending:
        send = dist.P2POp(dist.isend, outgoing, self._first + to, self._group)
        receive = dist.P2POp(dist.irecv, incoming, self._first + source, self._group)
        return Pending(incoming, dist.batch_isend_irecv([send, receive]), [outgoing])


class _Waited:
    """A thread's task, waited for as a collective's work is."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class _Gloo:
    def __init__(self, ranks: Ranks, num_sm: int | None, replicas: int) -> None:
        self._world_size, self._chunks = ranks.world_size, num_sm or 1
        self._group: Any = None
        self._first = 0

        def options() -> Any:
            if num_sm is None:
                return None
            # torch keeps these options private; they are the only way to a group's number of threads.
            share = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            share._threads = num_sm
            share._timeout = timedelta(minutes=30)
            share._devices = [dist.ProcessGroupGloo.create_default_device()]
            return share

        if num_sm is not None or replicas > 1:
            self._group, self._first = _own_group(ranks, replicas, "gloo", options)
        # gloo's isend ends when it is waited for, so only a blocking call in a thread overlaps (and shows when
        # the transfer ended).
        self._threads = ThreadPoolExecutor(self._chunks, thread_name_prefix="exchange")

    def _spans(self, rows: int) -> list[slice]:
        cuts = torch.arange(rows).tensor_split(min(self._chunks, rows))
        return [slice(int(part[0]), int(part[-1]) + 1) for part in cuts]

    def all_gather(self, shard: Tensor) -> Pending:
        full = shard.new_empty(self._world_size * shard.shape[0], *shard.shape[1:])
        by_rank = full.view(self._world_size, *shard.shape)
        works = [
            dist.all_gather([part[span] for part in by_rank], shard[span], group=self._group, async_op=True)
            for span in self._spans(shard.shape[0])
        ]
        return Pending(full, works, [shard])

    def reduce_scatter(self, full: Tensor, shard: Tensor | None = None) -> Pending:
        if shard is None:
            shard = full.new_empty(full.shape[0] // self._world_size, *full.shape[1:])
        by_rank = full.view(self._world_size, *shard.shape)
        works, parts = [], []
        for span in self._spans(shard.shape[0]):
            part = by_rank[:, span].flatten(0, 1)
            works.append(_reduce_scatter(shard[span], part, group=self._group, async_op=True))
            parts.append(part)
        return Pending(shard, works, parts)

    def all_reduce(self, partial: Tensor) -> Pending:
        spans = self._spans(partial.shape[0])
        return Pending(partial, [_all_reduce(partial[span], self._group) for span in spans])

    def exchange(self, outgoing: Tensor, incoming: Tensor, to: int, source: int) -> Pending:
        def exchange_part(span: slice, tag: int) -> None:
            sent = dist.isend(outgoing[span], self._first + to, group=self._group, tag=tag)
            dist.recv(incoming[span], self._first + source, group=self._group, tag=tag)
            assert sent is not None
            sent.wait()

        spans = self._spans(outgoing.shape[0])
        works = [_Waited(self._threads.submit(exchange_part, span, tag)) for tag, span in enumerate(spans)]
        return Pending(incoming, works, [outgoing])


class SilentCommunicator:
    """Moves nothing.

    What is gathered is a buffer that was filled once, with copies of the first shard of that shape: a GEMM on real
    numbers takes longer than one on zeros. What is scattered is a view of this rank's rows. Nothing is copied.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._gathered: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def all_gather(self, shard: Tensor) -> Pending:
        key = tuple(shard.shape), shard.dtype
        if key not in self._gathered:
            self._gathered[key] = torch.cat([shard.detach()] * self._ranks.world_size)
        return Pending(self._gathered[key], [])

    def reduce_scatter(self, full: Tensor, shard: Tensor | None = None) -> Pending:
        return Pending(full.chunk(self._ranks.world_size)[self._ranks.rank], [])

    def all_reduce(self, partial: Tensor) -> Pending:
        return Pending(partial, [])

    def exchange(self, outgoing: Tensor, incoming: Tensor, to: int, source: int) -> Pending:
        return Pending(incoming, [])


class SilentGroup(_ProcessGroup):
    """Looks like a group of `size` ranks to `torch.distributed`; its collectives take no time on the GPU.

    What is gathered is a buffer that was filled once, with copies of the first shard of that shape: a GEMM on real
    numbers takes longer than one on zeros. What is scattered is a view of this rank's part of the input. It is not
    registered with torch.distributed, which would want a backend for it; use it as a group, not as a default.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gathered: dict[tuple[Any, ...], Tensor] = {}

    def all_gather_single(self, output: Tensor, shard: Tensor, options: Any = None) -> dist.Work:
        key = tuple(output.shape), output.dtype
        if key not in self._gathered:
            self._gathered[key] = shard.detach().reshape(-1).repeat(self.size()).view(output.shape)
        _rebind(output, self._gathered[key])
        return _done()

    def reduce_scatter_single(self, output: Tensor, full: Tensor, options: Any = None) -> dist.Work:
        _rebind(output, full.detach().reshape(self.size(), -1)[self.rank()].view(output.shape))
        return _done()

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:
        return _done()

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


def _rebind(output: Tensor, source: Tensor) -> None:
    """Make `output` a view of `source`'s memory: nothing is copied."""
    output.set_(source.untyped_storage(), source.storage_offset(), source.shape, source.stride())


def _done() -> dist.Work:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    work: dist.Work = _c10d._create_work_from_future(future)
    return work
