"""Puts together what the causes of one rank's losses are decided from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis.arrivals import Arrivals
from overlap_sweep.diagnosis.calls import NEVER, Call
from overlap_sweep.diagnosis.exposure import Exposure, Measure
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.lateness import UNKNOWN_RANK, Waiting, stragglers_of, waitings_of, with_assumed_waits
from overlap_sweep.diagnosis.repeated import repeated_reductions
from overlap_sweep.diagnosis.roles import Role, roles_of
from overlap_sweep.diagnosis.transfers import Alike, alike_calls
from overlap_sweep.trace.activity import BWD, FWD, RECOMPUTE
from overlap_sweep.trace.intervals import length, merge, places_by_value

TOGETHER_NS = 5_000
"""Longest time between the end of a kernel and the start of one that waited for it on another stream."""

ENOUGH_CALLS = 10
"""Fewest calls of which it shows that none overtook a kernel of another stream."""

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
    repeated: dict[int, int]
    """Reductions of gradients that are done again before the optimizer's step, with how often in all, by call."""
    last_ns: NDArray[np.int64]
    """By call: start of the last rank; NEVER if unknown. Where no trace of another rank is there, as estimated."""
    late_rank: NDArray[np.intp]
    """By call: index of the last rank; -1 if unknown."""
    waitings: dict[int, Waiting]
    """By call, those that waited for another rank while nothing computed."""
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
    last_ns = [with_assumed_waits(own, last) for own, last in zip(facts, arrivals.last_ns, strict=True)]
    waitings = waitings_of(facts, exposures, arrivals, last_ns)
    stragglers = stragglers_of(facts, arrivals, waitings)
    late = {rank for _, rank in stragglers}
    alike = alike_calls(facts, arrivals)
    views = []
    for rank, (own, exposure) in enumerate(zip(facts, exposures, strict=True)):
        roles = roles_of(own.calls)
        view = RankView(
            facts=own,
            exposure=exposure,
            roles=roles,
            repeated=repeated_reductions(own, roles),
            last_ns=last_ns[rank],
            late_rank=arrivals.last_rank[rank],
            waitings=waitings[rank],
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
            if index not in view.repeated and (hiding := view.hiding_of(index)):
                hiding.comm_ns += view.moving_ns(index)
        views.append(view)
    return views


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
    stream. False if there are too few calls to show it."""
    starts = np.concatenate((facts.work.start_ns, [call.start_ns for call in facts.calls])).astype(np.int64)
    launches = np.concatenate((facts.work.launch_ns, [call.launch_ns for call in facts.calls])).astype(np.int64)
    known = launches != NEVER
    if known[len(facts.work.start_ns) :].sum() < ENOUGH_CALLS:
        return False
    in_order = starts[known][np.lexsort((starts[known], launches[known]))]
    overtook = np.maximum.accumulate(in_order) > in_order + TOGETHER_NS
    return bool(overtook.sum() <= OVERTAKING * len(in_order))


def _compute_lanes(facts: RankFacts) -> set[int]:
    lanes, place = np.unique(facts.work.lane, return_inverse=True)
    took = np.bincount(place, facts.work.end_ns - facts.work.start_ns, len(lanes))
    return {int(lane) for lane, ns in zip(lanes, took, strict=True) if ns > COMPUTES * took.sum()}
