"""Assigns a kind, an iteration and a pass to every event that is work.

Iteration and pass are decided by *moments*: when, and on which thread, the host started something. For a device event
that is its launch, in a CPU trace the operator itself. Moments inside `autograd::engine::evaluate_function` belong to
the backward pass; recomputation by checkpoints there is separated. All others are forward, except that autograd numbers
the operators of a forward computation: what follows the last backward pass without such a number is something else,
such as the reduction of gradients.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.trace import smallest_period
from overlap_sweep.trace.columns import NO_CORRELATION, Events, Trace
from overlap_sweep.trace.intervals import contains, merge, places_by_value
from overlap_sweep.trace.kernel_classes import KernelClass, Kind, classify

FWD, BWD, NEITHER, RECOMPUTE = range(4)
"""NEITHER: the optimizer, barriers, and what follows the backward pass; it counts only in the whole iteration. So does
a CUDA graph that autograd does not know, because it may hold both passes. RECOMPUTE: the part of the backward pass in
which checkpoints run forward again."""

PHASE_OF_PASS = {FWD: "fwd", BWD: "bwd", RECOMPUTE: "recompute"}

NO_ITERATION = -1
"""Iteration of events outside the profiler's steps, in a trace that has steps."""

_NOWHERE = np.empty(0, np.intp)

_BACKWARD = re.compile(r"autograd::engine::evaluate_function")
_NEITHER = re.compile(r"Optimizer\.(step|zero_grad)#|c10d::barrier$")
_COLLECTIVE = re.compile(r"c10d::")
_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
_GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch")

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Assignment:
    """Iteration and pass of events, as columns."""

    iteration: NDArray[np.int64]
    pass_: NDArray[np.int8]

    def __getitem__(self, chosen: NDArray[np.intp]) -> Assignment:
        return Assignment(self.iteration[chosen], self.pass_[chosen])


def assign_device(trace: Trace, is_gemm: NDArray[np.bool_]) -> Assignment:
    """Returns iteration and pass of each event of `trace.device`: those of its launch. `is_gemm` is a mask of the
    events.

    All kernels of a CUDA graph have the launch of the graph. An event without a launch follows the event before it on
    its stream; on a stream without any launch, the event before it on any stream. What runs before those was launched
    before the recording began, and is in no iteration. A trace that has no passes, steps or graphs is a single
    iteration.
    """
    launch = launches_of(trace)
    known = launch >= 0
    if not known.any():
        pass_ = FWD if trace.has_passes else NEITHER
        return Assignment(np.zeros(len(launch), np.int64), np.full(len(launch), pass_, np.int8))
    moments, moment = np.unique(launch[known], return_inverse=True)
    own = trace.launches[moments]
    launches_gemm = np.bincount(moment, is_gemm[known], len(moments)) > 0
    assigned = _assign_moments(trace, own, launches_gemm)
    if not trace.has_passes:
        assigned.pass_[:] = NEITHER
    is_graph = trace.is_named(own, _GRAPH_LAUNCH)
    if is_graph.any() and not np.isin(assigned.pass_, (BWD, RECOMPUTE)).any():
        assigned.pass_[:] = NEITHER
        if not len(steps_of(trace)):
            assigned.iteration[:] = _iterations_by_graph(trace, own.start_ns, is_graph, known, moment)
    rank = np.cumsum(known) - 1
    leader = _leaders(known, trace.device.lane, trace.device.start_ns)
    found = assigned[moment[rank[np.maximum(leader, 0)]]]
    found.iteration[leader < 0] = NO_ITERATION
    return found


def _iterations_by_graph(
    trace: Trace,
    moments_ns: NDArray[np.int64],
    is_graph: NDArray[np.bool_],
    known: NDArray[np.bool_],
    moment: NDArray[np.intp],
) -> NDArray[np.int64]:
    """Returns iterations of a trace without a backward pass: one starts each time that the launches of graphs repeat.

    `moment`: index of the moment of each device event whose launch is `known`.
    """
    launches = np.flatnonzero(is_graph)[np.argsort(moments_ns[is_graph], kind="stable")]
    labels = trace.device.label[known]
    order = np.lexsort((labels, moment))
    labels_by_launch = np.split(labels[order], np.searchsorted(moment[order], np.arange(1, len(moments_ns))))
    contents = [tuple(labels_by_launch[launch].tolist()) for launch in launches]
    period = smallest_period(contents)
    ordered_ns = np.sort(moments_ns)
    starts_ns = [
        _start_between(ordered_ns, moments_ns[launches[first - 1]], moments_ns[launches[first]])
        for first in range(period, len(launches), period)
    ]
    return np.searchsorted(np.array(starts_ns, np.int64), moments_ns, side="right")


def _start_between(ordered_ns: NDArray[np.int64], last_ns: int, first_ns: int) -> int:
    """Returns the start of an iteration that contains `first_ns`, while `last_ns` belongs to the iteration before.

    Moments in between may belong to either; the longest pause is taken as the border.
    """
    here = ordered_ns[np.searchsorted(ordered_ns, last_ns) : np.searchsorted(ordered_ns, first_ns, side="right")]
    return int(here[1 + np.argmax(np.diff(here))]) if len(here) > 1 else int(first_ns)


