"""Programs whose host waits for the GPU in mid-step, which then has nothing to run until the host has launched it."""

import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from causes.scenario import Block, Job, Sizes, Step, ddp, scenario, training
from causes.sharded import MIDDLE, fsdp2

Look = Callable[[Tensor], None]


class Watched(nn.Module):
    """A Block followed by what looks at its output, and backward at the gradient of that."""

    def __init__(self, job: Job, hidden: int, look: Look, backward: bool) -> None:
        super().__init__()
        self.block, self.look, self.backward = Block(job, hidden), look, backward

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        self.look(y.detach())
        if self.backward and y.requires_grad:
            y.register_hook(self.look)
        return y


def watched(job: Job, sizes: Sizes, look: Look, backward: bool = True) -> nn.Sequential:
    return nn.Sequential(*(Watched(job, sizes.hidden, look, backward) for _ in range(sizes.layers)))


class Log:
    """Writes a record with a tensor's mean, largest value and histogram, as logging of activations does.

    `late` writes the records of the step before, which have long been copied to the host: it waits for nothing.
    """

    BINS = 1024

    def __init__(self, job: Job, *, late: bool) -> None:
        self.job, self.late, self.records = job, late, 0
        self.copied: list[tuple[Tensor, torch.cuda.Event]] = []
        self.before: list[tuple[Tensor, torch.cuda.Event]] = []

    def look(self, x: Tensor) -> None:
        # Without bounds histc would read the smallest and the largest value to the host.
        part = x[:256].float()
        histogram = torch.histc(part / part.abs().max(), self.BINS, -1, 1)
        if self.late:
            numbers = torch.cat((x.mean().float().view(1), x.abs().max().float().view(1), histogram))
            self.copied.append((numbers.to("cpu", non_blocking=True), self.job.module.current_stream().record_event()))
        else:
            self.write(x.mean().item(), x.abs().max().item(), histogram.tolist())

    def step_ended(self) -> None:
        for numbers, event in self.before:
            event.synchronize()
            mean, largest, *histogram = numbers.tolist()
            self.write(mean, largest, histogram)
        self.before, self.copied = self.copied, []

    def write(self, mean: float, largest: float, histogram: list[float]) -> None:
        self.records += len(json.dumps({"mean": mean, "largest": largest, "histogram": histogram}))


def logged(model: nn.Module, job: Job, sizes: Sizes, log: Log) -> Step:
    train = training(model, job.random(sizes.tokens, sizes.hidden))

    def step() -> None:
        train()
        log.step_ended()

    return step


ONE_STEP_LATER = "read one step later, from non_blocking copies"
LOGGED = Sizes(4096, 4096, 4), Sizes(128, 512, 3)


def logged_ddp(job: Job, *, late: bool, everywhere: bool = True) -> Step:
    # The host writes a record in 0.3 to 0.6 ms, 8 times a step of 25 ms, and has nothing launched meanwhile.
    sizes, log = job.sizes(*LOGGED), Log(job, late=late)
    look = log.look if everywhere or job.rank == 0 else lambda _: None
    return logged(ddp(job, watched(job, sizes, look)), job, sizes, log)


@scenario("host_sync", "straggler", "issued_late", devices=("cuda",), mends={"read_later_ddp": ONE_STEP_LATER})
def item_in_step_ddp(job: Job) -> Step:
    """DDP where .item() and .tolist() read statistics of each layer's output, and backward of its gradient."""
    return logged_ddp(job, late=False)


@scenario("none", "contention", devices=("cuda",), recorded=False)
def read_later_ddp(job: Job) -> Step:
    """item_in_step_ddp that writes the same records one step later."""
    return logged_ddp(job, late=True)


@scenario(
    "host_sync",
    "straggler",
    "issued_late",
    "contention",
    devices=("cuda",),
    late_rank=0,
    mends={"read_later_on_rank_0": ONE_STEP_LATER},
)
def item_on_rank_0(job: Job) -> Step:
    """item_in_step_ddp on rank 0 alone, as if rank 0 wrote the log: rank 1 waits for it."""
    return logged_ddp(job, late=False, everywhere=False)


@scenario("none", "contention", devices=("cuda",), recorded=False)
def read_later_on_rank_0(job: Job) -> Step:
    """item_on_rank_0 that writes the same records one step later."""
    return logged_ddp(job, late=True, everywhere=False)


def logged_fsdp2(job: Job, *, late: bool) -> Step:
    # The next gather is launched only then: 2.1 ms of each layer's 6.8 ms forward.
    sizes, log = job.sizes(*MIDDLE), Log(job, late=late)
    return logged(fsdp2(job, watched(job, sizes, log.look, backward=False)), job, sizes, log)


@scenario("host_sync", "issued_late", "dependency", devices=("cuda",), mends={"read_later_fsdp2": ONE_STEP_LATER})
def item_in_step_fsdp2(job: Job) -> Step:
    """FSDP2 where .item() and .tolist() read statistics of each layer's output."""
    return logged_fsdp2(job, late=False)


@scenario("none", "contention", "dependency", devices=("cuda",), recorded=False)
def read_later_fsdp2(job: Job) -> Step:
    """item_in_step_fsdp2 that writes the same records one step later."""
    return logged_fsdp2(job, late=True)


def looked_at(job: Job, look: Look) -> Step:
    # Backward it waits for the all-reduces as well, 3.5 ms a layer, which then have nothing beside them.
    sizes = job.sizes(Sizes(8192, 2048, 3), Sizes(128, 512, 3))
    return training(ddp(job, watched(job, sizes, look)), job.random(sizes.tokens, sizes.hidden))


@scenario(
    "host_sync",
    "issued_late",
    "dependency",
    devices=("cuda",),
    mends={"no_sync_in_step": "no torch.cuda.synchronize()"},
)
def sync_in_step(job: Job) -> Step:
    """DDP with torch.cuda.synchronize() after each layer, forward and backward."""
    return looked_at(job, lambda _: job.module.synchronize())


@scenario("none", "contention", "issued_late", devices=("cuda",), recorded=False)
def no_sync_in_step(job: Job) -> Step:
    """sync_in_step without synchronize()."""
    return looked_at(job, lambda _: None)


@scenario("unexplained", "none", devices=("cuda",))
def function_in_stream(job: Job) -> Step:
    """GEMMs and an all-reduce, with a function of the host in the stream that sleeps 5 ms."""
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    runtime = ctypes.CDLL(next(path for path in mapped if "libcudart" in path))
    sleep, microseconds = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p), ctypes.c_void_p(5000)
    a, group = job.random(4096, 4096), job.group("DP")

    def step() -> None:
        for _ in range(8):
            a @ a
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if runtime.cudaLaunchHostFunc(stream, sleep, microseconds):
            raise RuntimeError("cudaLaunchHostFunc failed")
        for _ in range(8):
            a @ a
        dist.all_reduce(a, group=group)

    return step
