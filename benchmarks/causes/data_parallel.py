"""Replicated models whose gradients are summed.

Arithmetic for two H200s: 650 TFLOP/s, all-reduce at 300 GB/s of gradients. A Block's 16 hidden^2 bytes take
5.3e-11 hidden^2 seconds, its backward pass 4.9e-14 hidden^2 tokens: communication is 1100 / tokens
of the backward pass.
"""

import time
from contextlib import nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from causes.scenario import Job, Sizes, Step, adam, blocks, ddp, scenario, training

HIDDEN_WELL = Sizes(2048, 12288, 4), Sizes(128, 2048, 4)
MIDDLE = Sizes(4096, 4096, 4), Sizes(256, 512, 4)


# On a CPU gloo takes the cores that it would have to leave to the GEMMs.
@scenario("none", "contention", devices=("cuda",))
def ddp_overlapped(job: Job) -> Step:
    """DDP with 25 MB buckets and a large batch: only the last bucket has no computation beside it."""
    # 0.11 ms of the last 34 MB against 15 ms.
    sizes = job.sizes(*HIDDEN_WELL)
    return training(ddp(job, blocks(job, sizes), 25 if job.on_gpu else 0.5), job.random(sizes.tokens, sizes.hidden))


def accumulated(job: Job, sizes: Sizes, microbatches: int, *, reduced_once: bool) -> Step:
    """DDP that accumulates the gradients of some microbatches."""
    model, x = ddp(job, blocks(job, sizes), 25 if job.on_gpu else 0.5), job.random(sizes.tokens, sizes.hidden)
    optimizer = adam(model)

    def step() -> None:
        for i in range(microbatches):
            with model.no_sync() if reduced_once and i < microbatches - 1 else nullcontext():
                model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@scenario("none", "contention")
def ddp_accumulated(job: Job) -> Step:
    """DDP that accumulates the gradients of three microbatches with no_sync() and sums them in the last."""
    return accumulated(job, job.sizes(Sizes(2048, 12288, 3), Sizes(128, 2048, 3)), 3, reduced_once=True)


FEW_TOKENS = Sizes(8192, 256, 3), Sizes(512, 32, 3)
NO_SYNC = {"ddp_reduced_once": "no_sync() but for the last microbatch"}


@scenario("repeated_reduction", "bandwidth", "contention", mends=NO_SYNC)
def ddp_reduced_each_time(job: Job) -> Step:
    """DDP that accumulates the gradients of four microbatches of few tokens, and sums them each time."""
    return accumulated(job, job.sizes(*FEW_TOKENS), 4, reduced_once=False)


@scenario("bandwidth", "issued_late", "contention", recorded=False)
def ddp_reduced_once(job: Job) -> Step:
    """ddp_reduced_each_time with no_sync() but for the last microbatch."""
    return accumulated(job, job.sizes(*FEW_TOKENS), 4, reduced_once=True)


SMALLER_BUCKETS = {"ddp_smaller_buckets": "DistributedDataParallel(bucket_cap_mb=25)"}


@scenario("issued_late", mends=SMALLER_BUCKETS)
@scenario("issued_late", name="no_profiler_step", marked_steps=False)
def ddp_one_bucket(job: Job) -> Step:
    """DDP with one bucket for all gradients: the all-reduce starts when backward is over."""
    # 1.07 GB take 3.5 ms, forward and backward 20 ms.
    sizes = job.sizes(*MIDDLE)
    return training(ddp(job, blocks(job, sizes), 10_000), job.random(sizes.tokens, sizes.hidden))


@scenario("none", "contention", "issued_late", recorded=False)
def ddp_smaller_buckets(job: Job) -> Step:
    """ddp_one_bucket with 25 MB buckets, on a CPU 2 MB."""
    sizes = job.sizes(*MIDDLE)
    return training(ddp(job, blocks(job, sizes), 25 if job.on_gpu else 2), job.random(sizes.tokens, sizes.hidden))


def summed_by_hand(
    job: Job, when: Literal["after_backward", "in_hooks", "in_hooks_async"], chosen: tuple[Sizes, Sizes] = MIDDLE
) -> Step:
    """Data parallelism by hand: an all-reduce of each gradient."""
    sizes = job.sizes(*chosen)
    model, x, group = blocks(job, sizes), job.random(sizes.tokens, sizes.hidden), job.group("DP")
    optimizer, running = adam(model), []

    def summed(parameter: Tensor) -> None:
        work = dist.all_reduce(parameter.grad, group=group, async_op=when == "in_hooks_async")
        if when == "in_hooks_async":
            running.append(work)

    if when != "after_backward":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(summed)

    def step() -> None:
        model(x).float().square().mean().backward()
        if when == "after_backward":
            for parameter in model.parameters():
                summed(parameter)
        for work in running:
            work.wait()
        running.clear()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= job.ranks
        optimizer.step()
        optimizer.zero_grad()

    return step


def summed_small(job: Job, *, at_once: bool) -> Step:
    """Data parallelism by hand of 128 small layers."""
    model = torch.nn.Sequential(*(job.linear(64, 64) for _ in range(128)))
    x, optimizer = job.random(64, 64), adam(model)

    def step() -> None:
        model(x).float().square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if at_once:
            flat = torch.cat([gradient.view(-1) for gradient in gradients])
            dist.all_reduce(flat)
            for gradient, summed in zip(gradients, flat.split(64 * 64), strict=True):
                gradient.copy_(summed.view_as(gradient))
        else:
            for gradient in gradients:
                dist.all_reduce(gradient)
        optimizer.step()
        optimizer.zero_grad()

    return step


