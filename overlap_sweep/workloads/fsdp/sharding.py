"""Distributes the model: FSDP2 shards each unit, DDP keeps a replica on every rank.

With `fsdp.symmetric_memory` the buffers of FSDP2's collectives are in symmetric memory of NCCL, which moves them by
kernels that read and write the other GPUs' buffers directly, or, with the zero-CTA policy, all-gathers them by copy
engines. NVLink multicast stays off without `runtime.multicast`: NCCL 2.27 to 2.30 creates multicast objects, also for
windows of symmetric memory, only in communicators with NVLS (`nvlsSupport`), which NCCL_NVLS_ENABLE=0 turns off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.futures import Future
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from overlap_sweep.errors import Refused
from overlap_sweep.measure import DTYPES, Ranks
from overlap_sweep.workloads.fsdp.collectives import FLOOR, NONE, POINT, Collectives
from overlap_sweep.workloads.fsdp.config import COPY_ENGINES, Resolved, ResolvedFsdp
from overlap_sweep.workloads.fsdp.ranking_model import RankingModel
from overlap_sweep.workloads.fsdp.telemetry import ALL_REDUCE, AUXILIARY, REDUCE_SCATTER

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]
"""Returns an uninitialised tensor of a size."""

LEAST_TORCH = (2, 9)
"""First torch that registers a memory pool as symmetric."""
LEAST_NCCL = (2, 27)
LEAST_NCCL_OF_COPY_ENGINES = (2, 28)


def shard(model: RankingModel, point: Resolved, ranks: Ranks, collectives: Collectives) -> None:
    """Shards the model in place. Collective."""
    fsdp = point.fsdp
    replicas = fsdp.replicas
    mesh = _mesh(ranks.device.type, ranks.world_size, replicas)
    # Gradients have the type in which parameters are gathered.
    reduce_dtype = DTYPES[fsdp.reduce_dtype] if fsdp.reduce_dtype else None
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[point.precision], reduce_dtype=reduce_dtype)
    reshard = fsdp.reshard_after_forward
    # The model's units in order, those together that are gathered and reduced together.
    units: list[nn.Module] = [*model.units]
    together = fsdp.layers_per_unit
    starts = range(1, len(units) - 1, together)
    wrapped = [units[:1], *(units[start : min(start + together, len(units) - 1)] for start in starts), units[-1:]]
    for shared in wrapped:
        fully_shard(shared, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    gather_group = scatter_group = mesh["shard"].get_group()
    if fsdp.separate_reduce_scatter_group:
        scatter_group = _another_group(ranks.world_size, ranks.world_size // replicas)
        collectives.own_queues.add(REDUCE_SCATTER)
    kind = fsdp.symmetric_memory
    if kind:
        check_symmetric_memory(kind, ranks)
    gather_memory = scatter_memory = _empty
    if kind:
        gather_memory, scatter_memory = (
            symmetric_memory(group, ranks.device) for group in (gather_group, scatter_group)
        )
        gather_memory.release()
        scatter_memory.release()
    gather = _Gather(collectives, gather_memory, fsdp.limit_all_gathers)
    scatter = _Scatter(collectives, scatter_memory, scatter_group)
    # The units of one group share FSDP2's state.
    for unit, *_ in wrapped:
        unit.set_custom_all_gather(gather)  # type: ignore[operator]
        unit.set_custom_reduce_scatter(scatter)  # type: ignore[operator]
        if kind:
            # Before NCCL 2.30 its kernels for symmetric memory know no averages.
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        if replicas > 1:
            # Not FSDP2's own hybrid sharding, whose all-reduce cannot be observed.
            unit.set_all_reduce_hook(  # type: ignore[operator]
                partial(_add_replicas, mesh["replicate"].get_group(), replicas, collectives, scatter_memory),
                stream=collectives.own_stream(ALL_REDUCE),
            )
    _schedule(wrapped, fsdp, collectives)


def _empty(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(*size, dtype=dtype, device=device)


@cache
def _mesh(device: str, ranks: int, replicas: int) -> DeviceMesh:
    """Returns the mesh, cached for all points of a group, since each mesh creates process groups that stay."""
    if replicas == 1:
        # The mesh of the whole world uses the existing group.
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def _schedule(wrapped: Sequence[Sequence[Any]], fsdp: ResolvedFsdp, collectives: Collectives) -> None:
    """Sets what is prefetched with each of the units that were wrapped together. By default the host runs ahead in the
    forward, and the units before them are gathered in the backward."""
    ahead, first = fsdp.forward_prefetch, [unit for unit, *_ in wrapped]
    for index, (unit, *others) in enumerate(wrapped):
        last = others[-1] if others else unit
        if ahead:
            unit.set_modules_to_forward_prefetch(first[index + 1 : index + 1 + ahead])
        if fsdp.backward_prefetch != "BACKWARD_PRE":
            # Only a non-empty list replaces torch's own; the unit itself is gathered already.
            unit.set_modules_to_backward_prefetch([unit])
        if fsdp.backward_prefetch == "BACKWARD_POST" and index:
            unit.backward_ended = partial(first[index - 1].unshard, async_op=True)
        if fsdp.limit_all_gathers:
            last.forward_ended = collectives.layer_computed
            unit.backward_ended = partial(_each, collectives.layer_computed, unit.backward_ended)


def _add_replicas(
    group: dist.ProcessGroup, replicas: int, collectives: Collectives, memory: Allocate, gradients: Tensor
) -> None:
    """All-reduces, over the replicas, this rank's part of the reduce-scatter."""
    if collectives.mode != FLOOR:
        collectives.now(ALL_REDUCE, partial(dist.all_reduce, gradients, group=group))
    gradients.div_(replicas)
    if gradients.is_cuda:
        # FSDP2 releases them once they are cast, and the reduce-scatter's stream would reuse the memory while this
        # stream still reduces.
        gradients.record_stream(torch.cuda.current_stream())
        if isinstance(memory, SymmetricMemory):
            memory.keep_until_now(gradients)


