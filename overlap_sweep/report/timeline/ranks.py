"""One rank's trace, read for drawing: what ran when, and in which iteration and pass."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.errors import UserError
from overlap_sweep.trace.activity import IGNORE, Activity, activity_of
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.overlap import phases_of
from overlap_sweep.trace.stream import blocks

WHOLE = "all"
"""The phase that is the whole iteration."""


@dataclass(frozen=True)
class RankTimeline:
    """One rank's work."""

    path: Path
    rank: int | None
    world_size: int | None
    base_time_ns: int
    """Since 1970; 0 where the trace doesn't say what it counts from."""
    device: str
    """Such as `NVIDIA H200, device 0`."""
    streams: list[str]
    """By lane what its stream is called, or on a CPU its thread; with its device where there are several."""
    activity: Activity
    phases: dict[int, dict[str, NDArray[np.intp]]]
    """By iteration and phase, which of the activity's events are in it."""

    def span_ns(self, iteration: int, phase: str = WHOLE) -> tuple[int, int]:
        """From the first start to the last end, as the trace counts."""
        events, inside = self.activity.events, self.phases[iteration][phase]
        return int(events.start_ns[inside].min()), int(events.end_ns[inside].max())

    def events_in(self, iterations: Iterable[int]) -> NDArray[np.intp]:
        """By iteration; there is at least one."""
        return np.concatenate([self.phases[iteration][WHOLE] for iteration in iterations])


def read_rank(path: Path) -> tuple[RankTimeline, list[str]]:
    """One rank's trace, and what its reader warned of. UserError when it cannot be read or has no iteration."""
    trace = read_trace(path)
    activity = activity_of(trace)
    phases: dict[int, dict[str, NDArray[np.intp]]] = {}
    for iteration, phase, of_phase in phases_of(activity):
        drawn = of_phase[activity.kind[of_phase] != IGNORE]
        if len(drawn):
            phases.setdefault(iteration, {})[phase] = drawn
    if not phases:
        raise UserError(f"{path} holds no work inside its iterations; profile at least one forward pass.")
    devices = sorted({activity.lanes[lane][0] for lane in np.unique(activity.events.lane)})
    timeline = RankTimeline(
        path=path,
        rank=trace.rank,
        world_size=trace.world_size,
        base_time_ns=trace.base_time_ns,
        device=_named(devices, path) if len(trace.device) else "CPU",
        streams=[f"{device}:{stream}" if len(devices) > 1 else stream for device, stream in activity.lanes],
        activity=activity,
        phases=phases,
    )
    return timeline, trace.warnings


def _named(devices: list[str], path: Path) -> str:
    """Kineto lists the host's devices before its events."""
    head = next(blocks(path, lambda _: None), b"").partition(b'"traceEvents"')[0]
    listed = re.findall(rb'"id":\s*(\d+),\s*"name":\s*"([^"]+)"', head)
    names = {number.decode(): name.decode(errors="replace") for number, name in listed}
    kinds = dict.fromkeys(names[number] for number in devices if number in names)
    return ", ".join([*kinds, f"device {' and '.join(devices)}"])
