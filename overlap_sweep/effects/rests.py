"""Says what keeps a layer of Transformer Engine from its floor, the same layer without communication: how much longer
each operator takes, in GEMMs, in other kernels, in communication alone and in gaps."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from overlap_sweep.effects import Rest
from overlap_sweep.effects.slots import FUNCTIONS, turns_of
from overlap_sweep.trace.activity import COMM, COMPUTE, GEMM, MEMORY, Activity, launches_of
from overlap_sweep.trace.columns import Trace
from overlap_sweep.trace.intervals import Measure, intersect, merge, places_by_value, subtract
from overlap_sweep.trace.iterations import phases_of

_CALL = re.compile(rf"({'|'.join(FUNCTIONS)})$")

_PASSES = ("fwd", "bwd")


class Times(NamedTuple):
    """What ran in a part of a step, in microseconds."""

    gemm_us: float
    other_us: float
    """Other kernels and copies within the GPU, while no GEMM ran."""
    exposed_us: float
    """Communication, while nothing computed."""
    gap_us: float
    """While nothing ran, or only waited."""
    beside_us: float
    """Communication while a GEMM ran. The others add up to the part's time."""


class Spent(msgspec.Struct, frozen=True):
    """A call of a function, from its first kernel to its last, whatever launched what ran then; or a whole pass."""

    step: int
    pass_: str
    function: str
    """One of FUNCTIONS; empty for the whole pass."""
    part: int
    """Of a function with two operators: 0 until the activation between them, 1 from it on."""
    times: Times


Key = tuple[str, str]
"""Pass and operator; without an operator for what is in none."""


def spent_of(trace: Trace, activity: Activity, steps: Collection[int]) -> list[Spent]:
    """Returns what each pass of these steps spent, and after it each of its calls in the order in which they ran;
    nothing if no GPU ran them, or no function of Transformer Engine."""
    calls = np.flatnonzero(trace.is_named(trace.host, _CALL))
    if not len(trace.device) or not len(calls):
        return []
    names = {number: trace.name(trace.host, number) for number in calls.tolist()}
    call, measured = _call_of_each(trace, calls), _Measured(activity)
    found = []
    for phase in phases_of(activity):
        if phase.iteration in steps and phase.phase in _PASSES:
            found.append(Spent(phase.iteration, phase.phase, "", 0, measured.times(*phase.span_ns)))
            own = [(names[n], phase.events[at]) for n, at in places_by_value(call[phase.events]) if n >= 0]
            found += [
                Spent(phase.iteration, phase.phase, function, part, measured.times(start_ns, end_ns))
                for function, part, start_ns, end_ns in measured.parts(own)
            ]
    return found


def _call_of_each(trace: Trace, calls: NDArray[np.intp]) -> NDArray[np.intp]:
    """Returns for each event of the device which of the calls launched it, or -1. `calls`: indices in `trace.host`;
    those of a thread do not contain each other."""
    launch = launches_of(trace)
    found = np.full(len(launch), -1)
    known = np.flatnonzero(launch >= 0)
    moments, starts_ns = trace.launches[launch[known]], trace.host.start_ns[calls]
    by_lane = dict(places_by_value(moments.lane))
    for lane, own in places_by_value(trace.host.lane[calls]):
        own = own[np.argsort(starts_ns[own], kind="stable")]
        here = by_lane.get(lane, np.empty(0, np.intp))
        last = np.searchsorted(starts_ns[own], moments.start_ns[here], side="right") - 1
        inside = (last >= 0) & (moments.start_ns[here] < trace.host.end_ns[calls[own[last]]])
        found[known[here[inside]]] = calls[own[last[inside]]]
    return found


