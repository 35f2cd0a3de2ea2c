"""Run a function on every rank of a real process group."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

multiprocessing.set_forkserver_preload(["torch", "torch.distributed"])


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    device: str = "cpu",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:
    """`function(ranks, *arguments)` on each rank; their results by rank. A rank's exception fails the call."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    with context.Pool(world_size) as pool:
        jobs = [
            pool.apply_async(_on_rank, (rank, world_size, port, device, dict(environment), function, arguments))
            for rank in range(world_size)
        ]
        return [job.get(timeout=120) for job in jobs]


def _on_rank(
    rank: int,
    world_size: int,
    port: int,
    device: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    import torch
    import torch.distributed as dist

    from overlap_sweep.ranks import Ranks
    from overlap_sweep.runtime.group import NO_MULTICAST

    torch.set_num_threads(1)
    os.environ.update(environment)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        os.environ.update(NO_MULTICAST)
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
        device_id=here if device == "cuda" else None,
    )
    try:
        return function(Ranks(rank, world_size, here), *arguments)
    finally:
        dist.destroy_process_group()
