"""Layers that are split among the ranks, or exchange tokens: the next kernel needs what is communicated.

For two H200s: at hidden size 4096 and 16384 tokens an all-reduce of 134 MB takes 0.5 ms, forward of a layer 5 ms and
backward 10 ms, with two all-reduces each: 13 % of a step. The host needs 5 ms a layer and step with the profiler.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from causes.scenario import Job, Sizes, Step, adam, attended, blocks, ddp, scenario, training

SIZES = Sizes(4096, 16384, 2), Sizes(256, 512, 3)


class Copied(torch.autograd.Function):
    """Enters a column-parallel layer: backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return summed(gradients[0], ctx.group), None


class Summed(torch.autograd.Function):
    """Leaves a row-parallel layer: forward sums the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Gathered(torch.autograd.Function):
    """Enters a column-parallel layer with sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return scattered(gradients[0], ctx.group), None


class Scattered(torch.autograd.Function):
    """Leaves a row-parallel layer with sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], ctx.group), None


class Exchanged(torch.autograd.Function):
    """Sends rows of x to each rank, as many as `sent` says, and receives from each as many as `received` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return exchanged(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged(gradients[0], ctx.group, ctx.received, ctx.sent), None, None, None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=group)
    return result


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(result, x.contiguous(), group=group)
    return result


def scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    result = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(result, x.contiguous(), group=group)
    return result