class _Measured:
    """The kinds of an activity between any two moments."""

    def __init__(self, activity: Activity) -> None:
        self._events, self._kind = activity.events, activity.kind
        gemm, comm, other = (
            merge(activity.events.intervals[np.isin(activity.kind, kinds)])
            for kinds in ((GEMM,), (COMM,), (COMPUTE, MEMORY))
        )
        other = subtract(other, gemm)
        exposed = subtract(comm, merge(np.concatenate((gemm, other))))
        self._unions = [Measure(union) for union in (gemm, other, exposed, intersect(comm, gemm))]

    def times(self, start_ns: int, end_ns: int) -> Times:
        gemm_us, other_us, exposed_us, beside_us = (one.between(start_ns, end_ns) / 1e3 for one in self._unions)
        gap_us = (end_ns - start_ns) / 1e3 - gemm_us - other_us - exposed_us
        return Times(gemm_us, other_us, exposed_us, gap_us, beside_us)

    def parts(self, calls: Sequence[tuple[str, NDArray[np.intp]]]) -> Iterator[tuple[str, int, int, int]]:
        """Yields the parts of the calls of a pass, given with the indices of their events: function, number of the
        part, start and end. What is left of a call when the next one begins counts to that one, which it slows."""
        start, end = self._events.start_ns, self._events.end_ns
        calls = sorted(calls, key=lambda one: int(start[one[1]].min()))
        borders_ns = [int(start[own].min()) for _, own in calls]
        for (function, own), start_ns, next_ns in zip(calls, borders_ns, [*borders_ns[1:], None], strict=True):
            end_ns = min(int(end[own].max()), next_ns or np.iinfo(np.int64).max)
            activation_ns = self._activation_ns(own) if "MLP" in function else None
            yield function, 0, start_ns, activation_ns or end_ns
            if activation_ns:
                yield function, 1, activation_ns, end_ns

    def _activation_ns(self, own: NDArray[np.intp]) -> int | None:
        """Returns the start of the activation: of the longest kernel between GEMMs, for it is as wide as the widest.
        None if there is none, as where a CUDA graph launches the kernels."""
        start_ns, kind = self._events.start_ns[own], self._kind[own]
        gemms_ns = start_ns[kind == GEMM]
        if not len(gemms_ns):
            return None
        between = (kind == COMPUTE) & (start_ns > gemms_ns.min()) & (start_ns < gemms_ns.max())
        longest = np.argmax(np.where(between, self._events.end_ns[own] - start_ns, -1))
        return int(start_ns[longest]) if between[longest] else None


def rests(layer: Sequence[Sequence[Spent]], floor: Sequence[Sequence[Spent]], operators: Sequence[str]) -> list[Rest]:
    """Returns how much more than the floor the layer spends in each operator and pass, and in no operator: means over
    ranks and steps. Empty if it is unknown which call is of which operator. `layer` and `floor`: by rank."""
    ours, least = _by_operator(layer, operators), _by_operator(floor, operators)
    if ours.keys() != least.keys():
        return []
    # Rounded, or equal times would differ by less than the clock shows.
    more = {key: Times(*(round(us, 3) + 0.0 for us in (ours[key] - least[key]).tolist())) for key in ours}
    return [Rest(pass_, operator, round(sum(times[:4]), 3), *times) for (pass_, operator), times in more.items()]


def _by_operator(ranks: Sequence[Sequence[Spent]], operators: Sequence[str]) -> dict[Key, NDArray[np.float64]]:
    """Returns the mean times of the passes in which it is known which call is of which operator."""
    found: dict[Key, list[NDArray[np.float64]]] = defaultdict(list)
    for spent in ranks:
        for (_, pass_), of_pass in groupby(spent, key=attrgetter("step", "pass_")):
            for operator, times in _of_pass(list(of_pass), operators).items():
                found[pass_, operator].append(times)
    return {key: np.mean(own, axis=0) for key, own in found.items()}


def _of_pass(spent: Sequence[Spent], operators: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Returns the times of a pass by operator, and of what is left as operator ""; empty if it is unknown which call is
    of which."""
    whole, *calls = spent
    has_mlp = any("MLP" in one.function for one in calls)
    of_function, done = Counter((one.function, one.part) for one in calls), Counter[tuple[str, int]]()
    times: dict[str, NDArray[np.float64]] = {}
    for one in calls:
        key, turns = (one.function, one.part), turns_of(one.function, operators, has_mlp=has_mlp)
        in_parts = "MLP" not in one.function or of_function[one.function, 0] == of_function[one.function, 1]
        if not turns or of_function[key] % len(turns) or not in_parts:
            return {}
        operator = list(dict.fromkeys(place.operator for place in turns[done[key] % len(turns)]))[one.part]
        times[operator] = times.get(operator, np.zeros(len(Times._fields))) + one.times
        done[key] += 1
    return {**times, "": np.array(whole.times) - sum(times.values())}
