"""Puts together what the causes of one rank's losses are decided from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis.arrivals import Arrivals
from overlap_sweep.diagnosis.calls import NEVER, Call
from overlap_sweep.diagnosis.exposure import Exposed, Exposure, Measure
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.roles import Role, roles_of
from overlap_sweep.diagnosis.transfers import Alike, alike_calls
from overlap_sweep.trace.activity import BWD, FWD, RECOMPUTE
from overlap_sweep.trace.intervals import length, merge, places_by_value

MOSTLY = 0.6
"""Share of all waiting that one rank must have caused to be a straggler; else all ranks are late in turn."""

POINT_TO_POINT = ("send", "recv", "send_recv")
"""To wait for what another rank computes is their nature: nobody is late."""

UNKNOWN_RANK = -1
"""Index of a straggler whose trace is missing."""

WAITED = 2.0
"""A call that took more than this times the fastest of its size has waited; next to GEMMs it may take longer, too."""

STARTS_NS = 30_000
"""Most that starting a collective adds to the time of moving its bytes."""

TOGETHER_NS = 5_000
"""Longest time between the end of a kernel and the start of one that waited for it on another stream."""

OVERTAKING = 0.005
"""Most kernels that may start before earlier ones of other streams if all streams share a queue: threads launch at the
same time."""

COMPUTES = 0.1
"""Least share of the computation of a stream that computes."""

_CODES = {"fwd": (FWD,), "bwd": (BWD, RECOMPUTE)}


@dataclass
class Hiding:
    """What one pass of one step has for hiding communication. Nanoseconds."""

    start_ns: int
    compute_ns: float
    comm_ns: float = 0.0
    """Communication that could be hidden, without waiting."""
    used_ns: float = 0.0
    """Computation that hid communication so far, or could have."""


@dataclass(frozen=True)
class RankView:
    """One rank among the others."""

    facts: RankFacts
    exposure: Exposure
    roles: list[Role]
    """By call."""
    last_ns: NDArray[np.int64]
    """By call: start of the last rank; NEVER if unknown. Where no trace of another rank is there, as estimated."""
    late_rank: NDArray[np.intp]
    """By call: index of the last rank; -1 if unknown."""
    stragglers: set[tuple[str, int]]
    """Pairs of process group and index of the rank that the others wait for."""
    is_straggler: bool
    hiding: dict[tuple[int, str], Hiding]
    """By step and pass."""
    waits: Measure
    """Waits of the host."""
    compute_lanes: set[int]
    """Streams that compute, other than copies into buffers."""
    by_launch: NDArray[np.intp]
    """Indices of work in the order of launches."""
    one_queue: bool
    """Whether kernels of all streams started in the order of their launches."""
    alike: dict[int, Alike]
    """By call of a step that counts: those like it of all ranks, with their size and time."""

    def moving_ns(self, index: int) -> float:
        """Returns how long a call ran without waiting for other ranks, as far as their traces are there."""
        call, last = self.facts.calls[index], int(self.last_ns[index])
        return float(call.end_ns - (call.start_ns if last == NEVER else min(max(last, call.start_ns), call.end_ns)))

    def hiding_of(self, index: int) -> Hiding | None:
        """Returns the pass whose computation could hide the call; None if it has none."""
        call = self.facts.calls[index]
        return self.hiding.get((call.step, hiding_pass(call, self.roles[index])))


def hiding_pass(call: Call, role: Role) -> str:
    """Returns the pass whose computation could hide the call; empty if none could."""
    if role == "activation":
        return ""
    if call.pass_ == "other":
        return "bwd" if role == "gradient" else "fwd"
    return call.pass_


def views_of(facts: Sequence[RankFacts], exposures: Sequence[Exposure], arrivals: Arrivals) -> list[RankView]:
    """Returns the views of all ranks of a run."""
    stragglers = stragglers_of(facts, exposures, arrivals)
    late = {rank for _, rank in stragglers}
    alike = alike_calls(facts, arrivals)
    views = []
    for rank, (own, exposure) in enumerate(zip(facts, exposures, strict=True)):
        last_ns = _with_assumed_waits(own, arrivals.last_ns[rank])
        view = RankView(
            facts=own,
            exposure=exposure,
            roles=roles_of(own.calls),
            last_ns=last_ns,
            late_rank=arrivals.last_rank[rank],
            stragglers=stragglers | {(group, UNKNOWN_RANK) for group in own.groups},
            is_straggler=rank in late,
            hiding=_passes(own),
            waits=Measure(np.array([(wait.start_ns, wait.end_ns) for wait in own.waits], np.int64).reshape(-1, 2)),
            compute_lanes=_compute_lanes(own),
            by_launch=np.argsort(own.work.launch_ns, kind="stable"),
            one_queue=_starts_in_order(own),
            alike={i: one for one in alike for i in one.calls.get(rank, ())},
        )
        for index in range(len(own.calls)):
            if hiding := view.hiding_of(index):
                hiding.comm_ns += view.moving_ns(index)
        views.append(view)
    return views


def _with_assumed_waits(facts: RankFacts, last_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the start of the last rank, for calls without other ranks' traces as estimated: a call that takes much
    longer than the fastest of its size, or than its bytes at the group's best rate, has waited before."""
    unknown = [
        i
        for i, call in enumerate(facts.calls)
        if last_ns[i] == NEVER and call.collective not in POINT_TO_POINT and not call.is_wait and _elements(call)
    ]
    fastest: dict[tuple[str, str, int], int] = {}
    rate: dict[tuple[str, str], float] = defaultdict(float)
    for i in unknown:
        call, took = facts.calls[i], max(facts.calls[i].end_ns - facts.calls[i].start_ns, 1)
        size = call.group, call.collective, _elements(call)
        fastest[size] = min(fastest.get(size, took), took)
        rate[size[:2]] = max(rate[size[:2]], _elements(call) / took)
    assumed = last_ns.copy()
    for i in unknown:
        call = facts.calls[i]
        size = call.group, call.collective, _elements(call)
        moving = min(fastest[size], _elements(call) / rate[size[:2]] + STARTS_NS)
        if call.end_ns - call.start_ns > WAITED * moving + STARTS_NS:
            assumed[i] = call.end_ns - round(moving)
    return assumed


