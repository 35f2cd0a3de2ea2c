"""Models whose parameters are sharded: FSDP2, FSDP1, and the same by hand.

For two H200s: gathering a Block's 16 hidden^2 bytes moves half of them, 4.2e-11 hidden^2 seconds at 190 GB/s, and so
does the reduce-scatter. Forward takes 2.5e-14 hidden^2 tokens seconds at 650 TFLOP/s: a gather is 1700 / tokens of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional

from causes.data_parallel import more_products
from causes.scenario import Attention, Block, Job, Sizes, Step, blocks, scenario, training

# Large enough that the first gather and the last reduce-scatter, which nothing can hide, are 1 to 2 % of the step.
LARGE = Sizes(2048, 24576, 4), Sizes(128, 2048, 3)
MIDDLE = Sizes(4096, 4096, 4), Sizes(256, 1024, 3)


def fsdp2(job: Job, model: nn.Sequential, prefetch: bool = True) -> nn.Sequential:
    mesh = job.mesh("FSDP")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not prefetch:
        # Gathers behind all that the host has launched, instead of on a stream of their own. A layer that prefetches
        # itself prefetches nothing.
        model._set_unshard_async_op(True)
        for layer in model:
            layer.set_modules_to_backward_prefetch([layer])
    elif not job.on_gpu:
        # gloo has no streams that the host could run ahead of.
        model._set_unshard_async_op(True)
        for layer, following in pairwise(model):
            layer.set_modules_to_forward_prefetch([following])
    return model


# gloo's reduce-scatter blocks the host, whatever FSDP2 is told, and its threads share the cores.
BLOCKING = {"cause": "dependency", "also": ("none", "issued_late", "contention", "straggler")}


@scenario("none", "contention", cpu=BLOCKING)
@scenario("none", "contention", name="fsdp2_no_profiler_step", marked_steps=False, cpu=BLOCKING)
def fsdp2_overlapped(job: Job) -> Step:
    """FSDP2 with each layer sharded, prefetch and a large batch."""
    sizes = job.sizes(*LARGE)
    return training(fsdp2(job, blocks(job, sizes)), job.random(sizes.tokens, sizes.hidden))


@scenario("none", "contention", cpu=BLOCKING)
def fsdp2_attention(job: Job) -> Step:
    """FSDP2 of attention and MLP layers with prefetch and a large batch."""
    sizes = job.sizes(Sizes(2048, 16384, 3), Sizes(128, 2048, 2))
    layers = [
        nn.Sequential(Attention(job, sizes.hidden, sizes.tokens // 8), Block(job, sizes.hidden))
        for _ in range(sizes.layers)
    ]
    return training(fsdp2(job, nn.Sequential(*layers)), job.random(sizes.tokens, sizes.hidden))


@scenario("issued_late", "dependency", twin="fsdp2_overlapped")
def fsdp2_no_prefetch(job: Job) -> Step:
    """FSDP2 that gathers a layer only when the layer before is done, forward and backward."""
    sizes = job.sizes(*MIDDLE)
    return training(fsdp2(job, blocks(job, sizes), prefetch=False), job.random(sizes.tokens, sizes.hidden))


@scenario("issued_late", "dependency", devices=("cuda",), twin="fsdp2_overlapped")
def fsdp1_no_prefetch(job: Job) -> Step:
    """FSDP1 without forward or backward prefetch: a gather of backward stands behind the reduce-scatter before it."""
    sizes = job.sizes(*MIDDLE)
    model = FullyShardedDataParallel(
        blocks(job, sizes),
        process_group=job.group("FSDP"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        backward_prefetch=None,
        forward_prefetch=False,
        use_orig_params=True,
        device_id=job.device,
    )
    return training(model, job.random(sizes.tokens, sizes.hidden))


class GatheredBlock(torch.autograd.Function):
    """A Block without its norm, whose weights are gathered right before it runs, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        up, down = gathered(shard, x.shape[1], group)
        before = x @ up.t()
        ctx.save_for_backward(x, shard, before)
        ctx.group = group
        return x + functional.gelu(before) @ down.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gy,) = gradients
        x, shard, before = ctx.saved_tensors
        up, down = gathered(shard, x.shape[1], ctx.group)
        g_before = torch.ops.aten.gelu_backward(gy @ down, before)
        g_down = gy.t() @ functional.gelu(before)
        g_up = g_before.t() @ x
        gx = gy + g_before @ up
        g_shard = torch.empty_like(shard)
        dist.reduce_scatter_tensor(g_shard, torch.cat((g_up.flatten(), g_down.flatten())), group=ctx.group)
        return gx, g_shard, None


