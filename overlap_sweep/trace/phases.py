"""Which iteration and which pass every event belongs to.

That is decided by *moments*: when, and on which thread, the host asked for something. On a device that is a kernel's
launch, in a CPU trace every operator. What is asked for inside `autograd::engine::evaluate_function` belongs to the
backward pass, so recomputation there does too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.trace.intervals import contains, merge
from overlap_sweep.trace.kineto import NO_CORRELATION, Events, Trace

FWD, BWD, NEITHER = 0, 1, 2
"""The optimizer and barriers are in NEITHER pass; they count in their iteration as a whole."""

NO_ITERATION = -1
"""Outside the profiler's steps, in a trace that has them."""

_BACKWARD = re.compile(r"autograd::engine::evaluate_function")
_NEITHER = re.compile(r"Optimizer\.(step|zero_grad)#|c10d::barrier$")
_STEP = re.compile(r"ProfilerStep#(\d+)$")


@dataclass(frozen=True)
class Assignment:
    """Columns beside those of some events."""

    iteration: NDArray[np.int64]
    """N of ProfilerStep#N; without such steps, counted from 0. NO_ITERATION for what is outside of all steps."""
    pass_: NDArray[np.int8]

    def __getitem__(self, chosen: NDArray[np.intp]) -> Assignment:
        return Assignment(self.iteration[chosen], self.pass_[chosen])


def assign_device(trace: Trace) -> Assignment:
    """Iteration and pass of each of `trace.device`: those of its launch.

    All kernels of a CUDA graph have the launch of the graph. An event without a launch follows the event before it on
    its stream, or, if that has none either, the event before it on any stream.
    """
    launch = _launches_of(trace)
    known = launch >= 0
    if not known.any():
        nothing = np.zeros(len(launch), np.int64)
        return Assignment(nothing, nothing.astype(np.int8))
    moments, moment = np.unique(launch[known], return_inverse=True)
    assigned = _assign_moments(trace, trace.launches[moments])
    rank = np.cumsum(known) - 1
    leader = _leaders(known, trace.device.lane, trace.device.start_ns)
    return assigned[moment[rank[leader]]]


def assign_host(trace: Trace, events: Events) -> Assignment:
    """Iteration and pass of host events: those of the threads that run autograd, at the moment the event starts.

    Nothing in a trace ties gloo's spans, which run on threads of their own, to the operators that launched them. Where
    a pass waits for its communication before it ends, a span starts in the pass that launched it.
    """
    host = trace.host
    driving = np.isin(host.lane, np.unique(host.lane[_named(trace, _BACKWARD)]))
    moments = host[driving] if driving.any() else host
    moments = moments[np.argsort(moments.start_ns, kind="stable")]
    now = np.searchsorted(moments.start_ns, events.start_ns, side="right") - 1
    return _assign_moments(trace, moments)[np.maximum(now, 0)]


def _assign_moments(trace: Trace, moments: Events) -> Assignment:
    pass_ = np.full(len(moments), FWD, np.int8)
    pass_[_inside(trace, _BACKWARD, moments)] = BWD
    pass_[_inside(trace, _NEITHER, moments)] = NEITHER
    steps = _named(trace, _STEP)
    if steps.any():
        return Assignment(_iterations_by_step(trace, trace.host[steps], moments.start_ns), pass_)
    return Assignment(_iterations_by_turn(moments.start_ns, pass_), pass_)


def _iterations_by_step(trace: Trace, steps: Events, moments_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    steps = steps[np.argsort(steps.start_ns)]
    numbers = np.array([int(trace.labels[label][1].partition("#")[2]) for label in steps.label])
    step = np.searchsorted(steps.start_ns, moments_ns, side="right") - 1
    inside = (step >= 0) & (moments_ns < steps.end_ns[step])
    return np.where(inside, numbers[step], NO_ITERATION)


def _iterations_by_turn(moments_ns: NDArray[np.int64], pass_: NDArray[np.int8]) -> NDArray[np.int64]:
    """Every turn from backward to forward starts an iteration."""
    order = np.argsort(moments_ns, kind="stable")
    order = order[pass_[order] != NEITHER]
    turns = (pass_[order][:-1] == BWD) & (pass_[order][1:] == FWD)
    return np.searchsorted(moments_ns[order][1:][turns], moments_ns, side="right")


def _launches_of(trace: Trace) -> NDArray[np.intp]:
    """For each device event the index of the first launch with its correlation, or -1."""
    launches, wanted = trace.launches, trace.device.correlation
    if not len(launches):
        return np.full(len(wanted), -1)
    order = np.lexsort((launches.start_ns, launches.correlation))
    place = np.searchsorted(launches.correlation[order], wanted)
    found = order[np.minimum(place, len(order) - 1)]
    return np.where((launches.correlation[found] == wanted) & (wanted != NO_CORRELATION), found, -1)


def _leaders(known: NDArray[np.bool_], lane: NDArray[np.int32], start_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """For each event the index of the one whose launch decides: itself if its launch is known."""
    on_stream = _last_known(known, np.lexsort((start_ns, lane)))
    on_any = _last_known(known, np.argsort(start_ns, kind="stable"))
    first = np.flatnonzero(known)[np.argmin(start_ns[known])]
    leader = np.where(on_any >= 0, on_any, first)
    return np.where((on_stream >= 0) & (lane[on_stream] == lane), on_stream, leader)


def _last_known(known: NDArray[np.bool_], order: NDArray[np.intp]) -> NDArray[np.intp]:
    """For each event the index of the last known one up to it in this order, or -1."""
    place = np.maximum.accumulate(np.where(known[order], np.arange(len(order)), -1))
    last = np.empty(len(order), np.intp)
    last[order] = np.where(place >= 0, order[place], -1)
    return last


def _named(trace: Trace, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Which host events' names begin with the pattern."""
    matches = np.array([pattern.match(name) is not None for _, name in trace.labels], bool)
    return matches[trace.host.label]


def _inside(trace: Trace, pattern: re.Pattern[str], moments: Events) -> NDArray[np.bool_]:
    """Which moments lie inside a host event of such a name on their own thread."""
    outer = trace.host[_named(trace, pattern)]
    inside = np.zeros(len(moments), bool)
    for lane in np.unique(outer.lane):
        here = moments.lane == lane
        inside[here] = contains(merge(outer[outer.lane == lane].intervals), moments.start_ns[here])
    return inside