def _each(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


class _Gather(AllGather):
    def __init__(self, collectives: Collectives, memory: Allocate, limited: bool) -> None:
        self._collectives, self._memory, self._limited = collectives, memory, limited
        self._stale: dict[tuple[object, ...], Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:  # type: ignore[override]
        if self._collectives.mode != FLOOR:
            return self._memory(size, dtype, device)
        # Parameters that are not gathered: values like weights, as the speed of GEMMs depends on the values.
        key = (*size, dtype)
        if key not in self._stale:
            self._stale[key] = torch.empty(*size, dtype=dtype, device=device).normal_(std=0.02)
        return self._stale[key]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._collectives.mode == FLOOR:
            return None
        if self._limited and self._collectives.mode == POINT:
            self._collectives.wait_for_layers()
        issue = partial(dist.all_gather_into_tensor, output_tensor, input_tensor, group)
        # On a CPU there are no streams: FSDP2 waits for the work.
        if async_op or output_tensor.device.type == "cpu":
            return self._collectives.later(AUXILIARY, issue)
        self._collectives.now(AUXILIARY, issue)
        return None


class _Scatter(ReduceScatter):
    """Reduce-scatters in `group`. FSDP2 uses the sum at once, on its own stream: on a CPU nothing can overlap it."""

    def __init__(self, collectives: Collectives, memory: Allocate, group: dist.ProcessGroup) -> None:
        self._collectives, self._memory, self._group = collectives, memory, group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:  # type: ignore[override]
        return self._memory(size, dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        if self._collectives.mode == FLOOR:
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
            return None
        issue = partial(dist.reduce_scatter_tensor, output_tensor, input_tensor, op, self._group)
        self._collectives.now(REDUCE_SCATTER, issue)
        return None


def replicate(model: nn.Module, point: Resolved, ranks: Ranks, collectives: Collectives) -> DistributedDataParallel:
    """Returns the model in DDP, its buckets reduced by a communication hook. Collective."""
    distributed = point.distributed
    replicated = DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        bucket_cap_mb=distributed.bucket_cap_mb,
        gradient_as_bucket_view=distributed.gradient_as_bucket_view,
        init_sync=point.fsdp.sync_module_states,
    )

    def hook(_: None, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        gradients.div_(ranks.world_size)
        if distributed.overlap_reduce_scatter and collectives.mode != FLOOR:
            _add_load(gradients, distributed.overlap_clone_for_reduce_scatter, ranks, collectives)
        return collectives.reduced(ALL_REDUCE, partial(dist.all_reduce, gradients), gradients)

    # DDP checks these annotations, which postponed evaluation would turn into strings.
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": Future[Tensor]}
    replicated.register_comm_hook(None, hook)
    return replicated


def _add_load(gradients: Tensor, clone: bool, ranks: Ranks, collectives: Collectives) -> None:
    short = -gradients.numel() % ranks.world_size
    whole = gradients.clone() if clone else gradients
    whole = pad(whole, (0, short)) if short else whole
    part = torch.empty(whole.numel() // ranks.world_size, dtype=whole.dtype, device=whole.device)
    issue = partial(dist.reduce_scatter_tensor, part, whole, group=_another_group(ranks.world_size, ranks.world_size))
    if collectives.mode == NONE:
        collectives.alone(REDUCE_SCATTER, issue)
    else:
        collectives.beside_step(REDUCE_SCATTER, issue, (whole, part))


@cache
def _another_group(world_size: int, size: int) -> dist.ProcessGroup:
    """Returns a second group of this rank's `size` neighbours, which waits for no other; cached like the mesh."""
    neighbours = [list(range(first, first + size)) for first in range(0, world_size, size)]
    group, _ = dist.new_subgroups_by_enumeration(neighbours)
    assert group is not None
    return group


def check_symmetric_memory(kind: str, ranks: Ranks) -> None:
    """Raises Refused where torch, NCCL or the GPUs have no symmetric memory. Collective."""
    hip, nccl = torch.version.hip, (0, 0) if torch.version.hip else torch.cuda.nccl.version()
    if reason := lacks_for_symmetric_memory(kind, torch.__version__, nccl, rocm=bool(hip)):
        raise Refused(reason)
    own = ranks.local_rank
    others = (peer for peer in range(ranks.ranks_per_node) if peer != own)
    (alone,) = ranks.slowest([float(any(not torch.cuda.can_device_access_peer(own, peer) for peer in others))])
    if alone:
        raise Refused(f"fsdp.symmetric_memory={kind} needs GPUs with peer access to each other")


def lacks_for_symmetric_memory(kind: str, torch_version: str, nccl: Sequence[int], *, rocm: bool) -> str | None:
    """Returns what the installed libraries lack for symmetric memory; None if nothing."""
    given = f"fsdp.symmetric_memory={kind}"
    if rocm:
        return f"{given} needs NCCL; this torch is built for ROCm"
    if tuple(map(int, torch_version.split(".")[:2])) < LEAST_TORCH:
        return f"{given} needs torch {_dotted(LEAST_TORCH)}; {torch_version} is installed"
    least = LEAST_NCCL_OF_COPY_ENGINES if kind == COPY_ENGINES else LEAST_NCCL
    if tuple(nccl[:2]) < least:
        return f"{given} needs NCCL {_dotted(least)}; torch has {_dotted(nccl)}"
    return None


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


_PART_BYTES = 16
"""NCCL's kernels for symmetric memory (seen with 2.28.9) gather parts wrongly whose size is no multiple of this."""

_SEGMENT_BYTES, _LEAST_SEGMENT_BYTES = 2 << 20, 10 << 20
"""From the second on, torch's allocator asks for multiples of the first as they are, and puts nothing else there."""


@dataclass(eq=False)
class _Buffer:
    """A buffer in symmetric memory."""

    memory: Tensor
    """Its bytes."""
    stream: torch.cuda.Stream | None
    """What uses it now; None between points."""
    used: torch.cuda.Event | None = None
    """What another stream did with it last."""

    @property
    def is_free(self) -> bool:
        """Returns whether no tensor but its own uses it: the storage and the handle to ask it are two."""
        storage = self.memory.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) == 2


class SymmetricMemory:
    """Allocates in symmetric memory of a group, or in usual memory what its kernels would move wrongly.

    NCCL's kernels find a peer's buffer by window and offset, so all ranks must take the same buffer each time. torch's
    allocator takes the free block of the lowest address, another one on each rank: buffers are kept here, and reused in
    the order in which they were made, by the stream that used them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # A pool can only be registered with a communicator that exists; the first collective makes it.
        dist.barrier(group)
        backend: Any = group._get_backend(device)
        self._aligned_bytes = _PART_BYTES * group.size()
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        # Also registers what is allocated later.
        backend.register_mem_pool(self._pool, symm=True)
        self._buffers: list[_Buffer] = []

    def release(self) -> None:
        """Leaves the buffers of points that have ended to other streams."""
        torch.cuda.synchronize()
        for buffer in self._buffers:
            buffer.stream = None

    def keep_until_now(self, tensor: Tensor) -> None:
        """Leaves the tensor's buffer to its stream once the current one has got here; one in usual memory has none."""
        for own in self._buffers:
            if own.memory.data_ptr() == tensor.untyped_storage().data_ptr():
                own.used = torch.cuda.current_stream().record_event()

    def __call__(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        stream, count = torch.cuda.current_stream(), prod(size)
        wanted = count * dtype.itemsize
        if wanted % self._aligned_bytes:
            return _empty(size, dtype, device)
        fitting = (one for one in self._buffers if one.memory.numel() >= wanted and one.stream in (None, stream))
        free = min((one for one in fitting if one.is_free), key=lambda one: one.memory.numel(), default=None)
        if free is None:
            rounded = max(_LEAST_SEGMENT_BYTES, -(-wanted // _SEGMENT_BYTES) * _SEGMENT_BYTES)
            with torch.cuda.use_mem_pool(self._pool):
                free = _Buffer(torch.empty(rounded, dtype=torch.uint8, device=device), stream)
            self._buffers.append(free)
        if free.used:
            stream.wait_event(free.used)
        free.stream, free.used = stream, None
        return free.memory[:wanted].view(dtype).view(*size)


@cache
def symmetric_memory(group: dist.ProcessGroup, device: torch.device) -> SymmetricMemory:
    """Returns that of the group, cached, since what NCCL has registered stays. Collective."""
    return SymmetricMemory(group, device)
