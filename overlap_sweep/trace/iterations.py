"""Cuts the device's timeline into iterations, and chooses the events of each iteration and phase.

The host runs ahead of the device, and streams run side by side: kernels that were launched in one iteration may run
while the device still computes the one before. Each moment belongs to one iteration all the same, so that iterations
add up to the time that passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.trace.activity import (
    BWD,
    COMM,
    COMPUTE,
    FWD,
    GEMM,
    NO_ITERATION,
    RECOMPUTE,
    WAIT,
    Activity,
)
from overlap_sweep.trace.columns import Events
from overlap_sweep.trace.intervals import Intervals, places_by_value

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
    on_main = _on_main_lane(activity)
    main = on_main[np.argsort(events.start_ns[on_main], kind="stable")]
    done_ns = np.maximum.accumulate(events.end_ns[main])
    place_on_main = np.full(len(events), -1)
    place_on_main[main] = np.arange(len(main))
    found = [
        (events[inside], place_on_main[inside], number)
        for number, inside in places_by_value(iteration)
        if number != NO_ITERATION and works[inside].any()
    ]
    found.sort(key=lambda of_number: int(of_number[0].start_ns.min()))
    starts: list[tuple[int, int, int]] = []
    busy_until_ns = np.iinfo(np.int64).min
    for own, places, number in found:
        own_places = places[places >= 0]
        if len(own_places):
            first = own_places.min()
            busy_until_ns = done_ns[first - 1] if first else busy_until_ns
        if (start_ns := _first_moment(own, busy_until_ns)) is not None:
            starts.append((start_ns, int(own.end_ns.max()), number))
        if len(own_places):
            busy_until_ns = done_ns[own_places.max()]
    starts.sort()
    of_none = np.sort(events.start_ns[(iteration == NO_ITERATION) & (works | (activity.kind == WAIT))])
    spans = []
    for i, (start_ns, end_ns, number) in enumerate(starts):
        next_ns = starts[i + 1][0] if i + 1 < len(starts) else end_ns
        apart = np.searchsorted(of_none, next_ns) > np.searchsorted(of_none, end_ns)
        spans.append(IterationSpan(number, start_ns, end_ns if apart else next_ns))
    return spans


def _on_main_lane(activity: Activity) -> NDArray[np.intp]:
    """Returns the events of the lane with most computation, or without any with most events."""
    events = activity.events
    computes = np.isin(activity.kind, (GEMM, COMPUTE))
    took_ns = np.bincount(events.lane, np.where(computes, events.end_ns - events.start_ns, 0))
    main = np.argmax(took_ns if took_ns.any() else np.bincount(events.lane))
    return np.flatnonzero(events.lane == main)


def _first_moment(own: Events, from_ns: int) -> int | None:
    """Returns the first moment from `from_ns` on at which one of the events runs, or None."""
    later = (own.end_ns > from_ns) | (own.start_ns >= from_ns)
    return max(int(own.start_ns[later].min()), int(from_ns)) if later.any() else None


def phases_of(activity: Activity) -> Iterator[PhaseEvents]:
    """Yields the phases that have events, iteration by iteration."""
    spans = iteration_spans(activity)
    intervals, assigned = activity.events.intervals, activity.assignment
    launched = dict(places_by_value(assigned.iteration))
    running = _running_in(spans, intervals)
    for span, (whole, within) in zip(spans, running, strict=True):
        inside = launched[span.number]
        pass_ = assigned.pass_[inside]
        passes = {
            "fwd": inside[pass_ == FWD],
            "bwd": inside[np.isin(pass_, (BWD, RECOMPUTE))],
            "recompute": inside[pass_ == RECOMPUTE],
        }
        for phase, chosen in passes.items():
            if len(chosen):
                own = intervals[chosen]
                span_ns = int(own[:, 0].min()), int(own[:, 1].max())
                yield PhaseEvents(span.number, phase, span_ns, chosen, own, np.ones(len(chosen), bool))
        span_ns = span.start_ns, span.end_ns
        yield PhaseEvents(span.number, "all", span_ns, whole, within, intervals[whole, 0] >= span.start_ns)


def _running_in(spans: list[IterationSpan], intervals: Intervals) -> Iterator[tuple[NDArray[np.intp], Intervals]]:
    """Yields for each span the events that run in it, as indices and as intervals within the span."""
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
