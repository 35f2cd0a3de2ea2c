"""The spans of one iteration, for drawing: what ran when, on which stream."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from overlap_sweep.trace.activity import BWD, FWD, KINDS, RECOMPUTE, Activity, activity_of
from overlap_sweep.trace.kernel_classes import Kind
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.overlap import overlap_rows, startup_iterations

PHASE_OF_PASS = {FWD: "fwd", BWD: "bwd", RECOMPUTE: "recompute"}


@dataclass(frozen=True)
class Span:
    """One kernel or copy, or on a CPU one operator. Microseconds from the iteration's first start."""

    start_us: float
    end_us: float
    process: str
    """The device, or on a CPU the process."""
    stream: str
    """The stream, or on a CPU the thread."""
    kind: Kind
    library: str
    name: str
    phase: str
    """`fwd`, `bwd`, `recompute`, or empty for what belongs to neither pass."""


@dataclass(frozen=True)
class Iteration:
    """What one rank did in one iteration, by start."""

    rank: int | None
    number: int
    spans: list[Span]


def typical_iteration(path: Path | str) -> Iteration:
    """The iteration whose span is the (lower) median of those that are no start-up. UserError when there is none."""
    trace = read_trace(path)
    activity = activity_of(trace)
    rows = overlap_rows(activity, str(path), trace.rank)
    startup = startup_iterations(rows)
    whole = sorted((row.span_us, row.iteration) for row in rows if row.phase == "all" and row.iteration not in startup)
    number = whole[(len(whole) - 1) // 2][1]
    return Iteration(trace.rank, number, _spans(activity, number))


def _spans(activity: Activity, number: int) -> list[Span]:
    events, assigned = activity.events, activity.assignment
    chosen = np.flatnonzero(assigned.iteration == number)
    chosen = chosen[np.argsort(events.start_ns[chosen], kind="stable")]
    origin_ns = events.start_ns[chosen[0]]
    return [
        Span(
            start_us=int(events.start_ns[i] - origin_ns) / 1000,
            end_us=int(events.end_ns[i] - origin_ns) / 1000,
            process=activity.lanes[events.lane[i]][0],
            stream=activity.lanes[events.lane[i]][1],
            kind=KINDS[activity.kind[i]],
            library=activity.classes[int(events.label[i])].library,
            name=activity.labels[events.label[i]][1],
            phase=PHASE_OF_PASS.get(int(assigned.pass_[i]), ""),
        )
        for i in chosen
    ]
