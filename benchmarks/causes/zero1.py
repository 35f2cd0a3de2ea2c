"""ZeRO-1: every rank has all parameters and gradients, and the optimizer's state of its part of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from causes.scenario import Job, Sizes, Step, blocks, scenario


class FlatLayer:
    """A layer's parameters and gradients in one buffer each, and this rank's part of both.

    The gradients are reduced as soon as the last of them is there.
    """

    def __init__(self, job: Job, layer: nn.Module, group: dist.ProcessGroup) -> None:
        self.parameters, self.group, self.accumulated = list(layer.parameters()), group, 0
        count = sum(parameter.numel() for parameter in self.parameters)
        padded = -(-count // job.ranks) * job.ranks
        self.values = torch.zeros(padded, device=job.device, dtype=job.dtype)
        self.gradients = torch.zeros_like(self.values)
        start = 0
        for parameter in self.parameters:
            own = slice(start, start + parameter.numel())
            self.values[own] = parameter.detach().flatten()
            parameter.data = self.values[own].view_as(parameter)
            parameter.grad = self.gradients[own].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._reduce_when_complete)
            start += parameter.numel()
        self.part = nn.Parameter(self.values.chunk(job.ranks)[job.rank])
        self.part.grad = torch.zeros_like(self.part)
        self.reduction: Any = None

    def _reduce_when_complete(self, _: Tensor) -> None:
        self.accumulated = (self.accumulated + 1) % len(self.parameters)
        if self.accumulated == 0:
            self.reduction = dist.reduce_scatter_tensor(
                self.part.grad, self.gradients, op=dist.ReduceOp.SUM, group=self.group, async_op=True
            )

    def reduced(self) -> None:
        self.reduction.wait()
        self.gradients.zero_()

    def gather(self, *, async_op: bool) -> Any:
        return dist.all_gather_into_tensor(self.values, self.part.detach(), group=self.group, async_op=async_op)


def zero1(job: Job, *, gather_in_forward: bool) -> Step:
    # For two H200s: a gather of 268 MB takes 0.55 ms, forward of its layer 0.9 ms.
    sizes = job.sizes(Sizes(4096, 2048, 4), Sizes(256, 512, 4))
    model, x, group = blocks(job, sizes), job.random(sizes.tokens, sizes.hidden), job.group("DP")
    layers = [FlatLayer(job, layer, group) for layer in model]
    optimizer = torch.optim.AdamW([layer.part for layer in layers], lr=1e-5, fused=True)
    gathers: dict[nn.Module, Any] = {}

    def wait_for_parameters(module: nn.Module, _: Any) -> None:
        if module in gathers:
            gathers.pop(module).wait()

    for module in model:
        module.register_forward_pre_hook(wait_for_parameters)

    def step() -> None:
        model(x).float().square().mean().backward()
        for layer in layers:
            layer.reduced()
        optimizer.step()
        for module, layer in zip(model, layers, strict=True):
            work = layer.gather(async_op=gather_in_forward)
            if gather_in_forward:
                gathers[module] = work

    return step


# The gathers cannot begin before the optimizer's step, and there is nothing after it in the step.
@scenario(
    "dependency",
    "issued_late",
    "straggler",
    mends={"zero1_gather_in_forward": "gather parameters during forward, as Megatron-Core's --overlap-param-gather"},
)
def zero1_gather_after_step(job: Job) -> Step:
    """ZeRO-1 by hand: gradients reduced beside backward, parameters gathered in blocking calls after the optimizer."""
    return zero1(job, gather_in_forward=False)


@scenario("none", "dependency", "issued_late", "contention", recorded=False)
def zero1_gather_in_forward(job: Job) -> Step:
    """ZeRO-1 by hand: each layer waits for its own parameters only."""
    return zero1(job, gather_in_forward=True)
