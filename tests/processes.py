"""Run a function on every rank of a real process group."""

import atexit
import multiprocessing
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from overlap_sweep.gpus import visible_gpus

SLOW_TO_IMPORT = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.modeling_utils"]
"""Modules that many tests need. Importing them may ask for GPUs, after which no forked process can use these."""
multiprocessing.set_forkserver_preload(["torch", "torch.distributed", *([] if visible_gpus() else SLOW_TO_IMPORT)])

TIMEOUT_S = 240.0
"""Of a call, however busy the machine is."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    device: str = "cpu",
    environment: Mapping[str, str] = MappingProxyType({}),
    keep: str = "",
) -> list[Any]:
    """`function(ranks, *arguments)` on each rank; their results by rank. A rank's exception fails the call.

    The processes are new. With `keep` they are those that an earlier call kept under that name, and what they have
    imported: for functions on the CPU that leave nothing else behind.
    """
    group = _kept.pop((keep, world_size), None) or ProcessGroup(world_size, device, dict(environment))
    try:
        results = group.run(_call, function, *arguments)
        if keep:
            _kept[keep, world_size] = group
        else:
            group.run(_leave)
    finally:
        if (keep, world_size) not in _kept:
            group.close()
    return results


class ProcessGroup:
    """Processes that are the ranks of one group until it is closed."""

    def __init__(self, world_size: int, device: str, environment: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        self._ranks = [context.Pool(1) for _ in range(world_size)]
        port = self._ranks[0].apply(_open_store)
        self._run(_join, *[(rank, world_size, port, device, environment) for rank in range(world_size)])

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._run(function, *[arguments] * len(self._ranks))

    def _run(self, function: Callable[..., Any], *of_ranks: tuple[Any, ...]) -> list[Any]:
        jobs = [rank.apply_async(function, given) for rank, given in zip(self._ranks, of_ranks, strict=True)]
        return [job.get(timeout=TIMEOUT_S) for job in jobs]

    def close(self) -> None:
        for rank in self._ranks:
            rank.terminate()


_kept: dict[tuple[str, int], ProcessGroup] = {}
atexit.register(lambda: [group.close() for group in _kept.values()])
_this_rank: list[Any] = []
_store: list[Any] = []


def _open_store() -> int:
    """Returns the port, which the system chooses as it is bound: nobody else can have taken it meanwhile."""
    from torch.distributed import TCPStore

    _store.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return int(_store[0].port)


def _join(rank: int, world_size: int, port: int, device: str, environment: dict[str, str]) -> None:
    import torch
    import torch.distributed as dist

    from overlap_sweep.measure import Ranks
    from overlap_sweep.results.identity import NO_MULTICAST

    torch.set_num_threads(1)
    os.environ.update(environment)
    on_one = "RANKS_ON_ONE_GPU" in os.environ
    if on_one:
        os.environ["NCCL_HOSTID"] = f"rank {rank}"
    here = torch.device(device, 0 if on_one else rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        os.environ.update(NO_MULTICAST)
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=_store.pop() if _store else dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
        device_id=here if device == "cuda" else None,
    )
    _this_rank.append(Ranks(rank, world_size, here))


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*_this_rank, *arguments)


def _leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()
