"""Time one repeat of a variant on this rank, by the host's clock or the GPU's own.

On a GPU the host needs longer to enqueue a small operator than the GPU needs to run it, so the passes are enqueued
behind a spin kernel that keeps the GPU busy meanwhile; when the host still comes too late, the turn says so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.variant import Variant

SPIN_MARGIN = 1.5
"""The spin lasts this many times the longest of the variants' last enqueueings."""
FIRST_SPIN_US = 2000.0
"""And at least this long."""


@dataclass(frozen=True)
class Turn:
    """One repeat on this rank."""

    us: dict[str, float]
    """By pass."""
    late: bool
    """The host was slower than the GPU."""


class Clock(Protocol):
    def time(self, variant: Variant, repeat: int) -> Turn:
        """One repeat of every pass. Collective."""


def clock_for(ranks: Ranks) -> Clock:
    return GpuClock(CudaStream(ranks)) if ranks.device.type == "cuda" else HostClock(ranks)


class HostClock:
    """Host clock; every pass starts when all ranks are there."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def time(self, variant: Variant, repeat: int) -> Turn:
        us = {}
        kept = None
        for name, run in variant.passes():
            self._ranks.barrier()
            start = time.perf_counter_ns()
            kept = run(repeat, kept)
            us[name] = (time.perf_counter_ns() - start) / 1e3
        return Turn(us, late=False)


class Stream(Protocol):
    """A GPU's current stream and the host that feeds it, as far as timing needs them."""

    def now_us(self) -> float:
        """The host's clock."""

    def wait(self) -> None:
        """Until every rank is here and its GPU is idle."""

    def spin(self, us: float) -> None:
        """Enqueue a kernel that keeps the GPU busy."""

    def meet(self) -> None:
        """Enqueue what makes the ranks' GPUs wait for each other."""

    def mark(self) -> Any:
        """Enqueue an event."""

    def between_us(self, start: Any, end: Any) -> float:
        """The GPU's time between two events that have happened."""

    def slowest(self, value: float) -> float:
        """The largest over the ranks."""


class CudaStream:
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def now_us(self) -> float:
        return time.perf_counter_ns() / 1e3

    def wait(self) -> None:
        self._ranks.barrier()

    def spin(self, us: float) -> None:
        spin(self._ranks, us)

    def meet(self) -> None:
        meet(self._ranks)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e3

    def slowest(self, value: float) -> float:
        return self._ranks.slowest([value])[0]


class GpuClock:
    """Events on the stream, behind a spin kernel; the ranks meet before each pass, so that they start together."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        # Only the last of each variant: the first run may compile for a second, which no later spin has to outlast.
        self._enqueue_us: dict[Variant, float] = {}

    def time(self, variant: Variant, repeat: int) -> Turn:
        stream, marks, kept = self._stream, {}, None
        spin_us = max(FIRST_SPIN_US, SPIN_MARGIN * max(self._enqueue_us.values(), default=0.0))
        stream.wait()
        stream.spin(spin_us)
        start_us = stream.now_us()
        for name, run in variant.passes():
            stream.meet()
            start = stream.mark()
            kept = run(repeat, kept)
            marks[name] = start, stream.mark()
        enqueue_us = stream.now_us() - start_us
        stream.wait()
        # All ranks spin alike, or the first to wake waits for the last inside its collective.
        self._enqueue_us[variant] = stream.slowest(enqueue_us)
        return Turn({name: stream.between_us(*pair) for name, pair in marks.items()}, late=enqueue_us > spin_us)


def spin(ranks: Ranks, us: float) -> None:
    """Keep the GPU's current stream busy, so that the host can enqueue meanwhile."""
    torch.cuda._sleep(int(us * _cycles_per_us(ranks.device)))


def meet(ranks: Ranks) -> None:
    """Make the GPUs' streams wait for each other; the host goes on."""
    if ranks.world_size > 1:
        dist.all_reduce(_token(ranks.device))


@cache
def _token(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, device=device)


@cache
def _cycles_per_us(device: torch.device) -> float:
    """The rate of the clock that `torch.cuda._sleep` counts in."""
    cycles = 20_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize(device)
    return cycles / (start.elapsed_time(end) * 1e3)
