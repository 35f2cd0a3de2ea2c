"""Replicated models whose gradients are summed.

Arithmetic for two H200s: 650 TFLOP/s, all-reduce at 190 GB/s of gradients. A Block's 16 hidden^2 bytes take
8.4e-11 hidden^2 seconds, its backward pass 4.9e-14 hidden^2 tokens: communication is 1700 / tokens
of the backward pass.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from causes.scenario import Job, Sizes, Step, adam, blocks, ddp, scenario, training

# Ranks and gloo's threads share the cores: each waits for the others at times.
SHARED_CORES = {"also": ("contention", "dependency", "straggler")}


@scenario("none", "contention", cpu=SHARED_CORES)
def ddp_overlapped(job: Job) -> Step:
    """DDP with 25 MB buckets and a large batch: only the last bucket has no computation beside it."""
    # 0.18 ms of the last 34 MB against 15 ms.
    sizes = job.sizes(Sizes(2048, 12288, 4), Sizes(128, 2048, 4))
    return training(ddp(job, blocks(job, sizes), 25 if job.on_gpu else 0.5), job.random(sizes.tokens, sizes.hidden))


@scenario("issued_late", twin="ddp_overlapped")
@scenario("issued_late", name="no_profiler_step", marked_steps=False)
def ddp_one_bucket(job: Job) -> Step:
    """DDP with one bucket for all gradients: the all-reduce starts when backward is over."""
    # 1.07 GB take 5.6 ms, forward and backward 20 ms.
    sizes = job.sizes(Sizes(4096, 4096, 4), Sizes(256, 512, 4))
    return training(ddp(job, blocks(job, sizes), 10_000), job.random(sizes.tokens, sizes.hidden))


@scenario("issued_late", "dependency", twin="ddp_overlapped")
def reduce_after_backward(job: Job) -> Step:
    """Data parallelism by hand: after backward a blocking all-reduce of each gradient."""
    sizes = job.sizes(Sizes(4096, 4096, 4), Sizes(256, 512, 4))
    model, x, group = blocks(job, sizes), job.random(sizes.tokens, sizes.hidden), job.group("DP")
    optimizer = adam(model)

    def step() -> None:
        model(x).float().square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=group)
            parameter.grad /= job.ranks
        optimizer.step()
        optimizer.zero_grad()

    return step


@scenario("bandwidth", "contention", cpu=SHARED_CORES)
def ddp_tiny_batch(job: Job) -> Step:
    """DDP with few tokens: the gradients take longer than the whole backward pass."""
    # 5.6 ms against about 2 ms of backward, bound by reading weights.
    sizes = job.sizes(Sizes(4096, 256, 4), Sizes(768, 16, 3))
    return training(ddp(job, blocks(job, sizes), 25 if job.on_gpu else 4), job.random(sizes.tokens, sizes.hidden))


def more_products(job: Job, count: int, size: int, rows: int) -> Step:
    """Computes `count` GEMMs of one shape on the last rank, and nothing on the others."""
    a, b = job.random(rows, size), job.random(size, size)

    def compute() -> None:
        if job.rank == job.ranks - 1:
            for _ in range(count):
                a @ b

    return compute


@scenario("straggler", "contention", late_rank=1, twin="ddp_overlapped", cpu=SHARED_CORES)
def ddp_straggler(job: Job) -> Step:
    """DDP where rank 1 computes some GEMMs more between forward and backward."""
    # On a GPU 6 x 0.85 ms beside 15 ms, on a CPU 6 x 4 ms beside 60 to 80 ms.
    sizes = job.sizes(Sizes(2048, 12288, 4), Sizes(128, 2048, 4))
    model = ddp(job, blocks(job, sizes), 25 if job.on_gpu else 0.5)
    late = more_products(job, 6, 4096, 16384) if job.on_gpu else more_products(job, 6, 512, 1024)
    return training(model, job.random(sizes.tokens, sizes.hidden), before_backward=late)


@scenario("straggler", "host_bound", late_rank=1, twin="ddp_overlapped", cpu=SHARED_CORES)
def host_straggler(job: Job) -> Step:
    """DDP where rank 1's host sleeps between forward and backward, as for a slow data loader or garbage collection."""
    # A host runs ahead of its GPU and makes up for a sleep that is shorter than the GPU's step, here of 6 ms.
    sizes = job.sizes(Sizes(2048, 4096, 4), Sizes(128, 2048, 4))
    seconds = 0.012 if job.on_gpu else 0.025

    def sleep() -> None:
        if job.rank == job.ranks - 1:
            time.sleep(seconds)

    model = ddp(job, blocks(job, sizes), 25 if job.on_gpu else 0.5)
    return training(model, job.random(sizes.tokens, sizes.hidden), before_backward=sleep)


class Head(torch.nn.Module):
    """Three wide layers over 256 rows, the mean of all: many parameters and hardly any computation."""

    def __init__(self, job: Job, hidden: int, wide: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            job.linear(hidden, wide), torch.nn.ReLU(), job.linear(wide, wide), torch.nn.ReLU(), job.linear(wide, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(256, -1, x.shape[-1]).mean(1))


@scenario(
    "queue_order",
    "contention",
    name="ddp_connections_1",
    devices=("cuda",),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    twin="ddp_connections_32",
)
@scenario(
    "none",
    "contention",
    name="ddp_connections_32",
    devices=("cuda",),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
)
def ddp_connections(job: Job) -> Step:
    """DDP of a model with most parameters in its head, as VGG has: its gradients pile up while the trunk computes."""
    # The head's 670 MB take 3.5 ms and are first; the trunk's backward takes 10 ms. In a single hardware queue each
    # bucket's all-reduce waits for the one before, and the trunk's kernels behind it wait as well.
    sizes = job.sizes(Sizes(2048, 12288, 4), Sizes(128, 4096, 3))
    head = Head(job, sizes.hidden, 16384 if job.on_gpu else 512)
    model = torch.nn.Sequential(*blocks(job, sizes), head)
    return training(ddp(job, model), job.random(sizes.tokens, sizes.hidden))
