"""Measures overlap, exposed communication and the times of kernels and streams, per iteration and phase."""

from __future__ import annotations

from typing import NamedTuple, get_args

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from overlap_sweep.errors import UserError
from overlap_sweep.trace import Grouping, Overlap, PartRow, TraceRow
from overlap_sweep.trace.activity import COMM, COMPUTE, GEMM, KINDS, WAIT, Activity
from overlap_sweep.trace.intervals import Intervals, intersect, length, merge, places_by_value, subtract, within
from overlap_sweep.trace.iterations import PhaseEvents, phases_of

MOST_ITERATIONS = 10_000
"""Each takes a millisecond and a few rows. Usual traces have about ten steps."""


def overlap_rows(activity: Activity, file: str, rank: int | None) -> list[TraceRow]:
    """Returns one row per iteration and phase that has any work, in order. UserError when there is no work."""
    if (count := len(np.unique(activity.assignment.iteration))) > MOST_ITERATIONS:
        raise UserError(f"{file} has {count:,} iterations, more than {MOST_ITERATIONS:,}; record fewer steps.")
    intervals, kind = activity.events.intervals, activity.kind
    running, computing = merge(intervals), merge(intervals[np.isin(kind, (GEMM, COMPUTE))])
    rows = []
    for phase in phases_of(activity):
        measured = asdict(measure(phase, kind[phase.events], running, computing))
        pause_us = _pause_ns(running, phase.span_ns[1]) / 1000
        rows.append(TraceRow(file, rank, phase.iteration, phase.phase, pause_us, **measured))
    if not rows:
        raise UserError(f"{file} has no work but copies inside its iterations; profile at least one forward pass.")
    return rows


def _pause_ns(running: Intervals, moment_ns: int) -> int:
    """Returns for how long nothing has run at the moment."""
    before = np.searchsorted(running[:, 0], moment_ns) - 1
    return max(0, moment_ns - int(running[before, 1])) if before >= 0 else 0


def measure(phase: PhaseEvents, kind: NDArray[np.int8], running: Intervals, computing: Intervals) -> Overlap:
    """Returns the overlap of a phase. `kind`: of its events, indices into KINDS; `running`, `computing`: unions of when
    anything runs or computes, whichever phase it belongs to."""
    gemm, comm, wait = (merge(phase.intervals[kind == k]) for k in (GEMM, COMM, WAIT))
    start_ns, end_ns = phase.span_ns
    overlap_ns = length(intersect(gemm, comm))
    shorter_ns = min(length(gemm), length(comm))
    counts = np.bincount(kind[phase.starts], minlength=len(KINDS)).tolist()
    return Overlap(
        span_us=(end_ns - start_ns) / 1000,
        gemm_us=length(gemm) / 1000,
        comm_us=length(comm) / 1000,
        wait_us=length(wait) / 1000,
        overlap_us=overlap_ns / 1000,
        exposed_comm_us=length(subtract(comm, within(computing, start_ns, end_ns))) / 1000,
        idle_us=(end_ns - start_ns - length(within(running, start_ns, end_ns))) / 1000,
        overlap_ratio=overlap_ns / shorter_ns if shorter_ns else None,
        num_gemm_events=counts[GEMM],
        num_comm_events=counts[COMM],
        num_wait_events=counts[WAIT],
        num_compute_events=counts[COMPUTE],
    )


class _Group(NamedTuple):
    kind: str
    library: str
    name: str


def breakdown(activity: Activity, file: str, rank: int | None) -> list[PartRow]:
    """Returns the parts of every iteration and phase in each grouping, sorted by busy time."""
    rows: list[PartRow] = []
    for phase in phases_of(activity):
        for by in get_args(Grouping):
            groups, group = _groups(activity, by, phase.events)
            busy_ns, total_ns, alone_ns = measure_groups(phase.intervals, group, len(groups))
            num_events = np.bincount(group[phase.starts], minlength=len(groups))
            for i in np.lexsort((np.arange(len(groups)), -busy_ns)):
                rows.append(
                    PartRow(
                        file=file,
                        rank=rank,
                        iteration=phase.iteration,
                        phase=phase.phase,
                        by=by,
                        **groups[i]._asdict(),
                        num_events=int(num_events[i]),
                        busy_us=int(busy_ns[i]) / 1000,
                        total_us=int(total_ns[i]) / 1000,
                        alone_us=int(alone_ns[i]) / 1000,
                    )
                )
    return rows


def measure_groups(
    intervals: Intervals, group: NDArray[np.intp], num_groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns busy, total and alone time per group [num_groups]: length of the union, sum of lengths, and length in
    which no other group runs.

    `intervals` [n, 2] in nanoseconds, `group` [n] from 0 to num_groups - 1.
    """
    total = np.zeros(num_groups, np.int64)
    np.add.at(total, group, intervals[:, 1] - intervals[:, 0])
    # Shifted apart, all groups merge in one call. Ranks of the moments are shifted instead of the moments, which may be
    # too far apart in a damaged trace.
    moments, ranks = np.unique(intervals, return_inverse=True)
    unions = merge(ranks.reshape(intervals.shape) + (group * len(moments))[:, None])
    of_union = unions[:, 0] // len(moments)
    unions = moments[unions - (of_union * len(moments))[:, None]]
    busy = np.zeros(num_groups, np.int64)
    np.add.at(busy, of_union, unions[:, 1] - unions[:, 0])
    return busy, total, _alone(unions, of_union, num_groups)


def _alone(unions: Intervals, group: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    moments = np.concatenate((unions[:, 0], unions[:, 1]))
    steps = np.repeat([1, -1], len(unions))
    order = np.argsort(moments, kind="stable")
    moments, steps, group = moments[order], steps[order], np.tile(group, 2)[order]
    running = np.cumsum(steps)[:-1]
    # Where a single group runs, the sum of the running groups' numbers is its number.
    which = np.cumsum(steps * group)[:-1]
    alone = np.zeros(num_groups, np.int64)
    np.add.at(alone, which[running == 1], np.diff(moments)[running == 1])
    return alone


def _groups(activity: Activity, by: Grouping, chosen: NDArray[np.intp]) -> tuple[list[_Group], NDArray[np.intp]]:
    """Returns the groups of the chosen events, and the group of each event."""
    if by == "stream":
        lanes, lane = np.unique(activity.events.lane[chosen], return_inverse=True)
        groups = []
        for number, (_, on_lane) in zip(lanes, places_by_value(lane), strict=True):
            classes = {activity.classes[int(label)] for label in np.unique(activity.events.label[chosen[on_lane]])}
            kinds = sorted({kernel_class.kind for kernel_class in classes}, key=KINDS.index)
            libraries = sorted({kernel_class.library for kernel_class in classes})
            groups.append(_Group("+".join(kinds), "+".join(libraries), " ".join(activity.lanes[number])))
        return groups, lane
    labels, label = np.unique(activity.events.label[chosen], return_inverse=True)
    label_classes = [activity.classes[int(number)] for number in labels]
    if by == "kernel":
        return [
            _Group(*of, activity.labels[number][1]) for of, number in zip(label_classes, labels, strict=True)
        ], label
    place = {kernel_class: i for i, kernel_class in enumerate(dict.fromkeys(label_classes))}
    groups = [_Group(*of, " ".join(reversed(of))) for of in place]
    return groups, np.array([place[of] for of in label_classes], np.intp)[label]
