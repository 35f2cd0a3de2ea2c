"""Which iteration and which pass every event belongs to.

That is decided by *moments*: when, and on which thread, the host asked for something. On a device that is a kernel's
launch, in a CPU trace every operator. What is asked for inside `autograd::engine::evaluate_function` belongs to the
backward pass; so does what checkpoints recompute there, which is told apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.trace.grouping import places_by_value
from overlap_sweep.trace.intervals import contains, merge
from overlap_sweep.trace.kineto import NO_CORRELATION, Events, Trace

FWD, BWD, NEITHER, RECOMPUTE = range(4)
"""The optimizer and barriers are in NEITHER pass; they count in their iteration as a whole. So does a CUDA graph in a
trace without autograd, since it may hold both passes. RECOMPUTE is the part of the backward pass in which checkpoints
run forward again."""

NO_ITERATION = -1
"""Outside the profiler's steps, in a trace that has them."""

_NOWHERE = np.empty(0, np.intp)

_BACKWARD = re.compile(r"autograd::engine::evaluate_function")
_NEITHER = re.compile(r"Optimizer\.(step|zero_grad)#|c10d::barrier$")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
_GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch")


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
    is_graph = _matches(trace, _GRAPH_LAUNCH)[trace.launches.label[moments]]
    if is_graph.any() and not np.isin(assigned.pass_, (BWD, RECOMPUTE)).any():
        assigned = _assign_graphs(trace, assigned, trace.launches.start_ns[moments], is_graph, known, moment)
    rank = np.cumsum(known) - 1
    leader = _leaders(known, trace.device.lane, trace.device.start_ns)
    return assigned[moment[rank[leader]]]


def _assign_graphs(
    trace: Trace,
    assigned: Assignment,
    moments_ns: NDArray[np.int64],
    is_graph: NDArray[np.bool_],
    known: NDArray[np.bool_],
    moment: NDArray[np.intp],
) -> Assignment:
    """Where there is no backward pass: each time that the launches of graphs begin to repeat, an iteration starts.

    `moment` is that of each device event whose launch is `known`.
    """
    pass_ = np.where(is_graph, np.int8(NEITHER), assigned.pass_)
    if _named(trace, _STEP).any():
        return Assignment(assigned.iteration, pass_)
    launches = np.flatnonzero(is_graph)[np.argsort(moments_ns[is_graph], kind="stable")]
    labels = trace.device.label[known]
    order = np.lexsort((labels, moment))
    of_launch = np.split(labels[order], np.searchsorted(moment[order], np.arange(1, len(moments_ns))))
    contents = [tuple(of_launch[launch].tolist()) for launch in launches]
    starts = launches[:: _period(contents)]
    iteration = np.searchsorted(moments_ns[starts][1:], moments_ns, side="right")
    return Assignment(iteration, pass_)


def _period(sequence: list[tuple[int, ...]]) -> int:
    """After how many the sequence repeats itself; its length where it does not.

    That is its length less that of its longest beginning that is also its end, found as Knuth, Morris and Pratt do.
    """
    numbers: dict[tuple[int, ...], int] = {}
    numbered = [numbers.setdefault(contents, len(numbers)) for contents in sequence]
    both = [0] * len(numbered)
    for i in range(1, len(numbered)):
        size = both[i - 1]
        while size and numbered[i] != numbered[size]:
            size = both[size - 1]
        both[i] = size + (numbered[i] == numbered[size])
    return len(numbered) - both[-1]


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
    backward = _named(trace, _BACKWARD)
    pass_[_inside(trace.host[backward], moments)] = BWD
    recomputed = trace.host[trace.forward]
    recomputed = recomputed[_inside(trace.host[backward], recomputed)]
    pass_[_inside(recomputed, moments)] = RECOMPUTE
    pass_[_inside(trace.host[_named(trace, _NEITHER)], moments)] = NEITHER
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
    turns = (pass_[order][:-1] != FWD) & (pass_[order][1:] == FWD)
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


def _matches(trace: Trace, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Which labels' names begin with the pattern."""
    return np.array([pattern.match(name) is not None for _, name in trace.labels], bool)


def _named(trace: Trace, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Which host events' names begin with the pattern."""
    return _matches(trace, pattern)[trace.host.label]


def _inside(outer: Events, moments: Events) -> NDArray[np.bool_]:
    """Which moments lie inside one of the events on their own thread."""
    inside = np.zeros(len(moments), bool)
    of_lane = dict(places_by_value(moments.lane))
    for lane, there in places_by_value(outer.lane):
        here = of_lane.get(lane, _NOWHERE)
        inside[here] = contains(merge(outer[there].intervals), moments.start_ns[here])
    return inside