def assign_host(trace: Trace, chosen: NDArray[np.intp], is_span: NDArray[np.bool_]) -> Assignment:
    """Returns iteration and pass of the `chosen` host events; `is_span`: mask of communication and waits.

    A trace does not tie gloo's spans, most of which run on threads of their own, to the operators that launched them:
    they get the iteration and pass that autograd's threads are in at that time. If a pass waits for its communication
    before it ends, that is the pass that launched it. The same holds for events on any other thread.
    """
    host = trace.host
    backward, forward = np.unique(host.lane[trace.is_named(trace.host, _BACKWARD)]), np.unique(host.lane[trace.forward])
    # Operators of helper threads may be numbered too; a thread that also runs backward is enough.
    lanes = backward if np.isin(backward, forward).any() else np.union1d(backward, forward)
    moments = np.flatnonzero(np.isin(host.lane, lanes)) if len(lanes) else np.arange(len(host))
    moments = moments[np.argsort(host.start_ns[moments], kind="stable")]
    place = np.full(len(host), -1)
    place[moments] = np.arange(len(moments))
    now = np.searchsorted(host.start_ns[moments], host.start_ns[chosen], side="right") - 1
    own = place[chosen]
    no_gemm = np.zeros(len(moments), bool)
    return _assign_moments(trace, host[moments], no_gemm)[np.where((own >= 0) & ~is_span, own, np.maximum(now, 0))]


def _assign_moments(trace: Trace, moments: Events, is_gemm: NDArray[np.bool_]) -> Assignment:
    """Returns iteration and pass of each moment. `is_gemm`: mask of the moments known to launch a GEMM."""
    pass_ = np.full(len(moments), FWD, np.int8)
    backward = trace.host[trace.is_named(trace.host, _BACKWARD)]
    pass_[_inside(backward, moments)] = BWD
    # Collectives are numbered wherever they are called.
    numbered = trace.host[trace.forward & ~trace.is_named(trace.host, _COLLECTIVE)]
    recomputed = _inside(backward, numbered)
    pass_[_inside(numbered[recomputed], moments)] = RECOMPUTE
    pass_[_inside(trace.host[trace.is_named(trace.host, _NEITHER)], moments)] = NEITHER
    is_forward = pass_ == FWD
    if len(numbered):
        surely = is_forward & _inside(numbered[~recomputed], moments)
        pass_[trace.is_named(moments, _GRAPH_LAUNCH) & is_forward & ~surely] = NEITHER
    else:
        # All that is not backward counts as forward; a GEMM is the best sign that another iteration has begun.
        surely = is_forward & (is_gemm | (not (is_forward & is_gemm).any()))
    if len(steps := steps_of(trace)):
        iteration = _iterations_by_step(trace, steps, moments.start_ns)
    else:
        iteration = _iterations_by_turn(moments.start_ns, pass_, surely)
    if len(numbered) or trace.passes_by_thread:
        late = (pass_ == FWD) & ~surely & (moments.start_ns > _last_backward_ns(moments.start_ns, pass_, iteration))
        # DDP finishes on autograd's thread after its last function.
        only_backward = np.setdiff1d(backward.lane, numbered[~recomputed].lane)
        pass_[late] = np.where(np.isin(moments.lane[late], only_backward), BWD, NEITHER)
    return Assignment(iteration, pass_)