AT_ONCE = {"small_sums_at_once": "one all-reduce of all gradients"}
SHAPES = {"record_shapes": True}


# Its traces are of a CPU alone: on a GPU the host is late with layers as small as these.
@scenario("latency", "issued_late", "dependency", devices=("cpu",), mends=AT_ONCE, profiler=SHAPES)
def small_sums(job: Job) -> Step:
    """Data parallelism by hand: after backward an all-reduce of each of 128 gradients of 16 KB."""
    return summed_small(job, at_once=False)


@scenario("issued_late", "dependency", "none", "host_bound", devices=("cpu",), profiler=SHAPES)
def small_sums_at_once(job: Job) -> Step:
    """small_sums with one all-reduce of all gradients."""
    return summed_small(job, at_once=True)


HOOKS_ASYNC = "all_reduce(async_op=True) in gradients' hooks"


@scenario("issued_late", "dependency", mends={"sums_in_hooks_async": HOOKS_ASYNC})
def reduce_after_backward(job: Job) -> Step:
    """Data parallelism by hand: after backward a blocking all-reduce of each gradient."""
    return summed_by_hand(job, "after_backward")


# The reductions start in time, but what backward launches next waits for each.
@scenario("issued_late", "dependency", mends={"sums_in_hooks_async": HOOKS_ASYNC})
def sums_in_hooks(job: Job) -> Step:
    """Data parallelism by hand: a blocking all-reduce in the hook of each gradient holds up backward."""
    return summed_by_hand(job, "in_hooks")


@scenario("none", "contention", "issued_late", recorded=False)
def sums_in_hooks_async(job: Job) -> Step:
    """Data parallelism by hand: an asynchronous all-reduce in the hook of each gradient."""
    return summed_by_hand(job, "in_hooks_async")


LARGER_BATCH = 8


def few_tokens(job: Job, factor: int) -> Step:
    sizes = job.sizes(Sizes(8192, 256, 3), Sizes(768, 16, 3))
    model = ddp(job, blocks(job, sizes), 25 if job.on_gpu else 4)
    return training(model, job.random(factor * sizes.tokens, sizes.hidden))


@scenario(
    "bandwidth",
    "contention",
    mends={"ddp_larger_batch": "8 times the tokens per step; times are for the same tokens"},
)
def ddp_tiny_batch(job: Job) -> Step:
    """DDP with few tokens: the gradients take longer than the whole backward pass."""
    # 3.2 GB take 11 ms, backward about 4 ms, bound by reading weights.
    return few_tokens(job, 1)


@scenario("none", "contention", "bandwidth", recorded=False, work=LARGER_BATCH)
def ddp_larger_batch(job: Job) -> Step:
    """ddp_tiny_batch with more tokens."""
    return few_tokens(job, LARGER_BATCH)


def more_products(job: Job, counts: tuple[int, int], size: int, rows: int) -> Step:
    """Computes GEMMs of one shape, the first count of them on each rank but the last, the second on the last."""
    a, b = job.random(rows, size), job.random(size, size)
    count = counts[job.rank == job.ranks - 1]

    def compute() -> None:
        for _ in range(count):
            a @ b

    return compute


def uneven_ddp(job: Job, counts: tuple[int, int]) -> Step:
    # On a GPU 6 x 0.85 ms beside 15 ms, on a CPU 6 x 4 ms beside 60 to 80 ms.
    sizes = job.sizes(*HIDDEN_WELL)
    model = ddp(job, blocks(job, sizes), 25 if job.on_gpu else 0.5)
    more = more_products(job, counts, 4096, 16384) if job.on_gpu else more_products(job, counts, 512, 1024)
    return training(model, job.random(sizes.tokens, sizes.hidden), before_backward=more)


BALANCED = "the same work, spread evenly over the ranks"


@scenario("straggler", "contention", late_rank=1, mends={"ddp_balanced": BALANCED})
def ddp_straggler(job: Job) -> Step:
    """DDP where rank 1 computes some GEMMs more between forward and backward."""
    return uneven_ddp(job, (0, 6))


@scenario("none", "contention", recorded=False)
def ddp_balanced(job: Job) -> Step:
    """ddp_straggler with its GEMMs on both ranks."""
    return uneven_ddp(job, (3, 3))


@scenario("straggler", "host_bound", late_rank=1)
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
    mends={"ddp_connections_32": "CUDA_DEVICE_MAX_CONNECTIONS=32"},
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
    # The head's 670 MB take 2.5 ms and are first; the trunk's backward takes 10 ms. In a single hardware queue each
    # bucket's all-reduce waits for the one before, and the trunk's kernels behind it wait as well.
    sizes = job.sizes(Sizes(2048, 12288, 4), Sizes(128, 4096, 3))
    head = Head(job, sizes.hidden, 16384 if job.on_gpu else 512)
    model = torch.nn.Sequential(*blocks(job, sizes), head)
    return training(ddp(job, model), job.random(sizes.tokens, sizes.hidden))