def exchanged(x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result


class ParallelBlock(nn.Module):
    """Attention and MLP, each a column- and a row-parallel layer, with a function to enter and one to leave."""

    def __init__(self, job: Job, hidden: int, length: int, enter: Any, leave: Any) -> None:
        super().__init__()
        local = hidden // job.ranks
        self.group, self.enter, self.leave, self.length = job.group("TP"), enter, leave, length
        self.heads = max(1, local // 128)
        self.norm1, self.qkv, self.proj = job.norm(hidden), job.linear(hidden, 3 * local), job.linear(local, hidden)
        self.norm2, self.up, self.down = job.norm(hidden), job.linear(hidden, 4 * local), job.linear(4 * local, hidden)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.enter.apply(self.norm1(x), self.group)
        x = x + self.leave.apply(self.proj(attended(self.qkv(inside), self.heads, self.length)), self.group)
        inside = self.enter.apply(self.norm2(x), self.group)
        return x + self.leave.apply(self.down(functional.gelu(self.up(inside))), self.group)


def parallel_blocks(job: Job, sizes: Sizes, enter: Any = Copied, leave: Any = Summed) -> nn.Sequential:
    length = sizes.tokens // 8
    return nn.Sequential(*(ParallelBlock(job, sizes.hidden, length, enter, leave) for _ in range(sizes.layers)))


# Backward's all-reduce could have the GEMM of the weight gradient beside it.
@scenario("dependency", "issued_late")
@scenario("dependency", "issued_late", name="with_modules", profiler={"record_shapes": True, "with_modules": True})
def tp_blocking(job: Job) -> Step:
    """Tensor parallelism by hand: blocking all-reduces after row-parallel, in backward after column-parallel layers."""
    sizes = job.sizes(*SIZES)
    return training(parallel_blocks(job, sizes), job.random(sizes.tokens, sizes.hidden))


@scenario("dependency", "issued_late")
def tp_sequence_parallel(job: Job) -> Step:
    """Tensor and sequence parallelism by hand: blocking all-gather before, blocking reduce-scatter after."""
    sizes = job.sizes(*SIZES)
    model = parallel_blocks(job, sizes, Gathered, Scattered)
    return training(model, job.random(sizes.tokens // job.ranks, sizes.hidden))


@scenario("dependency", "issued_late")
def tp_dtensor(job: Job) -> Step:
    """Tensor parallelism of MLP layers by PyTorch's parallelize_module."""
    # 20 ms of a layer's GEMMs against 5 ms of the host, and 268 MB in 1 ms, twice.
    sizes = job.sizes(Sizes(4096, 32768, 3), Sizes(256, 512, 4))
    model, mesh = blocks(job, sizes), job.mesh("TP")
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # Parameters are DTensors and plain tensors, which one fused call does not take.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, foreach=False)
    return training(model, job.random(sizes.tokens, sizes.hidden), optimizer)


@scenario("dependency", "issued_late", cause_by_group={"TP": "dependency", "DP": "issued_late"})
def hybrid(job: Job) -> Step:
    """tp_blocking in DDP with one bucket: the groups TP and DP have the same ranks and different troubles."""
    sizes = job.sizes(*SIZES)
    model = ddp(job, parallel_blocks(job, sizes), 10_000, group="DP")
    return training(model, job.random(sizes.tokens, sizes.hidden))


class Permuted(torch.autograd.Function):
    """The rows of x in another order; backward in the old one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0][back], None, None


class Experts(nn.Module):
    """Tokens go to the rank of their expert and come back: two all-to-alls around an MLP.

    `popularity` is the part of each rank's tokens that the expert of the last rank gets.
    """

    def __init__(self, job: Job, sizes: Sizes, popularity: float) -> None:
        super().__init__()
        self.norm, self.group = job.norm(sizes.hidden), job.group("EP")
        self.up, self.down = job.linear(sizes.hidden, 4 * sizes.hidden), job.linear(4 * sizes.hidden, sizes.hidden)
        self.order = torch.randperm(sizes.tokens, device=job.device)
        self.back = self.order.argsort()
        last = round(popularity * sizes.tokens)
        self.sent = [(sizes.tokens - last) // (job.ranks - 1)] * (job.ranks - 1) + [last]
        self.received = [self.sent[job.rank]] * job.ranks

    def forward(self, x: Tensor) -> Tensor:
        sent = Permuted.apply(self.norm(x), self.order, self.back)
        here = Exchanged.apply(sent, self.group, self.sent, self.received)
        returned = Exchanged.apply(self.down(functional.gelu(self.up(here))), self.group, self.received, self.sent)
        return x + Permuted.apply(returned, self.back, self.order)


def experts(job: Job, popularity: float) -> Step:
    # 25 MB leave each rank in about 0.15 ms, twice forward and twice backward, against 1.3 and 2.5 ms of GEMMs.
    sizes = job.sizes(Sizes(2048, 12288, 3), Sizes(256, 512, 3))
    model = nn.Sequential(*(Experts(job, sizes, popularity) for _ in range(sizes.layers)))
    return training(model, job.random(sizes.tokens, sizes.hidden))


@scenario("dependency", "issued_late")
def moe_all_to_all(job: Job) -> Step:
    """Mixture of experts, one expert a rank: blocking all-to-alls before and after each MLP."""
    return experts(job, 1 / job.ranks)


@scenario(
    "straggler",
    "dependency",
    "issued_late",
    late_rank=1,
    mends={"moe_all_to_all": "tokens balanced over the experts"},
)
def moe_uneven(job: Job) -> Step:
    """moe_all_to_all where the expert of rank 1 gets 5 of 8 tokens."""
    return experts(job, 0.625)


@scenario("straggler", "dependency", "issued_late")
def late_in_turn(job: Job) -> Step:
    """Blocking all-reduces after GEMMs, of which rank 0 has thrice as many before one, rank 1 before the next."""
    sizes, group = job.sizes(Sizes(4096, 4096, 8), Sizes(512, 512, 8)), job.group("TP")
    x, weight = job.random(sizes.tokens, sizes.hidden), job.random(sizes.hidden, sizes.hidden)

    def step() -> None:
        for layer in range(sizes.layers):
            for _ in range(12 if layer % job.ranks == job.rank else 4):
                x @ weight
            dist.all_reduce(x, group=group)
            x.mul_(1 / job.ranks)

    return step


@scenario("dependency", "straggler", "issued_late")
def pipeline(job: Job) -> Step:
    """Two pipeline stages, two microbatches, all forward and then all backward, with blocking send and receive."""
    sizes = job.sizes(Sizes(4096, 4096, 2), Sizes(256, 512, 2))
    model, group, microbatches = blocks(job, sizes), job.group("PP"), 2
    optimizer, shape = adam(model), (sizes.tokens, sizes.hidden)
    first, other, batch = job.rank == 0, 1 - job.rank, job.random(sizes.tokens, sizes.hidden)
    if job.rank > 1:
        raise RuntimeError("the pipeline has 2 stages: start 2 processes")

    def received() -> Tensor:
        buffer = torch.empty(*shape, device=job.device, dtype=job.dtype)
        dist.recv(buffer, other, group=group)
        return buffer

    def step() -> None:
        inputs, outputs = [], []
        for _ in range(microbatches):
            inputs.append(batch if first else received().requires_grad_())
            outputs.append(model(inputs[-1]))
            if first:
                dist.send(outputs[-1].detach(), other, group=group)
        for x, y in zip(inputs, outputs, strict=True):
            if first:
                y.backward(received())
            else:
                y.float().square().mean().backward()
                dist.send(x.grad, other, group=group)
        optimizer.step()
        optimizer.zero_grad()

    return step
