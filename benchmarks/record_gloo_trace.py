"""Records the trace of a small tensor-parallel step on gloo: `python benchmarks/record_gloo_trace.py DIR [N ranks]`.

Rank r writes DIR/rank<r>.json. A step has the operations of a CPU backend: a blocking all-gather before a GEMM, and
during GEMMs an all-gather, a reduce-scatter, and point-to-point transfers by a helper thread.
"""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

ROWS, INNER, STEPS = 96, 256, 2


class ColumnParallel(torch.autograd.Function):
    """x [rows, inner] is gathered, y = x w^T; bulk overlap backward. Forward also passes x around the ring."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, helper: ThreadPoolExecutor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        passed = helper.submit(pass_on, x.detach())
        gathered = gather(x)
        y = gathered @ w.t()
        passed.result()
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gy,) = gradients
        x, w = ctx.saved_tensors
        gathered = torch.empty(x.shape[0] * dist.get_world_size(), x.shape[1])
        gathering = dist.all_gather_into_tensor(gathered, x, async_op=True)
        gx_full = gy @ w
        gathering.wait()
        gx = torch.empty_like(x)
        scattering = dist.reduce_scatter_tensor(gx, gx_full, async_op=True)
        gw = gy.t() @ gathered
        scattering.wait()
        return gx, gw, None


def gather(x: torch.Tensor) -> torch.Tensor:
    gathered = torch.empty(x.shape[0] * dist.get_world_size(), x.shape[1])
    dist.all_gather_into_tensor(gathered, x)
    return gathered


def pass_on(x: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    if rank % 2:
        dist.recv(received, (rank - 1) % ranks)
        dist.send(x, (rank + 1) % ranks)
    else:
        dist.send(x, (rank + 1) % ranks)
        dist.recv(received, (rank - 1) % ranks)


def run(rank: int, ranks: int, port: int, directory: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    x = torch.randn(ROWS, INNER, requires_grad=True)
    w = torch.randn(2 * INNER, INNER, requires_grad=True)
    with ThreadPoolExecutor(1) as helper:

        def step() -> None:
            y = torch.nn.functional.gelu(ColumnParallel.apply(x, w, helper))
            y.sum().backward()

        step()
        everything = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everything) as profiler:
            for _ in range(STEPS):
                step()
    profiler.export_chrome_trace(str(Path(directory) / f"rank{rank}.json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free_port = listener.getsockname()[1]
    world_size = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    torch.multiprocessing.start_processes(run, (world_size, free_port, sys.argv[1]), world_size, start_method="spawn")
