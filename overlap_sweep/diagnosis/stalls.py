"""Finds when a device ran nothing at all, though the host had launched what ran next: what it waited for is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import LATENCY_NS, NEVER
from overlap_sweep.trace.activity import Activity
from overlap_sweep.trace.columns import Events, Trace
from overlap_sweep.trace.intervals import merge
from overlap_sweep.trace.kernel_classes import short_name

LOOKED_AT = 256
"""Events that are looked at for the one before on the same stream."""

_HOLDS_BACK = re.compile(
    r"(cuda|hip)(LaunchHostFunc|StreamAddCallback)|(cuda|hip)StreamWaitEvent|(cu|cuda|hip)StreamWaitValue"
)


@dataclass(frozen=True)
class Stall:
    """Time in which the device ran nothing, after what ended it had been launched."""

    start_ns: int
    end_ns: int
    launch_ns: int
    """Of what ended it; NEVER if unknown."""
    before: str
    """What had run before."""
    after: str
    """What ended it."""
    stream: str
    """Of what ended it."""
    holds_back: str
    """Call of the runtime that makes a stream wait, between the launches of what ran before on this stream and of what
    ended the stall; empty if there is none."""


def launched_ns(trace: Trace, launch: NDArray[np.intp], start_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns when the host had launched events of the device; NEVER where it is unknown.

    That is the start of the call, unless the host was held up in it: it took long, and the event started right after
    it. `launch`: index of the events' launches, or -1; `start_ns`: of the events.
    """
    if not len(trace.launches):
        return np.full(len(launch), NEVER, np.int64)
    called, returned = trace.launches.start_ns[launch], np.minimum(trace.launches.end_ns[launch], start_ns)
    held_up = (returned - called > LATENCY_NS) & (start_ns - returned <= LATENCY_NS)
    return np.where(launch < 0, NEVER, np.where(held_up, returned, called))


def stalls_of(trace: Trace, activity: Activity, launch: NDArray[np.intp]) -> Iterator[Stall]:
    """Yields the stalls of the device. `launch`: index of each event's launch, or -1."""
    events = activity.events
    busy = merge(events.intervals)
    starts, ends = busy[:-1, 1], busy[1:, 0]
    order = np.argsort(events.start_ns, kind="stable")
    places = np.searchsorted(events.start_ns, ends, sorter=order)
    launched = launch[order[places]]
    launch_ns = launched_ns(trace, launched, ends)
    since = np.maximum(starts, launch_ns)
    by_end = np.argsort(events.end_ns, kind="stable")
    holds = np.array([_HOLDS_BACK.match(name) is not None for _, name in trace.labels], bool)
    holding = trace.launches[holds[trace.launches.label]]
    for i in np.flatnonzero(ends - since >= LATENCY_NS).tolist():
        after = int(order[places[i]])
        earlier = order[max(0, places[i] - LOOKED_AT) : places[i]]
        on_stream = earlier[events.lane[earlier] == events.lane[after]]
        yield Stall(
            *(int(since[i]), int(ends[i]), int(launch_ns[i])),
            before=_name(activity, int(by_end[np.searchsorted(events.end_ns, starts[i], sorter=by_end)])),
            after=_name(activity, after),
            stream=trace.lanes[int(events.lane[after])][1],
            holds_back=_holding(trace, holding, launch[on_stream[-1:]], launch[after]),
        )


def _name(activity: Activity, event: int) -> str:
    return short_name(activity.labels[activity.events.label[event]][1])


def _holding(trace: Trace, holding: Events, before: NDArray[np.intp], launch: np.intp) -> str:
    """Returns the last of the `holding` calls between two launches of a thread."""
    if launch < 0:
        return ""
    since = int(trace.launches.start_ns[before[0]]) if len(before) and before[0] >= 0 else NEVER
    lane, until = trace.launches.lane[launch], trace.launches.start_ns[launch]
    found = np.flatnonzero((holding.lane == lane) & (holding.start_ns > since) & (holding.start_ns < until))
    return trace.labels[holding.label[found[-1]]][1] if len(found) else ""
