"""Time whole steps as they follow each other in training: the host runs ahead as far as it does there."""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import mean, median

from overlap_sweep.measure.ranks import Ranks
from overlap_sweep.measure.timing import Turn, Variant

HELD_UP = 0.9
"""Share of a step's time from which on the host may have waited for the device inside of its launches,"""
LEAD = 0.05
"""and share of a step that the device then has still to do when the host has enqueued the last one."""


class SteadyClock:
    """Several steps after one that is not timed. No spin kernel: how the host keeps up is part of a step."""

    def __init__(self, ranks: Ranks, steps: int) -> None:
        self._ranks, self._steps = ranks, steps
        self._host_us: dict[Variant, list[float]] = defaultdict(list)
        self._step_us: dict[Variant, list[float]] = defaultdict(list)
        self._lead: dict[Variant, list[float]] = defaultdict(list)

    def time(self, variant: Variant, repeat: int) -> Turn:
        """The mean of the steps. `variant.forward` is one, and returns a `Step`. Collective."""
        self._ranks.barrier()
        variant.forward(repeat)
        steps = [variant.forward(repeat) for _ in range(self._steps)]
        enqueued_s = time.perf_counter()
        self._ranks.synchronize()
        lead_us = (time.perf_counter() - enqueued_s) * 1e6
        step_us = steps[-1].end.after_ns(steps[0].begin) / 1e3 / self._steps
        self._host_us[variant].append(mean(step.host_s for step in steps) * 1e6)
        self._step_us[variant].append(step_us)
        self._lead[variant].append(lead_us / step_us)
        return Turn({"step": step_us}, late=False)

    def host_us(self, variant: Variant) -> float | None:
        """How long a step took the host: median over the turns, slowest rank. None where the host was held up: a device
        takes about a thousand launches ahead, and a step may have more of them. Collective."""
        host_us, behind = self._ranks.slowest([median(self._host_us[variant]), -median(self._lead[variant])])
        (step_us,) = self._ranks.slowest([median(self._step_us[variant])])
        held_up = host_us > HELD_UP * step_us and -behind > LEAD
        return None if held_up else host_us