def _elements(call: Call) -> int:
    return max(call.sent or 0, call.received or 0)


def stragglers_of(
    facts: Sequence[RankFacts], exposures: Sequence[Exposure], arrivals: Arrivals
) -> set[tuple[str, int]]:
    """Returns the pairs of process group and index of a rank for which the group's other ranks wait: it causes most of
    all waiting, and most of it in most steps."""
    waited: dict[str, dict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    for rank, exposure in enumerate(exposures):
        startup = {step.number for step in facts[rank].steps if step.startup}
        for i, exposed in exposure.exposed.items():
            call = facts[rank].calls[i]
            if call.collective not in POINT_TO_POINT and call.step not in startup:
                lost, _ = waited_of(exposed, call, int(arrivals.last_ns[rank][i]))
                waited[call.group][call.step][int(arrivals.last_rank[rank][i])] += round(lost)
    found = set()
    for group, by_step in waited.items():
        total = sum(by_step.values(), Counter())
        for late, lost in total.items():
            steps = [2 * by_rank[late] > by_rank.total() for by_rank in by_step.values() if by_rank.total()]
            if lost and lost >= MOSTLY * total.total() and sum(steps) > len(steps) / 2:
                found.add((group, late))
    return found


def waited_of(exposed: Exposed, call: Call, last_ns: int) -> tuple[float, list[tuple[int, int]]]:
    """Returns the exposed time before the last rank arrived, and the pieces after it."""
    if last_ns == NEVER or last_ns <= call.start_ns:
        return 0.0, exposed.pieces
    waited = sum(max(0, min(end, last_ns) - start) for start, end in exposed.pieces)
    rest = [(max(start, last_ns), end) for start, end in exposed.pieces if end > last_ns]
    return float(waited), rest


def _passes(facts: RankFacts) -> dict[tuple[int, str], Hiding]:
    work = facts.work
    found: dict[tuple[int, str], Hiding] = {}
    for name, codes in _CODES.items():
        own = np.flatnonzero(np.isin(work.pass_, codes))
        for step, places in places_by_value(work.step[own]):
            here = own[places]
            union = merge(work.intervals[here])
            found[step, name] = Hiding(int(work.start_ns[here].min()), float(length(union)))
    return found


def _starts_in_order(facts: RankFacts) -> bool:
    """Returns whether next to no kernel started before one that was launched before it, which is then on another
    stream."""
    starts = np.concatenate((facts.work.start_ns, [call.start_ns for call in facts.calls])).astype(np.int64)
    launches = np.concatenate((facts.work.launch_ns, [call.launch_ns for call in facts.calls])).astype(np.int64)
    known = launches != NEVER
    in_order = starts[known][np.lexsort((starts[known], launches[known]))]
    overtook = np.maximum.accumulate(in_order) > in_order + TOGETHER_NS
    return bool(overtook.sum() <= OVERTAKING * len(in_order))


def _compute_lanes(facts: RankFacts) -> set[int]:
    lanes, place = np.unique(facts.work.lane, return_inverse=True)
    took = np.bincount(place, facts.work.end_ns - facts.work.start_ns, len(lanes))
    return {int(lane) for lane, ns in zip(lanes, took, strict=True) if ns > COMPUTES * took.sum()}
