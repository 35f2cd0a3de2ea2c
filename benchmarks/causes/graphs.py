"""Programs of CUDA graphs, and of kernels so small that they should be in one.

The last of their processes: a capture that fails leaves a device that refuses other work.
"""

import torch
from torch import Tensor, nn

from causes.scenario import Job, Step, adam, ddp, scenario, training
from causes.tensor_parallel import SIZES, parallel_blocks


@scenario("dependency", "issued_late", devices=("cuda",), marked_steps=False)
def cuda_graph(job: Job) -> Step:
    """tp_blocking's forward and backward in one CUDA graph, the optimizer outside."""
    sizes = job.sizes(*SIZES)
    model, x = parallel_blocks(job, sizes), job.random(sizes.tokens, sizes.hidden)
    optimizer = adam(model)

    def work() -> None:
        model(x).float().square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad()
            work()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for its events meanwhile, on a thread of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()

    def step() -> None:
        graph.replay()
        optimizer.step()

    return step


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


def narrow(job: Job) -> nn.Module:
    return ddp(job, nn.Sequential(*(Narrow(job, 512) for _ in range(6))), 0.5)


@scenario(
    "host_bound",
    "straggler",
    "dependency",
    "issued_late",
    devices=("cuda",),
    mends={
        "tiny_kernels_fused": "AdamW(fused=True) instead of foreach=False",
        "tiny_kernels_graph": "forward, backward and optimizer in one CUDA graph",
    },
)
def tiny_kernels(job: Job) -> Step:
    """DDP of narrow layers with hundreds of tiny kernels a step and an optimizer with kernels for each parameter."""
    # 6 layers with 12 kernels forward, 25 backward and 40 of the optimizer: some 420 of 1 to 5 us, launched in 6 to 8.
    model = narrow(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    return training(model, job.random(256, 512), optimizer)


@scenario("host_bound", "straggler", devices=("cuda",), recorded=False)
def tiny_kernels_fused(job: Job) -> Step:
    """tiny_kernels with an optimizer of one kernel."""
    return training(narrow(job), job.random(256, 512))


@scenario("none", "dependency", devices=("cuda",), recorded=False)
def tiny_kernels_graph(job: Job) -> Step:
    """tiny_kernels in a CUDA graph."""
    # DDP rebuilds its buckets and collects statistics at first: it can be captured from its 11th step on.
    side, x = torch.cuda.Stream(), job.random(256, 512)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = narrow(job)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False, capturable=True)
        step = training(model, x, optimizer)
        for _ in range(12):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay
