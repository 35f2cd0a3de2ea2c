"""Programs whose host is the trouble: too slow for the GPU, or waiting for it in mid-step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from causes.scenario import Block, Job, Sizes, Step, ddp, scenario, training
from causes.sharded import fsdp2


class Narrow(nn.Module):
    """A narrow layer with many elementwise operators, each a kernel of its own."""

    def __init__(self, job: Job, hidden: int) -> None:
        super().__init__()
        self.linear, self.scale, self.shift = job.linear(hidden, hidden), job.weight(1, hidden), job.weight(1, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        centered = y - y.mean(-1, keepdim=True)
        normal = centered * (centered * centered).mean(-1, keepdim=True).add(1e-5).rsqrt()
        return x + torch.tanh(normal * self.scale + self.shift) * torch.sigmoid(y)


@scenario("host_bound", "dependency", "issued_late", devices=("cuda",), active_steps=2)
def tiny_kernels(job: Job) -> Step:
    """DDP of narrow layers with hundreds of tiny kernels a step and an optimizer with kernels for each parameter."""
    # 6 layers with 12 kernels forward, 25 backward and 40 of the optimizer: some 450 of 2 to 5 us, launched in 5 to 8.
    model = ddp(job, nn.Sequential(*(Narrow(job, 512) for _ in range(6))), 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    return training(model, job.random(256, 512), optimizer)


class Watched(nn.Module):
    """A Block followed by what looks at its output, and backward at the gradient of that."""

    def __init__(self, job: Job, hidden: int, ffn: int, look: Callable[[Tensor], None], backward: bool) -> None:
        super().__init__()
        self.block, self.look, self.backward = Block(job, hidden, ffn), look, backward

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        self.look(y.detach())
        if self.backward and y.requires_grad:
            y.register_hook(self.look)
        return y


def watched(
    job: Job, sizes: Sizes, look: Callable[[Tensor], None], ffn: int = 0, backward: bool = True
) -> nn.Sequential:
    ffn = ffn or 4 * sizes.hidden
    return nn.Sequential(*(Watched(job, sizes.hidden, ffn, look, backward) for _ in range(sizes.layers)))


def logged() -> Callable[[Tensor], None]:
    """Reads a tensor's mean and largest value to the host, as logging of activations does."""
    latest: dict[str, float] = {}

    def look(x: Tensor) -> None:
        latest["mean"] = x.mean().item()
        latest["largest"] = x.abs().max().item()

    return look


# Each read leaves the GPU idle for 30 to 60 us: 4 a layer against 0.7 ms of GEMMs.
@scenario("host_sync", "host_bound", "issued_late", devices=("cuda",), twin="ddp_overlapped")
def item_in_step_ddp(job: Job) -> Step:
    """DDP where .item() reads two statistics of each layer's output, and backward of its gradient."""
    sizes = job.sizes(Sizes(2048, 4096, 4), Sizes(128, 512, 3))
    model = ddp(job, watched(job, sizes, logged(), ffn=2 * sizes.hidden))
    return training(model, job.random(sizes.tokens, sizes.hidden))


# The next gather is launched only then: 0.7 ms of each layer's 1.7 ms forward.
@scenario("host_sync", "issued_late", "dependency", devices=("cuda",), twin="fsdp2_overlapped")
def item_in_step_fsdp2(job: Job) -> Step:
    """FSDP2 where .item() reads two statistics of each layer's output."""
    sizes = job.sizes(Sizes(4096, 4096, 4), Sizes(128, 512, 3))
    model = fsdp2(job, watched(job, sizes, logged(), backward=False))
    return training(model, job.random(sizes.tokens, sizes.hidden))


# Backward it waits for the all-reduces as well, which then have nothing beside them.
@scenario("host_sync", "host_bound", "issued_late", devices=("cuda",), twin="ddp_overlapped")
def sync_in_step(job: Job) -> Step:
    """DDP with torch.cuda.synchronize() after each layer, forward and backward."""
    sizes = job.sizes(Sizes(2048, 4096, 4), Sizes(128, 512, 3))
    model = ddp(job, watched(job, sizes, lambda _: job.module.synchronize()))
    return training(model, job.random(sizes.tokens, sizes.hidden))
