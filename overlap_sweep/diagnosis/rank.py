"""Puts together what the causes of one rank's losses are decided from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import NEVER, TOGETHER_NS, UNKNOWN_RANK, Role
from overlap_sweep.diagnosis.arrivals import Arrivals
from overlap_sweep.diagnosis.calls import Call, roles_of
from overlap_sweep.diagnosis.exposure import Exposure, Measure, SlowedCall, slowed_calls
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.groups import Alike, alike_calls
from overlap_sweep.diagnosis.lateness import (
    Delay,
    Waiting,
    delayed_by_stragglers,
    stragglers_of,
    waitings_of,
    with_assumed_waits,
)
from overlap_sweep.trace.activity import BWD, FWD, NO_ITERATION, RECOMPUTE
from overlap_sweep.trace.intervals import intervals_of, length, merge, places_by_value, within

ENOUGH_CALLS = 10
"""Fewest calls of which it shows that none overtook a kernel of another stream."""

OVERTAKING = 0.005
"""Most kernels that may start before earlier ones of other streams if all streams share a queue: threads launch at the
same time."""

COMPUTES = 0.1
"""Least share of the computation of a stream that computes."""

_CODES = {"fwd": (FWD,), "bwd": (BWD, RECOMPUTE)}

Computed = TypeVar("Computed")


@dataclass
class Hiding:
    """What one pass of one step has for hiding communication. Nanoseconds."""

    start_ns: int
    compute_ns: float
    comm_ns: float = 0.0
    """Communication that could be hidden, without waiting."""
    used_ns: float = 0.0
    """Computation that hid communication so far, or could have."""
    last_launch_ns: int | None = None
    """When the last of the calls so far was launched."""


@dataclass(frozen=True)
class RankView:
    """One rank among the others."""

    facts: RankFacts
    exposure: Exposure
    roles: list[Role]
    """By call."""
    last_ns: NDArray[np.int64]
    """By call: start of the last rank; NEVER if unknown. Where no trace of another rank is there, as estimated."""
    moving_ns: list[float]
    """By call: how long it ran without waiting for other ranks, as far as their traces are there."""
    waitings: dict[int, Waiting]
    """By call, those that waited for another rank while nothing computed."""
    stragglers: set[tuple[str, int]]
    """Pairs of process group and index of the rank that the others wait for."""
    delayed: dict[int, Delay]
    """By call: exposed time that calls before it caused by waiting for a straggler while computation ran."""
    hiding: dict[tuple[int, str], Hiding]
    """By step and pass."""
    waits: Measure
    """Waits of the host."""
    host_late: Measure
    """When nothing ran, because the host was late."""
    slowed: dict[int, SlowedCall]
    """By call, those next to which GEMMs were slower or faster than alone."""
    compute_lanes: set[int]
    """Streams that compute, other than copies into buffers."""
    by_launch: NDArray[np.intp]
    """Indices of work in the order of launches."""
    one_queue: bool
    """Whether kernels of all streams started in the order of their launches."""
    alike: dict[int, Alike]
    """By call of a step that counts: those like it of all ranks, with their size and time."""
    _computed: dict[Callable[[RankView], Any], Any] = field(default_factory=dict)

    def once(self, compute: Callable[[RankView], Computed]) -> Computed:
        """Returns what the function returns for this rank, computed once."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        return self._computed[compute]

    def is_backward(self, work: int) -> bool:
        """Returns whether the work is of the backward pass."""
        return self.facts.work.pass_[work] in _CODES["bwd"]

    def step_at(self, gap_end_ns: int) -> int:
        """Returns the step that a gap in the computation belongs to, given its end: that in which it is, even if the
        next one's first kernel ends it."""
        steps = self.facts.steps
        place = bisect_left(steps, gap_end_ns, key=lambda step: step.start_ns) - 1
        return steps[place].number if place >= 0 and gap_end_ns <= steps[place].end_ns else NO_ITERATION

    def computed_while_waiting_ns(self, start_ns: int, end_ns: int) -> float:
        """Returns how long computation ran between two moments while the host waited for the device."""
        waits = within(self.waits.union, start_ns, end_ns) if start_ns < end_ns else self.waits.union[:0]
        return sum(self.exposure.compute.between(start, end) for start, end in waits.tolist())

    def hiding_of(self, index: int) -> Hiding | None:
        """Returns the pass whose computation could hide the call; None if none could."""
        call, role = self.facts.calls[index], self.roles[index]
        if role == "activation":
            return None
        after = "bwd" if role == "gradient" else "fwd"
        return self.hiding.get((call.step, after if call.pass_ == "other" else call.pass_))


def _moving_ns(call: Call, last_ns: int) -> float:
    starts_ns = call.start_ns if last_ns == NEVER else min(max(last_ns, call.start_ns), call.end_ns)
    return float(call.end_ns - starts_ns)


def views_of(facts: Sequence[RankFacts], exposures: Sequence[Exposure], arrivals: Arrivals) -> list[RankView]:
    """Returns the views of all ranks of a run."""
    last_ns = [with_assumed_waits(own, last) for own, last in zip(facts, arrivals.last_ns, strict=True)]
    waitings = waitings_of(facts, exposures, arrivals, last_ns)
    stragglers = stragglers_of(facts, arrivals, waitings)
    alike = alike_calls(facts, arrivals)
    views = []
    for rank, (own, exposure) in enumerate(zip(facts, exposures, strict=True)):
        own_stragglers = stragglers | {(group, UNKNOWN_RANK) for group in own.groups}
        last = last_ns[rank], arrivals.last_rank[rank]
        moving = [_moving_ns(*both) for both in zip(own.calls, last_ns[rank].tolist(), strict=True)]
        view = RankView(
            facts=own,
            exposure=exposure,
            roles=roles_of(own.calls),
            last_ns=last_ns[rank],
            waitings=waitings[rank],
            stragglers=own_stragglers,
            delayed=delayed_by_stragglers(own, exposure, waitings[rank], own_stragglers, *last),
            slowed=slowed_calls(own, exposure.gaps, moving),
            moving_ns=moving,
            host_late=Measure(exposure.host_late),
            hiding=_passes(own),
            waits=Measure(intervals_of(own.waits)),
            compute_lanes=_compute_lanes(own),
            by_launch=np.argsort(own.work.launch_ns, kind="stable"),
            one_queue=_starts_in_order(own),
            alike={i: one for one in alike for i in one.calls.get(rank, ())},
        )
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