def _last_backward_ns(
    moments_ns: NDArray[np.int64], pass_: NDArray[np.int8], iteration: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns for each moment the time of its iteration's last backward one; beyond all times where there is none."""
    numbers, place = np.unique(iteration, return_inverse=True)
    last_ns = np.full(len(numbers), np.iinfo(np.int64).min)
    is_backward = np.isin(pass_, (BWD, RECOMPUTE))
    np.maximum.at(last_ns, place[is_backward], moments_ns[is_backward])
    last_ns[last_ns == np.iinfo(np.int64).min] = np.iinfo(np.int64).max
    return last_ns[place]


def steps_of(trace: Trace) -> Events:
    """Returns the ProfilerSteps on the host, by start."""
    steps = trace.host[trace.is_named(trace.host, _STEP)]
    return steps[np.argsort(steps.start_ns)]


def _iterations_by_step(trace: Trace, steps: Events, moments_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    numbers = np.array([int(trace.name(steps, i).partition("#")[2]) for i in range(len(steps))])
    step = np.searchsorted(steps.start_ns, moments_ns, side="right") - 1
    inside = (step >= 0) & (moments_ns < steps.end_ns[step])
    return np.where(inside, numbers[step], NO_ITERATION)


def _iterations_by_turn(
    moments_ns: NDArray[np.int64], pass_: NDArray[np.int8], surely: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Returns the iteration of each moment: each change from backward to certain forward starts one."""
    order = np.argsort(moments_ns, kind="stable")
    decisive = order[surely[order] | np.isin(pass_[order], (BWD, RECOMPUTE))]
    turns = np.flatnonzero((pass_[decisive][:-1] != FWD) & (pass_[decisive][1:] == FWD))
    ordered_ns, neither_ns = moments_ns[order], moments_ns[order][pass_[order] == NEITHER]
    starts_ns = []
    for turn in turns:
        last_ns, first_ns = moments_ns[decisive[turn]], moments_ns[decisive[turn + 1]]
        # An optimizer ends an iteration.
        place = np.searchsorted(neither_ns, first_ns) - 1
        last_ns = max(last_ns, neither_ns[place]) if place >= 0 else last_ns
        starts_ns.append(_start_between(ordered_ns, last_ns, first_ns))
    return np.searchsorted(np.array(starts_ns, np.int64), moments_ns, side="right")


def launches_of(trace: Trace) -> NDArray[np.intp]:
    """Returns for each device event the index of the first launch with its correlation, or -1."""
    launches, wanted = trace.launches, trace.device.correlation
    if not len(launches):
        return np.full(len(wanted), -1)
    order = np.lexsort((launches.start_ns, launches.correlation))
    place = np.searchsorted(launches.correlation[order], wanted)
    found = order[np.minimum(place, len(order) - 1)]
    return np.where((launches.correlation[found] == wanted) & (wanted != NO_CORRELATION), found, -1)


def _leaders(known: NDArray[np.bool_], lane: NDArray[np.int32], start_ns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Returns for each event the index of the event whose launch decides, or -1: itself if its launch is known."""
    on_stream = _last_known(known, np.lexsort((start_ns, lane)))
    on_stream = np.where(lane[on_stream] == lane, on_stream, -1)
    on_any = _last_known(known, np.argsort(start_ns, kind="stable"))
    return np.where(np.isin(lane, lane[known]), on_stream, on_any)


def _last_known(known: NDArray[np.bool_], order: NDArray[np.intp]) -> NDArray[np.intp]:
    place = np.maximum.accumulate(np.where(known[order], np.arange(len(order)), -1))
    last = np.empty(len(order), np.intp)
    last[order] = np.where(place >= 0, order[place], -1)
    return last


def _inside(outer: Events, moments: Events) -> NDArray[np.bool_]:
    """Returns a mask of the moments that lie inside one of the events on their own thread."""
    inside = np.zeros(len(moments), bool)
    by_lane = dict(places_by_value(moments.lane))
    for lane, there in places_by_value(outer.lane):
        here = by_lane.get(lane, _NOWHERE)
        inside[here] = contains(merge(outer[there].intervals), moments.start_ns[here])
    return inside


GEMM, COMM, WAIT, COMPUTE, MEMORY, IGNORE = range(len(KINDS))


@dataclass(frozen=True)
class Activity:
    """One rank's work: columns of equal length, one row per event."""

    events: Events
    kind: NDArray[np.int8]
    """Index into KINDS."""
    assignment: Assignment
    labels: list[tuple[str, str]]
    classes: dict[int, KernelClass]
    """Kernel classes by `events.label`."""
    lanes: list[tuple[str, str]]


def activity_of(trace: Trace) -> Activity:
    """Returns the work on the device; in a trace without a device, the work on the CPU."""
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
    """Returns the operators that count on the CPU, where operators call operators, as indices into `trace.host`.

    Operators inside a communication span on a thread of gloo, or inside a GEMM, are part of it. A GEMM that only calls
    another (aten::linear, aten::matmul) is dropped. Of other operators the outermost ones count.
    """
    host = trace.host
    order = np.lexsort((-host.end_ns, host.start_ns, host.lane))
    kept = order[kind[order] != IGNORE]
    # On the calling thread, a span of point-to-point communication lasts until it is waited for.
    calling = np.isin(host.lane, np.unique(host.lane[trace.is_named(trace.host, _COLLECTIVE) | (kind == GEMM)]))
    swallowing = np.isin(kind[kept], (COMM, WAIT)) & ~calling[kept]
    kept = kept[~_within(host[kept], swallowing) | np.isin(kind[kept], (COMM, WAIT))]
    gemm = kept[kind[kept] == GEMM]
    gemms = host[gemm]
    calls_next = (gemms.lane[1:] == gemms.lane[:-1]) & (gemms.start_ns[1:] < gemms.end_ns[:-1])
    kept = kept[~np.isin(kept, gemm[:-1][calls_next])]
    kept = kept[~_within(host[kept], kind[kept] == GEMM)]
    other = np.isin(kind[kept], (COMPUTE, MEMORY))
    return kept[~(other & _within(host[kept], other))]


def _within(events: Events, outer: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns a mask of the events inside another event of `outer` on their thread. Events must be sorted by thread,
    start and -end."""
    within = np.zeros(len(events), bool)
    for _, here in places_by_value(events.lane):
        reach = np.maximum.accumulate(np.where(outer[here], events.end_ns[here], np.iinfo(np.int64).min))
        within[here[1:]] = events.start_ns[here[1:]] < reach[:-1]
    return within
