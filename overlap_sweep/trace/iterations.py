"""Cuts the device's timeline into iterations, and measures overlap, exposed communication and the times of kernels and
streams in each iteration and phase.

The host runs ahead of the device, and streams run side by side: kernels that were launched in one iteration may run
while the device still computes the one before. Each moment belongs to one iteration all the same, so that iterations
add up to the time that passed.
"""

from collections.abc import Iterator
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.errors import UserError
from overlap_sweep.trace import Grouping, PartRow, TraceRow
from overlap_sweep.trace.activity import (
    BWD,
    COMM,
    COMPUTE,
    FWD,
    GEMM,
    KINDS,
    NO_ITERATION,
    RECOMPUTE,
    WAIT,
    Activity,
)
from overlap_sweep.trace.intervals import Intervals, Measure, merge, places_by_value

MOST_ITERATIONS = 10_000
"""Each takes a millisecond and a few rows. Usual traces have about ten steps."""

_BATCH = 1 << 14
"""Events of phases that are measured together: those of a short phase take less time than calls of numpy."""

_UNIONS, _BOTH = 4, 3
"""Number of unions of a phase: of GEMM, COMM and WAIT, and of GEMMs and communication."""

_WORK = (GEMM, COMM, COMPUTE)
"""What makes an iteration. A copy after the last backward pass (loss.item()) is none by itself."""


class IterationSpan(NamedTuple):
    """Time of one iteration on the device's timeline; on a CPU, on the host's."""

    number: int
    """N of ProfilerStep#N; counted from 0 in a trace without such steps."""
    start_ns: int
    end_ns: int
    """Start of the next iteration; the end of its own last event if it is the last one, or if work of no iteration,
    such as a benchmark's own, starts between them."""
    startup: bool = False
    """Whether it contains the profiler's start, as far as is known of it alone."""


class PhaseEvents(NamedTuple):
    """The events of one phase of one iteration."""

    iteration: int
    phase: str
    """`fwd`, `bwd` or `recompute`: what was launched in it; or `all`: what runs in the iteration's span."""
    span_ns: tuple[int, int]
    events: NDArray[np.intp]
    """Indices of the activity's events."""
    intervals: Intervals
    """Times of the events, of `all` within the span."""
    starts: NDArray[np.bool_]
    """Mask of the events that start in the span: each does so in only one iteration."""


def iteration_spans(activity: Activity) -> list[IterationSpan]:
    """Returns the spans of the iterations that have work, by time. They do not overlap.

    An iteration starts with its first event, but not before the main stream, the one that computes most, has done what
    it was given before. Without time of its own it has no span.
    """
    events, iteration = activity.events, activity.assignment.iteration
    works = np.isin(activity.kind, _WORK)
    if not works.any():
        return []
    # The main lane has most computation, or without any most events.
    computes = np.isin(activity.kind, (GEMM, COMPUTE))
    took_ns = np.bincount(events.lane, np.where(computes, events.end_ns - events.start_ns, 0))
    on_main = np.flatnonzero(events.lane == np.argmax(took_ns if took_ns.any() else np.bincount(events.lane)))
    main = on_main[np.argsort(events.start_ns[on_main], kind="stable")]
    done_ns = np.maximum.accumulate(events.end_ns[main])
    place_on_main = np.full(len(events), -1)
    place_on_main[main] = np.arange(len(main))
    found = [
        (events[inside], place_on_main[inside], number)
        for number, inside in places_by_value(iteration)
        if number != NO_ITERATION and works[inside].any()
    ]
    found.sort(key=lambda one: int(one[0].start_ns.min()))
    starts: list[tuple[int, int, int]] = []
    busy_until_ns = np.iinfo(np.int64).min
    for own, places, number in found:
        own_places = places[places >= 0]
        if len(own_places):
            first = own_places.min()
            busy_until_ns = done_ns[first - 1] if first else busy_until_ns
        later = (own.end_ns > busy_until_ns) | (own.start_ns >= busy_until_ns)
        if later.any():
            start_ns = max(int(own.start_ns[later].min()), int(busy_until_ns))
            starts.append((start_ns, int(own.end_ns.max()), number))
        if len(own_places):
            busy_until_ns = done_ns[own_places.max()]
    starts.sort()
    outside_ns = np.sort(events.start_ns[(iteration == NO_ITERATION) & (works | (activity.kind == WAIT))])
    spans = []
    for i, (start_ns, end_ns, number) in enumerate(starts):
        next_ns = starts[i + 1][0] if i + 1 < len(starts) else end_ns
        apart = np.searchsorted(outside_ns, next_ns) > np.searchsorted(outside_ns, end_ns)
        spans.append(IterationSpan(number, start_ns, end_ns if apart else next_ns))
    return spans


