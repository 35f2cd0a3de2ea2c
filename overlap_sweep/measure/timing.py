"""Time variants of one operator or layer side by side: in turns, slowest rank, every repeat kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from overlap_sweep.measure.clock import Clock, Turn, clock_for
from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.variant import Variant
from overlap_sweep.results.measured import Timing


@dataclass
class Samples:
    """Per pass the times of every repeat in microseconds, slowest rank; `all` is their sum."""

    us: dict[str, list[float]]
    launch_bound: bool


def time_variants(
    variants: Mapping[str, Variant], ranks: Ranks, warmup: int, repeats: int, clock: Clock | None = None
) -> dict[str, Samples]:
    """Time every variant `repeats` times, in turns that rotate, so that drift and order hit all alike.

    Turns are numbered through, so that none finds in a cache the input that another variant has just read.
    Collective over the ranks. With `ranks.world_size` 1 nobody else is waited for.
    """
    clock = clock or clock_for(ranks)
    names, number = list(variants), count()
    for _ in range(warmup):
        for name in names:
            _take_turn(clock, variants[name], next(number))
    measured: dict[str, list[Turn]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append(_take_turn(clock, variants[name], next(number)))
    return {name: _over_ranks(turns, ranks) for name, turns in measured.items()}


def _take_turn(clock: Clock, variant: Variant, number: int) -> Turn:
    if variant.prepare:
        variant.prepare()
        clock.time(variant, number)
    return clock.time(variant, number)


def _over_ranks(turns: Sequence[Turn], ranks: Ranks) -> Samples:
    us = {name: ranks.slowest([turn.us[name] for turn in turns]) for name in turns[0].us}
    us["all"] = [sum(passes) for passes in zip(*us.values(), strict=True)]
    late = ranks.slowest([float(turn.late) for turn in turns])
    # A single late repeat moves no median.
    return Samples(us, sum(late) > len(late) / 2)


def summarise(samples_us: list[float]) -> Timing:
    """Median and quartiles (linear interpolation between order statistics)."""
    quartiles = torch.tensor(samples_us, dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    q1, median, q3 = quartiles.tolist()
    return Timing(median_us=median, q1_us=q1, q3_us=q3, samples_us=samples_us)
