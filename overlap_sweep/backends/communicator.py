"""Collectives that may use only a share of the machine and run asynchronously, until waited for.

`num_sm` is a communicator's share: the CTAs of an NCCL communicator; on gloo the number of chunks that move at once,
each on a worker thread of its own. None is the library's own choice on the group that the worker began with, which is
what `none` is measured with. `SilentCommunicator` moves nothing at all, for the floor.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap_sweep.measure import Ranks

_Collective = Callable[..., dist.Work]

# torch 2.13 renames these and warns about the old names; 2.11 has only the old ones.
all_gather: _Collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: _Collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# With async_op, or on a rank in the group, they never return None.
_all_reduce: _Collective = dist.all_reduce
_all_to_all: _Collective = dist.all_to_all_single
_isend: _Collective = dist.isend  # type: ignore[assignment]

# torch's type stubs know neither the constructor nor the methods that Python may override.
_ProcessGroup: Any = dist.ProcessGroup


class Pending:
    """A tensor that is complete once every part of its communication has been waited for."""

    def __init__(self, result: Tensor, waits: Sequence[Callable[[], object]], sources: Sequence[Tensor] = ()) -> None:
        self._result, self._waits = result, waits
        # Kept alive so that memory is not reused while it is being sent.
        self._sources = sources

    def wait(self) -> Tensor:
        for wait in self._waits:
            wait()
        return self._result


class Communicator:
    """Collectives of one group, each one call of torch.distributed, as for NCCL."""

    def __init__(self, group: dist.ProcessGroup | None, world_size: int, first: int = 0) -> None:
        """`group`: None for all ranks; `first`: the group's first rank among all ranks."""
        self._group, self._world_size, self._first = group, world_size, first

    def all_gather(self, shard: Tensor) -> Pending:
        """Returns [world_size * rows, columns], by rank, from [rows, columns] of every rank."""
        full = shard.new_empty(self._full_shape(shard))
        return Pending(full, [all_gather(full, shard, group=self._group, async_op=True).wait], [shard])

    def reduce_scatter(self, full: Tensor, shard: Tensor | None = None) -> Pending:
        """Returns this rank's [rows, columns] of the sum of every rank's [world_size * rows, columns], into `shard`."""
        shard = full.new_empty(full.shape[0] // self._world_size, *full.shape[1:]) if shard is None else shard
        by_rank, spans = full.view(self._world_size, *shard.shape), self._spans(shard.shape[0])
        # A view of all of it, copies of its parts.
        parts = [by_rank[:, span].flatten(0, 1) for span in spans]
        works = [
            reduce_scatter(shard[span], part, group=self._group, async_op=True)
            for span, part in zip(spans, parts, strict=True)
        ]
        return Pending(shard, [work.wait for work in works], parts)

    def all_to_all(self, full: Tensor) -> Pending:
        """Returns every rank's part for this rank of [world_size * rows, columns], by rank; on gloo in one piece."""
        received = torch.empty_like(full)
        return Pending(received, [_all_to_all(received, full, group=self._group, async_op=True).wait], [full])

    def all_reduce(self, partial: Tensor) -> Pending:
        """Returns the sum of every rank's `partial`, in place."""
        works = [_all_reduce(partial[span], group=self._group, async_op=True) for span in self._spans(partial.shape[0])]
        return Pending(partial, [work.wait for work in works])

    def exchange(self, outgoing: Tensor, incoming: Tensor, to: int, source: int) -> Pending:
        """Sends `outgoing` to one rank while `incoming` is filled by another; both contiguous."""
        send = dist.P2POp(dist.isend, outgoing, self._first + to, self._group)
        receive = dist.P2POp(dist.irecv, incoming, self._first + source, self._group)
        return Pending(incoming, [work.wait for work in dist.batch_isend_irecv([send, receive])], [outgoing])

    def _spans(self, rows: int) -> list[slice]:
        """Returns the rows that each call moves."""
        return [slice(None)]

    def _full_shape(self, shard: Tensor) -> tuple[int, ...]:
        return (self._world_size * shard.shape[0], *shard.shape[1:])


@cache
def communicator(
    ranks: Ranks, num_sm: int | None = None, cga_size: int | None = None, replicas: int = 1
) -> Communicator:
    """Returns the communicator with this share, created once per worker. Collective, with the same arguments on every
    rank.

    `ranks`: the ranks that communicate. With several `replicas`, neighbours among all ranks of the worker group, each
    replica gets its own communicator.
    """
    on_gpu, world_size = ranks.device.type == "cuda", ranks.world_size
    group, first = None, 0
    if num_sm is not None or replicas > 1:
        # Every rank of the worker group must take part in creating every group.
        groups = {
            start: _new_group(on_gpu, num_sm, cga_size, list(range(start, start + world_size)))
            for start in range(0, replicas * world_size, world_size)
        }
        first = dist.get_rank() // world_size * world_size
        group = groups[first]
    return Communicator(group, world_size, first) if on_gpu else _Gloo(group, world_size, first, num_sm or 1)


@cache
def own_group(ranks: Ranks, purpose: str, num_sm: int | None = None) -> dist.ProcessGroup | None:
    """Returns a further group of all ranks for this purpose, which has this share, created once per worker.
    Collective."""
    return _new_group(ranks.device.type == "cuda", num_sm)


def _new_group(
    on_gpu: bool, num_sm: int | None, cga_size: int | None = None, members: list[int] | None = None
) -> dist.ProcessGroup | None:
    options: object = None
    if num_sm is not None and on_gpu:
        options = nccl = dist.ProcessGroupNCCL.Options()
        nccl.config.min_ctas = nccl.config.max_ctas = num_sm
        if cga_size is not None:
            nccl.config.cga_cluster_size = cga_size
    elif num_sm is not None:
        # These private options are the only way to set a group's number of threads.
        options = gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._threads = num_sm
        gloo._timeout = timedelta(minutes=30)
        gloo._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.new_group(members, backend="nccl" if on_gpu else "gloo", pg_options=options)


class _Gloo(Communicator):
    def __init__(self, group: dist.ProcessGroup | None, world_size: int, first: int, chunks: int) -> None:
        super().__init__(group, world_size, first)
        self._chunks = chunks
        # gloo's isend ends when it is waited for, so only a blocking call in a thread overlaps (and shows when
        # the transfer ended).
        self._threads = ThreadPoolExecutor(chunks, thread_name_prefix="exchange")

    def _spans(self, rows: int) -> list[slice]:
        cuts = torch.arange(rows).tensor_split(min(self._chunks, rows))
        return [slice(int(part[0]), int(part[-1]) + 1) for part in cuts]

    def all_gather(self, shard: Tensor) -> Pending:
        full = shard.new_empty(self._full_shape(shard))
        by_rank = full.view(self._world_size, *shard.shape)
        works = [
            dist.all_gather([part[span] for part in by_rank], shard[span], group=self._group, async_op=True)
            for span in self._spans(shard.shape[0])
        ]
        return Pending(full, [work.wait for work in works], [shard])

    def exchange(self, outgoing: Tensor, incoming: Tensor, to: int, source: int) -> Pending:
        def exchange_part(span: slice, tag: int) -> None:
            sent = _isend(outgoing[span], self._first + to, group=self._group, tag=tag)
            dist.recv(incoming[span], self._first + source, group=self._group, tag=tag)
            sent.wait()

        spans = self._spans(outgoing.shape[0])
        tasks = [self._threads.submit(exchange_part, span, tag) for tag, span in enumerate(spans)]
        return Pending(incoming, [task.result for task in tasks], [outgoing])


class SilentGroup(_ProcessGroup):
    """Looks like a group of `size` ranks to `torch.distributed`; its collectives take no time on the GPU.

    An all-gather returns a buffer filled once with copies of the first shard of that shape, because a GEMM on real
    numbers takes longer than one on zeros, and so does an all-to-all that receives more than it sends; one that does
    not returns a view of the input, and a reduce-scatter of this rank's part of it. The group is not registered with
    torch.distributed, which would require a backend, so it cannot be the default group.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._repeated: dict[tuple[object, ...], Tensor] = {}

    def repeated(self, source: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns the tensor of this shape that was filled with copies of the first `source`."""
        key = (*shape, source.dtype)
        if key not in self._repeated:
            values, count = source.detach().reshape(-1), prod(shape)
            if not len(values):
                values = source.new_zeros(1)
            self._repeated[key] = values.repeat(-(-count // len(values)))[:count].view(shape)
        return self._repeated[key]

    def all_gather_single(self, output: Tensor, shard: Tensor, options: object = None) -> dist.Work:
        return _result_is(self.repeated(shard, output.shape), output)

    def reduce_scatter_single(self, output: Tensor, full: Tensor, options: object = None) -> dist.Work:
        return _result_is(full.detach().reshape(self.size(), *output.shape)[self.rank()], output)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int], options: object = None
    ) -> dist.Work:
        rows = len(output)
        enough = given.detach()[:rows] if rows <= len(given) else self.repeated(given, output.shape)
        return _result_is(enough, output)

    def allreduce(self, tensors: Sequence[Tensor], options: object = None) -> dist.Work:
        return done()

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], options: object = None
    ) -> dist.Work:
        for output, shard in zip(outputs, shards, strict=True):
            self.all_gather_single(output, shard)
        return done()

    def _start_coalescing(self, device: torch.device) -> None:
        """Begins a block of collectives that torch.distributed passes on together."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return done()

    allreduce_coalesced = allreduce
    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


cached_silent_group = cache(SilentGroup)


class SilentCommunicator(Communicator):
    """Moves nothing, for the floor, and takes no time on the host, while a call of torch.distributed takes 40 to 90 us
    on a CPU. Results are as in SilentGroup."""

    def __init__(self, ranks: Ranks) -> None:
        self._silent = SilentGroup(ranks.rank, ranks.world_size)
        super().__init__(self._silent, ranks.world_size)

    def all_gather(self, shard: Tensor) -> Pending:
        return Pending(self._silent.repeated(shard, self._full_shape(shard)), [])

    def reduce_scatter(self, full: Tensor, shard: Tensor | None = None) -> Pending:
        return Pending(full.chunk(self._world_size)[self._silent.rank()], [])


def _result_is(result: Tensor, output: Tensor) -> dist.Work:
    """Makes `output` a view of the result's memory, without a copy unless it is itself a part of another tensor.
    Returns a work that has ended."""
    if output._is_view():
        output.copy_(result)
    else:
        output.set_(result.untyped_storage(), result.storage_offset(), result.shape, result.stride())
    return done()


def done() -> dist.Work:
    """Returns a work that has ended."""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    work: dist.Work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


def as_bytes(data: Tensor) -> Tensor:
    """Returns FP8 as the bytes that every library communicates; other types as they are."""
    return data.view(torch.uint8) if data.element_size() == 1 else data