def phases_of(activity: Activity) -> Iterator[PhaseEvents]:
    """Yields the phases that have events, iteration by iteration."""
    spans = iteration_spans(activity)
    intervals, assigned = activity.events.intervals, activity.assignment
    launched = dict(places_by_value(assigned.iteration))
    running = _running_in(spans, intervals)
    is_backward = np.isin(assigned.pass_, (BWD, RECOMPUTE))
    for span, (whole, clipped) in zip(spans, running, strict=True):
        inside = launched[span.number]
        pass_ = assigned.pass_[inside]
        passes = {
            "fwd": inside[pass_ == FWD],
            "bwd": inside[is_backward[inside]],
            "recompute": inside[pass_ == RECOMPUTE],
        }
        for phase, chosen in passes.items():
            if len(chosen):
                own = intervals[chosen]
                span_ns = int(own[:, 0].min()), int(own[:, 1].max())
                yield PhaseEvents(span.number, phase, span_ns, chosen, own, np.ones(len(chosen), bool))
        span_ns = span.start_ns, span.end_ns
        yield PhaseEvents(span.number, "all", span_ns, whole, clipped, intervals[whole, 0] >= span.start_ns)


def _running_in(spans: list[IterationSpan], intervals: Intervals) -> Iterator[tuple[NDArray[np.intp], Intervals]]:
    starts_ns = np.array([span.start_ns for span in spans], np.int64)
    ends_ns = np.array([span.end_ns for span in spans], np.int64)
    first = np.searchsorted(ends_ns, intervals[:, 0], side="right")
    beyond = np.searchsorted(starts_ns, np.maximum(intervals[:, 1], intervals[:, 0] + 1))
    # An event without length is in one span, also at its very end.
    without = intervals[:, 0] == intervals[:, 1]
    first[without] = np.maximum(np.searchsorted(ends_ns, intervals[without, 0]), beyond[without] - 1)
    count = np.maximum(beyond - first, 0)
    event = np.repeat(np.arange(len(intervals)), count)
    # The first one of each event's spans, then the next, and so on.
    which = first[event] + np.arange(len(event)) - np.repeat(np.cumsum(count) - count, count)
    places = dict(places_by_value(which))
    for number, span in enumerate(spans):
        inside = event[places[number]] if number in places else np.empty(0, np.intp)
        yield inside, np.clip(intervals[inside], span.start_ns, span.end_ns)


def overlap_rows(activity: Activity, file: str, rank: int | None) -> list[TraceRow]:
    """Returns one row per iteration and phase that has any work, in order. UserError when there is no work."""
    if (count := len(np.unique(activity.assignment.iteration))) > MOST_ITERATIONS:
        raise UserError(f"{file} has {count:,} iterations, more than {MOST_ITERATIONS:,}; record fewer steps.")
    intervals = activity.events.intervals
    running = Measure(intervals)
    computing = Measure(intervals[np.isin(activity.kind, (GEMM, COMPUTE))])
    rows = [
        row
        for phases in _batches(phases_of(activity))
        for row in _rows(phases, activity, running, computing, file, rank)
    ]
    if not rows:
        raise UserError(f"{file} has no work but copies inside its iterations; profile at least one forward pass.")
    return rows


def _batches(phases: Iterator[PhaseEvents]) -> Iterator[list[PhaseEvents]]:
    batch: list[PhaseEvents] = []
    events = 0
    for phase in phases:
        batch.append(phase)
        events += 1 + len(phase.events)
        if events > _BATCH:
            yield batch
            batch, events = [], 0
    if batch:
        yield batch