def gathered(shard: Tensor, hidden: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    whole = torch.empty(shard.numel() * dist.get_world_size(), device=shard.device, dtype=shard.dtype)
    dist.all_gather_into_tensor(whole, shard, group=group)
    up, down = whole.chunk(2)
    return up.view(-1, hidden), down.view(hidden, -1)


@scenario("issued_late", "dependency", twin="fsdp2_overlapped")
def manual_gather_on_demand(job: Job) -> Step:
    """ZeRO-3 by hand: a blocking all-gather right before each layer, forward and backward, a reduce-scatter after."""
    sizes = job.sizes(Sizes(4096, 4096, 3), Sizes(256, 1024, 3))
    shard_numel = 8 * sizes.hidden**2 // job.ranks
    shards = nn.ParameterList(nn.Parameter(0.01 * job.random(shard_numel)) for _ in range(sizes.layers))
    group = job.group("FSDP")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shards = shards

        def forward(self, x: Tensor) -> Tensor:
            for shard in self.shards:
                x = GatheredBlock.apply(x, shard, group)
            return x

    return training(Model(), job.random(sizes.tokens, sizes.hidden))


@scenario("bandwidth", "dependency", "contention", "issued_late")
def fsdp2_tiny_batch(job: Job) -> Step:
    """FSDP2 with few tokens: gathers and reduce-scatters take longer than all computation."""
    # 3 x 0.7 ms for each layer against 0.8 ms.
    sizes = job.sizes(Sizes(4096, 256, 4), Sizes(512, 16, 3))
    return training(fsdp2(job, blocks(job, sizes)), job.random(sizes.tokens, sizes.hidden))


@scenario(
    "straggler",
    "contention",
    late_rank=1,
    twin="fsdp2_overlapped",
    cpu={"also": ("dependency", "issued_late", "contention")},
)
def fsdp2_straggler(job: Job) -> Step:
    """FSDP2 where rank 1 computes some GEMMs more between forward and backward."""
    # 8 x 0.85 ms beside 30 ms; on a CPU 8 x 4 ms beside 80 ms.
    sizes = job.sizes(*LARGE)
    late = more_products(job, 8, 4096, 16384) if job.on_gpu else more_products(job, 8, 512, 1024)
    model = fsdp2(job, blocks(job, sizes))
    return training(model, job.random(sizes.tokens, sizes.hidden), before_backward=late)


@scenario(
    "queue_order",
    "contention",
    name="fsdp2_connections_1",
    devices=("cuda",),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    twin="fsdp2_connections_32",
)
@scenario(
    "none",
    "contention",
    "dependency",
    "issued_late",
    name="fsdp2_connections_32",
    devices=("cuda",),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
)
def fsdp2_connections(job: Job) -> Step:
    """FSDP2 whose host launches a layer's gather behind the kernels of the layer before."""
    # A gather takes 0.7 ms and forward of a layer 1.7 ms. In a single hardware queue the gather gets to run when only
    # the last of the kernels before it is left, and the next layer waits for it.
    sizes = job.sizes(Sizes(4096, 4096, 4), Sizes(128, 4096, 3))
    return training(fsdp2(job, blocks(job, sizes)), job.random(sizes.tokens, sizes.hidden))
