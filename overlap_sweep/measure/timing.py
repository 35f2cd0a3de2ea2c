"""Time variants of one operator side by side: in turns, slowest rank, every repeat kept.

On a GPU the host needs longer to enqueue a small operator than the GPU needs to run it, so the repeats are
enqueued behind a spin kernel that keeps the GPU busy meanwhile; when the host still comes too late, the
measurement says so (`launch_bound`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from overlap_sweep.ranks import Ranks
from overlap_sweep.run_directory import Timing
from overlap_sweep.space import PASSES

Forward = Callable[[int], Any]
Backward = Callable[[int, Any], tuple[torch.Tensor, ...]]

SPIN_MARGIN = 1.5
"""The spin lasts this many times the longest enqueueing seen."""


@dataclass(frozen=True)
class Variant:
    """One way to compute the operator. Both functions take the repeat's number, to rotate their inputs by."""

    forward: Forward
    """-> what `backward` needs: the output."""
    backward: Backward
    """-> the gradients."""


@dataclass
class Samples:
    """Per pass the times of every repeat in microseconds, slowest rank; `all` is forward and backward together."""

    us: dict[str, list[float]]
    launch_bound: bool


def time_variants(variants: Mapping[str, Variant], ranks: Ranks, warmup: int, repeats: int) -> dict[str, Samples]:
    """Time every variant `repeats` times, in turns that rotate, so that drift and order hit all alike.

    Collective over the ranks. With `ranks.world_size` 1 nobody else is waited for.
    """
    clock = _Gpu(ranks) if ranks.device.type == "cuda" else _Cpu(ranks)
    names = list(variants)
    for repeat in range(warmup):
        for name in names:
            clock.time(variants[name], repeat)
    measured: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            measured[name].append(clock.time(variants[name], warmup + repeat))
    return {name: _over_ranks(samples, ranks) for name, samples in measured.items()}


def _over_ranks(samples: list[tuple[float, float, bool]], ranks: Ranks) -> Samples:
    forward = ranks.slowest([sample[0] for sample in samples])
    backward = ranks.slowest([sample[1] for sample in samples])
    late = ranks.slowest([float(sample[2]) for sample in samples])
    both = [fwd + bwd for fwd, bwd in zip(forward, backward, strict=True)]
    # A single late repeat moves no median.
    return Samples(dict(zip((*PASSES, "all"), (forward, backward, both), strict=True)), sum(late) > len(late) / 2)


def summarise(samples_us: list[float]) -> Timing:
    """Median and quartiles (linear interpolation between order statistics)."""
    quartiles = torch.tensor(samples_us, dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    q1, median, q3 = quartiles.tolist()
    return Timing(median_us=median, q1_us=q1, q3_us=q3, samples_us=samples_us)


class _Cpu:
    """Host clock; every pass starts when all ranks are there."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def time(self, variant: Variant, repeat: int) -> tuple[float, float, bool]:
        """(forward us, backward us, launch-bound) on this rank."""
        self._ranks.barrier()
        start = time.perf_counter_ns()
        kept = variant.forward(repeat)
        forward_us = (time.perf_counter_ns() - start) / 1e3
        self._ranks.barrier()
        start = time.perf_counter_ns()
        variant.backward(repeat, kept)
        return forward_us, (time.perf_counter_ns() - start) / 1e3, False


class _Gpu:
    """Events on the stream, behind a spin kernel; a tiny all-reduce before each pass starts all ranks together."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._spin_us = 2000.0

    def time(self, variant: Variant, repeat: int) -> tuple[float, float, bool]:
        """(forward us, backward us, launch-bound) on this rank."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self._ranks.barrier()
        spin(self._ranks, self._spin_us)
        start = time.perf_counter_ns()
        meet(self._ranks)
        marks[0].record()
        kept = variant.forward(repeat)
        marks[1].record()
        meet(self._ranks)
        marks[2].record()
        variant.backward(repeat, kept)
        marks[3].record()
        enqueue_us = (time.perf_counter_ns() - start) / 1e3
        self._ranks.synchronize()
        late = enqueue_us > self._spin_us
        # All ranks spin alike, or the first to wake waits for the last inside its collective.
        self._spin_us = max(self._spin_us, SPIN_MARGIN * self._ranks.slowest([enqueue_us])[0])
        return marks[0].elapsed_time(marks[1]) * 1e3, marks[2].elapsed_time(marks[3]) * 1e3, late


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
