"""Models whose parameters are sharded: FSDP2, FSDP1, and the same by hand.

For two H200s: gathering a Block's 16 hidden^2 bytes moves half of them, 3.1e-11 hidden^2 seconds at 260 GB/s, and so
does the reduce-scatter. Forward takes 2.5e-14 hidden^2 tokens seconds at 650 TFLOP/s: a gather is 1250 / tokens of it.
With the profiler FSDP2's host needs 4 to 5 ms for each unit and step: layers are few and large, or it would be the host
that is too slow.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional

from causes.data_parallel import BALANCED, more_products
from causes.scenario import Attention, Block, Job, Sizes, Step, blocks, scenario, training

# Large enough that the first gather and the last reduce-scatter, which nothing can hide, are 0.5 % of the step.
LARGE = Sizes(2048, 49152, 4), Sizes(128, 2048, 3)
MIDDLE = Sizes(8192, 4096, 3), Sizes(256, 1024, 3)


def fsdp2(job: Job, model: nn.Sequential, prefetch: bool = True, reshard: bool = True) -> nn.Sequential:
    mesh = job.mesh("FSDP")
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
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


# gloo's reduce-scatter blocks the host, whatever FSDP2 is told: nothing of this is hidden on a CPU.
@scenario("none", "contention", devices=("cuda",))
@scenario("none", "contention", name="fsdp2_no_profiler_step", devices=("cuda",), marked_steps=False)
def fsdp2_overlapped(job: Job) -> Step:
    """FSDP2 with each layer sharded, prefetch and a large batch."""
    sizes = job.sizes(*LARGE)
    return training(fsdp2(job, blocks(job, sizes)), job.random(sizes.tokens, sizes.hidden))


@scenario("none", "contention", devices=("cuda",))
def fsdp2_attention(job: Job) -> Step:
    """FSDP2 of attention and MLP layers with prefetch and a large batch."""
    sizes = job.sizes(Sizes(2048, 49152, 3), Sizes(128, 2048, 2))
    length = 2048 if job.on_gpu else 256
    layers = [
        nn.Sequential(Attention(job, sizes.hidden, length), Block(job, sizes.hidden)) for _ in range(sizes.layers)
    ]
    return training(fsdp2(job, nn.Sequential(*layers)), job.random(sizes.tokens, sizes.hidden))


@scenario("issued_late", "dependency", mends={"fsdp2_prefetch": "fully_shard's own prefetching, on streams of its own"})
def fsdp2_no_prefetch(job: Job) -> Step:
    """FSDP2 that gathers a layer only when the layer before is done, forward and backward."""
    sizes = job.sizes(*MIDDLE)
    return training(fsdp2(job, blocks(job, sizes), prefetch=False), job.random(sizes.tokens, sizes.hidden))


@scenario("none", "dependency", "issued_late", "contention", recorded=False)
def fsdp2_prefetch(job: Job) -> Step:
    """fsdp2_no_prefetch with FSDP2's prefetching as it is by itself."""
    sizes = job.sizes(*MIDDLE)
    return training(fsdp2(job, blocks(job, sizes)), job.random(sizes.tokens, sizes.hidden))


