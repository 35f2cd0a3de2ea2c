"""How much of the communication was hidden behind computation, per iteration and pass of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median, median_low
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from overlap_sweep.errors import UserError
from overlap_sweep.trace.activity import COMM, COMPUTE, GEMM, WAIT, Activity, activity_of
from overlap_sweep.trace.grouping import places_by_value
from overlap_sweep.trace.intervals import Intervals, intersect, length, merge, subtract
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.phases import BWD, FWD, NO_ITERATION, RECOMPUTE

MOST_ITERATIONS = 10_000
"""A millisecond each, and a few rows. People record some ten steps."""


class Overlap(msgspec.Struct, kw_only=True):
    """Times are unions: two kernels side by side count once. Microseconds, exact to the nanosecond."""

    span_us: float
    """From the first start to the last end."""
    gemm_busy_us: float
    comm_busy_us: float
    wait_us: float
    """Waiting for other ranks without moving data."""
    overlap_us: float
    """GEMM and communication at once."""
    exposed_comm_us: float
    """Communication with no computation beside it; copies and waits are none."""
    idle_us: float
    """The part of the span in which nothing runs, neither waits nor copies."""
    overlap_ratio: float | None
    """overlap / min(GEMM, communication); None without GEMMs or without communication."""
    num_gemm_events: int
    num_comm_events: int
    num_wait_events: int
    num_compute_events: int
    """Kernels, or outermost operators on the CPU, that compute something other than a GEMM."""


class TraceRow(Overlap):
    """One iteration and phase of one trace."""

    file: str
    rank: int | None
    """None when the trace doesn't say."""
    iteration: int
    """N of the trace's ProfilerStep#N; counted from 0 in a trace without."""
    phase: str
    """`fwd`; `bwd`; `recompute`, the part of `bwd` in which checkpoints run forward again; or `all` for the whole
    iteration, optimizer included."""


class PhaseSummary(Overlap):
    """One phase of one trace: of every quantity the median over the iterations (of the counts the lower median), and
    the ratio of these."""

    file: str
    rank: int | None
    phase: str
    iterations: int
    """How many iterations have the phase."""


def analyse_trace(path: Path | str) -> list[TraceRow]:
    """One row per iteration and phase that has any work, in order. UserError when there is none to analyse."""
    trace = read_trace(path)
    return overlap_rows(activity_of(trace), str(path), trace.rank)


def overlap_rows(activity: Activity, file: str, rank: int | None) -> list[TraceRow]:
    """One row per iteration and phase that has any work, in order. UserError when there is none to analyse."""
    if (count := len(np.unique(activity.assignment.iteration))) > MOST_ITERATIONS:
        raise UserError(f"{file} holds {count:,} iterations, more than {MOST_ITERATIONS:,}; record fewer steps.")
    intervals, kind = activity.events.intervals, activity.kind
    rows = [
        TraceRow(file, rank, iteration, phase, **asdict(measure(intervals[chosen], kind[chosen])))
        for iteration, phase, chosen in phases_of(activity)
    ]
    if not rows:
        raise UserError(f"{file} holds no work inside its iterations but copies; profile at least one forward pass.")
    return rows


def phases_of(activity: Activity) -> Iterator[tuple[int, str, NDArray[np.intp]]]:
    """Iteration, phase, and which events are in it; without those phases that have no work."""
    kind, assigned = activity.kind, activity.assignment
    for iteration, inside in places_by_value(assigned.iteration):
        # A copy after the last backward pass (loss.item()) would count as one more iteration.
        if iteration == NO_ITERATION or not np.isin(kind[inside], (GEMM, COMM, COMPUTE)).any():
            continue
        pass_ = assigned.pass_[inside]
        members = {
            "fwd": inside[pass_ == FWD],
            "bwd": inside[np.isin(pass_, (BWD, RECOMPUTE))],
            "recompute": inside[pass_ == RECOMPUTE],
            "all": inside,
        }
        for phase, chosen in members.items():
            if len(chosen):
                yield iteration, phase, chosen


def summarise(rows: Iterable[TraceRow]) -> list[PhaseSummary]:
    """Medians over the iterations of one file's rows, one summary per phase."""
    phases: dict[str, list[TraceRow]] = {}
    for row in rows:
        phases.setdefault(row.phase, []).append(row)
    summaries = []
    for phase, members in phases.items():
        quantities = [name for name in Overlap.__struct_fields__ if name != "overlap_ratio"]
        medians = {name: _median([getattr(row, name) for row in members]) for name in quantities}
        shorter_us = min(medians["gemm_busy_us"], medians["comm_busy_us"])
        medians["overlap_ratio"] = medians["overlap_us"] / shorter_us if shorter_us else None
        summaries.append(PhaseSummary(members[0].file, members[0].rank, phase, len(members), **medians))
    return summaries


def measure(intervals: Intervals, kind: NDArray[np.int8]) -> Overlap:
    """Overlap of at least one event, given as intervals [n, 2] in nanoseconds and kinds [n], indices into KINDS."""
    gemm, comm, wait = (merge(intervals[kind == k]) for k in (GEMM, COMM, WAIT))
    computation = merge(intervals[(kind == GEMM) | (kind == COMPUTE)])
    span_ns = int(intervals[:, 1].max() - intervals[:, 0].min())
    overlap_ns = length(intersect(gemm, comm))
    shorter_ns = min(length(gemm), length(comm))
    return Overlap(
        span_us=span_ns / 1000,
        gemm_busy_us=length(gemm) / 1000,
        comm_busy_us=length(comm) / 1000,
        wait_us=length(wait) / 1000,
        overlap_us=overlap_ns / 1000,
        exposed_comm_us=length(subtract(comm, computation)) / 1000,
        idle_us=(span_ns - length(merge(intervals))) / 1000,
        overlap_ratio=overlap_ns / shorter_ns if shorter_ns else None,
        num_gemm_events=int((kind == GEMM).sum()),
        num_comm_events=int((kind == COMM).sum()),
        num_wait_events=int((kind == WAIT).sum()),
        num_compute_events=int((kind == COMPUTE).sum()),
    )


def _median(values: list[Any]) -> Any:
    # The mean of two floats may end in digits that neither of them has.
    return median_low(values) if isinstance(values[0], int) else round(median(values), 9)