def _rows(
    phases: list[PhaseEvents], activity: Activity, running: Measure, computing: Measure, file: str, rank: int | None
) -> Iterator[TraceRow]:
    """Yields one row per phase. `running`, `computing`: when anything runs or computes, whichever phase it belongs
    to."""
    phase = np.repeat(np.arange(len(phases)), [len(one.events) for one in phases])
    intervals = np.concatenate([one.intervals for one in phases])
    kind = activity.kind[np.concatenate([one.events for one in phases])]
    counts = np.zeros((len(phases), len(KINDS)), np.int64)
    starts = np.concatenate([one.starts for one in phases])
    np.add.at(counts, (phase[starts], kind[starts]), 1)
    # Unions by phase: of GEMMs, of communication, of waits, and of both of the first.
    measured, both = np.isin(kind, (GEMM, COMM, WAIT)), np.isin(kind, (GEMM, COMM))
    column = np.concatenate((phase[measured] * _UNIONS + kind[measured], phase[both] * _UNIONS + _BOTH))
    unions, column = unions_by_group(np.concatenate((intervals[measured], intervals[both])), column)
    lengths_ns = np.zeros((len(phases), _UNIONS), np.int64)
    np.add.at(lengths_ns.reshape(-1), column, unions[:, 1] - unions[:, 0])
    gemm_ns, comm_ns = lengths_ns[:, GEMM], lengths_ns[:, COMM]
    overlap_ns = gemm_ns + comm_ns - lengths_ns[:, _BOTH]
    communicates = column % _UNIONS == COMM
    hidden_ns = np.zeros(len(phases))
    np.add.at(hidden_ns, column[communicates] // _UNIONS, computing.within(unions[communicates]))
    spans_ns = np.array([one.span_ns for one in phases], np.int64)
    span_ns, end_ns = spans_ns[:, 1] - spans_ns[:, 0], spans_ns[:, 1]
    # The last one is for what ends before anything has run.
    stopped_ns = np.append(running.union[:, 1], 1 << 62)[np.searchsorted(running.union[:, 0], end_ns) - 1]
    times_ns = {
        "pause_us": np.maximum(0, end_ns - stopped_ns),
        "span_us": span_ns,
        "gemm_us": gemm_ns,
        "comm_us": comm_ns,
        "wait_us": lengths_ns[:, WAIT],
        "overlap_us": overlap_ns,
        "exposed_comm_us": comm_ns - hidden_ns,
        "idle_us": span_ns - running.within(spans_ns),
    }
    columns = {name: (time_ns / 1000).tolist() for name, time_ns in times_ns.items()}
    columns |= {f"num_{KINDS[kind]}_events": counts[:, kind].tolist() for kind in (GEMM, COMM, WAIT, COMPUTE)}
    shorter_ns = np.minimum(gemm_ns, comm_ns).tolist()
    columns["overlap_ratio"] = [
        part / whole if whole else None for part, whole in zip(overlap_ns.tolist(), shorter_ns, strict=True)
    ]
    for one, *own in zip(phases, *columns.values(), strict=True):
        yield TraceRow(file, rank, one.iteration, one.phase, **dict(zip(columns, own, strict=True)))


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
    unions, group_of_union = unions_by_group(intervals, group)
    busy = np.zeros(num_groups, np.int64)
    np.add.at(busy, group_of_union, unions[:, 1] - unions[:, 0])
    return busy, total, _alone(unions, group_of_union, num_groups)


def unions_by_group(intervals: Intervals, group: NDArray[np.intp]) -> tuple[Intervals, NDArray[np.int64]]:
    """Returns the union of each group's intervals, one group after the other, and the group of each interval of it."""
    # Shifted apart, all groups merge in one call. Ranks of the moments are shifted instead of the moments, which may be
    # too far apart in a damaged trace.
    moments, ranks = np.unique(intervals, return_inverse=True)
    unions = merge(ranks.reshape(intervals.shape) + (group * len(moments))[:, None])
    group_of_union = unions[:, 0] // max(len(moments), 1)
    return moments[unions - (group_of_union * len(moments))[:, None]], group_of_union


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
