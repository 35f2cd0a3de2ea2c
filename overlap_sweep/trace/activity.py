"""What ran: every event that is work, its kind, iteration and pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.trace.grouping import places_by_value
from overlap_sweep.trace.kernel_classes import KernelClass, Kind, classify
from overlap_sweep.trace.kineto import Events, Trace
from overlap_sweep.trace.phases import Assignment, assign_device, assign_host

KINDS: tuple[Kind, ...] = get_args(Kind)
GEMM, COMM, WAIT, COMPUTE, MEMORY, IGNORE = range(len(KINDS))


@dataclass(frozen=True)
class Activity:
    """One rank's work: columns of equal length, one row per event."""

    events: Events
    kind: NDArray[np.int8]
    """Index into KINDS."""
    assignment: Assignment
    labels: list[tuple[str, str]]
    """Category and name, by `events.label`."""
    classes: dict[int, KernelClass]
    """By `events.label`."""
    lanes: list[tuple[str, str]]
    """Process and thread, or device and stream, by `events.lane`."""


def activity_of(trace: Trace) -> Activity:
    """The work on the device; in a trace without a device, the work on the CPU."""
    events = trace.device if len(trace.device) else trace.host
    classes = {int(label): classify(*trace.labels[label]) for label in np.unique(events.label)}
    kind_of_label = np.full(len(trace.labels), IGNORE, np.int8)
    for label, kernel_class in classes.items():
        kind_of_label[label] = KINDS.index(kernel_class.kind)
    kind = kind_of_label[events.label]
    if len(trace.device):
        return Activity(events, kind, assign_device(trace, kind == GEMM), trace.labels, classes, trace.lanes)
    chosen = _outermost(trace, kind)
    assignment = assign_host(trace, chosen, np.isin(kind[chosen], (COMM, WAIT)))
    return Activity(events[chosen], kind[chosen], assignment, trace.labels, classes, trace.lanes)


def _outermost(trace: Trace, kind: NDArray[np.int8]) -> NDArray[np.intp]:
    """The operators that stand for their time on the CPU, where operators call operators; indices into `trace.host`.

    What runs inside a communication span on a thread of gloo's, or inside a GEMM, is part of it. A GEMM that only calls
    another (aten::linear, aten::matmul) is dropped for the one that it calls. Of other operators the outermost count.
    """
    host = trace.host
    order = np.lexsort((-host.end_ns, host.start_ns, host.lane))
    kept = order[kind[order] != IGNORE]
    # On the thread that called it, a span of point-to-point communication lasts until somebody waits for it.
    calling = np.isin(host.lane, np.unique(host.lane[_calls_collectives(trace) | (kind == GEMM)]))
    swallowing = np.isin(kind[kept], (COMM, WAIT)) & ~calling[kept]
    kept = kept[~_within(host[kept], swallowing) | np.isin(kind[kept], (COMM, WAIT))]
    gemm = kept[kind[kept] == GEMM]
    callers = gemm[_calls_next(host[gemm])]
    kept = kept[~np.isin(kept, callers)]
    kept = kept[~_within(host[kept], kind[kept] == GEMM)]
    other = np.isin(kind[kept], (COMPUTE, MEMORY))
    return kept[~(other & _within(host[kept], other))]


def _calls_collectives(trace: Trace) -> NDArray[np.bool_]:
    """Which host events are operators of torch.distributed."""
    named = np.array([name.startswith("c10d::") for _, name in trace.labels], bool)
    return named[trace.host.label]


def _within(events: Events, outer: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which events lie inside another one of `outer` on their thread. Events are sorted by thread, start, -end."""
    within = np.zeros(len(events), bool)
    for _, here in places_by_value(events.lane):
        reach = np.maximum.accumulate(np.where(outer[here], events.end_ns[here], np.iinfo(np.int64).min))
        within[here[1:]] = events.start_ns[here[1:]] < reach[:-1]
    return within


def _calls_next(events: Events) -> NDArray[np.bool_]:
    """Which events contain the start of the next one on their thread. Sorted as for `_within`."""
    calls = np.zeros(len(events), bool)
    calls[:-1] = (events.lane[1:] == events.lane[:-1]) & (events.start_ns[1:] < events.end_ns[:-1])
    return calls