def fsdp1(job: Job, prefetch: BackwardPrefetch | None, *, forward: bool) -> Step:
    sizes = job.sizes(*MIDDLE)
    model = FullyShardedDataParallel(
        blocks(job, sizes),
        process_group=job.group("FSDP"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        backward_prefetch=prefetch,
        forward_prefetch=forward,
        use_orig_params=True,
        device_id=job.device,
    )
    return training(model, job.random(sizes.tokens, sizes.hidden))


@scenario(
    "issued_late",
    "dependency",
    devices=("cuda",),
    mends={"fsdp1_prefetch": "backward_prefetch=BackwardPrefetch.BACKWARD_PRE, forward_prefetch=True"},
)
def fsdp1_no_prefetch(job: Job) -> Step:
    """FSDP1 without forward or backward prefetch: a gather of backward stands behind the reduce-scatter before it."""
    return fsdp1(job, None, forward=False)


@scenario("none", "dependency", "issued_late", "contention", devices=("cuda",), recorded=False)
def fsdp1_prefetch(job: Job) -> Step:
    """fsdp1_no_prefetch with prefetching in both passes."""
    return fsdp1(job, BackwardPrefetch.BACKWARD_PRE, forward=True)


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


@scenario("issued_late", "dependency")
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


LARGER_BATCH = 8
SAME_TOKENS = f"{LARGER_BATCH} times the tokens per step; times are for the same tokens"


def few_tokens(job: Job, factor: int = 1, *, reshard: bool = True) -> Step:
    # 3 x 4.7 ms for each layer of 2.4 GB against 4 ms of computation, bound by reading weights, and 4 ms of the host.
    sizes = job.sizes(Sizes(12288, 256, 3), Sizes(512, 16, 3))
    model = fsdp2(job, blocks(job, sizes), reshard=reshard)
    return training(model, job.random(factor * sizes.tokens, sizes.hidden))


@scenario(
    "bandwidth",
    "dependency",
    "contention",
    "issued_late",
    mends={"fsdp2_larger_batch": SAME_TOKENS, "fsdp2_kept": "fully_shard(reshard_after_forward=False)"},
)
def fsdp2_tiny_batch(job: Job) -> Step:
    """FSDP2 with few tokens: gathers and reduce-scatters take longer than all computation."""
    return few_tokens(job)


@scenario("none", "bandwidth", "dependency", "contention", recorded=False, work=LARGER_BATCH)
def fsdp2_larger_batch(job: Job) -> Step:
    """fsdp2_tiny_batch with more tokens."""
    return few_tokens(job, LARGER_BATCH)


@scenario("bandwidth", "dependency", "contention", recorded=False)
def fsdp2_kept(job: Job) -> Step:
    """fsdp2_tiny_batch that keeps the gathered parameters for backward."""
    return few_tokens(job, reshard=False)


def uneven_fsdp2(job: Job, counts: tuple[int, int]) -> Step:
    # 16 x 0.85 ms beside 75 ms; on a CPU 8 x 4 ms beside 80 ms.
    sizes = job.sizes(*LARGE)
    more = more_products(job, counts, 4096, 16384) if job.on_gpu else more_products(job, counts, 512, 1024)
    model = fsdp2(job, blocks(job, sizes))
    return training(model, job.random(sizes.tokens, sizes.hidden), before_backward=more)


@scenario(
    "straggler",
    "contention",
    late_rank=1,
    mends={"fsdp2_balanced": BALANCED},
)
def fsdp2_straggler(job: Job) -> Step:
    """FSDP2 where rank 1 computes some GEMMs more between forward and backward."""
    return uneven_fsdp2(job, (0, 16 if job.on_gpu else 8))


@scenario("none", "contention", recorded=False)
def fsdp2_balanced(job: Job) -> Step:
    """fsdp2_straggler with its GEMMs on both ranks."""
    return uneven_fsdp2(job, (8, 8) if job.on_gpu else (4, 4))


@scenario(
    "queue_order",
    "contention",
    name="fsdp2_connections_1",
    devices=("cuda",),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    mends={"fsdp2_connections_32": "CUDA_DEVICE_MAX_CONNECTIONS=32"},
)
@scenario(
    "issued_late",
    "dependency",
    name="fsdp2_connections_32",
    devices=("cuda",),
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
)
def fsdp2_connections(job: Job) -> Step:
    """FSDP2 whose host launches a layer's gather behind the kernels of the layer before."""
    # A gather takes 2.1 ms and forward of a layer 6.8 ms. In a single hardware queue the gather gets to run when only
    # the last of the kernels before it is left, and the next layer waits for it.
    sizes = job.sizes(*MIDDLE)
    return training(fsdp2(job, blocks(job, sizes)), job.random(sizes.tokens, sizes.hidden))
