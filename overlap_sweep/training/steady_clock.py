"""Time whole steps as they follow each other in training: the host runs ahead as far as it does there."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean, median

from overlap_sweep.measure.clock import Turn
from overlap_sweep.measure.variant import Variant
from overlap_sweep.ranks import Ranks


class SteadyClock:
    """Several steps after one that is not timed. No spin kernel: how the host keeps up is part of a step."""

    def __init__(self, ranks: Ranks, steps: int) -> None:
        self._ranks, self._steps = ranks, steps
        self._host_us: dict[Variant, list[float]] = defaultdict(list)

    def time(self, variant: Variant, repeat: int) -> Turn:
        """The mean of the steps. `variant.forward` is one, and returns a `Step`. Collective."""
        self._ranks.barrier()
        variant.forward(repeat)
        steps = [variant.forward(repeat) for _ in range(self._steps)]
        self._ranks.synchronize()
        self._host_us[variant].append(mean(step.host_s for step in steps) * 1e6)
        return Turn({"step": steps[-1].end.after_ns(steps[0].begin) / 1e3 / self._steps}, late=False)

    def host_us(self, variant: Variant) -> float:
        """How long a step took the host: median over the turns, slowest rank. Collective."""
        return self._ranks.slowest([median(self._host_us[variant])])[0]
