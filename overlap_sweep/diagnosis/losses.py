"""What one rank lost to which cause: of the time in which a call is exposed, and of that in which the host was late.

Each nanosecond is given to one cause, but for what `dependency` and `issued_late` both are given.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from overlap_sweep.diagnosis import NEVER, TOGETHER_NS, UNKNOWN_RANK, Loss, Role, Rule, once
from overlap_sweep.diagnosis.arrivals import Arrivals, arrivals
from overlap_sweep.diagnosis.calls import roles_of
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.diagnosis.causes.repeated_reduction import repeated_reductions
from overlap_sweep.diagnosis.exposure import Exposed, Exposure, Late, exposure_of
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.groups import Alike, alike_calls
from overlap_sweep.diagnosis.lateness import (
    Delay,
    Share,
    Waiting,
    delayed_by_stragglers,
    stragglers_of,
    waitings_of,
    with_assumed_waits,
)
from overlap_sweep.diagnosis.slowed import SlowedCall, slowed_calls
from overlap_sweep.trace.activity import BWD, FWD, NO_ITERATION, RECOMPUTE
from overlap_sweep.trace.intervals import Measure, intervals_of, length, merge, places_by_value, within

ENOUGH_CALLS = 10
"""Fewest calls of which it shows that none overtook a kernel of another stream."""

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
    last_launch_ns: int | None = None
    """When the last of the calls so far was launched."""


@dataclass(frozen=True)
class RankView:
    """One rank among the others."""

    facts: RankFacts
    exposure: Exposure
    last_ns: NDArray[np.int64]
    """By call: start of the last rank; NEVER if unknown. Where no trace of another rank is there, as estimated."""
    waitings: dict[int, Waiting]
    """By call, those that waited for another rank while nothing computed."""
    stragglers: set[tuple[str, int]]
    """Pairs of process group and index of the rank that the others wait for."""
    delayed: dict[int, Delay]
    """By call: exposed time that calls before it caused by waiting for a straggler while computation ran."""
    alike: dict[int, Alike]
    """By call of a step that counts: those like it of all ranks, with their size and time."""

    @cached_property
    def roles(self) -> list[Role]:
        return roles_of(self.facts.calls)

    @cached_property
    def moving_ns(self) -> list[float]:
        """Returns how long each call ran without waiting for other ranks, as far as their traces are there."""
        starts, ends = intervals_of(self.facts.calls).T
        last = np.where(self.last_ns == NEVER, starts, np.clip(self.last_ns, starts, ends))
        return (ends - last).astype(np.float64).tolist()

    @cached_property
    def slowed(self) -> dict[int, SlowedCall]:
        return slowed_calls(self.facts, self.exposure.gaps, self.moving_ns)

    @cached_property
    def host_late(self) -> Measure:
        return Measure(self.exposure.host_late)

    @cached_property
    def waits(self) -> Measure:
        return Measure(intervals_of(self.facts.waits))

    @cached_property
    def by_launch(self) -> NDArray[np.intp]:
        """Returns the indices of work in the order of launches."""
        return np.argsort(self.facts.work.launch_ns, kind="stable")

    @cached_property
    def compute_lanes(self) -> set[int]:
        """Returns the streams that compute, other than copies into buffers."""
        work = self.facts.work
        lanes, place = np.unique(work.lane, return_inverse=True)
        took = np.bincount(place, work.end_ns - work.start_ns, len(lanes))
        return set(lanes[took > 0.1 * took.sum()].tolist())

    @cached_property
    def one_queue(self) -> bool:
        """Returns whether next to no kernel started before one that was launched before it, which is then on another
        stream. False if there are too few calls to show it."""
        work, calls = self.facts.work, self.facts.calls
        starts = np.concatenate((work.start_ns, [call.start_ns for call in calls])).astype(np.int64)
        launches = np.concatenate((work.launch_ns, [call.launch_ns for call in calls])).astype(np.int64)
        known = launches != NEVER
        if known[len(work) :].sum() < ENOUGH_CALLS:
            return False
        in_order = starts[known][np.lexsort((starts[known], launches[known]))]
        overtook = np.maximum.accumulate(in_order) > in_order + TOGETHER_NS
        # Threads launch at the same time.
        return bool(overtook.sum() <= 0.005 * len(in_order))

    @cached_property
    def hiding(self) -> dict[tuple[int, str], Hiding]:
        work = self.facts.work
        found: dict[tuple[int, str], Hiding] = {}
        for name, codes in _CODES.items():
            own = np.flatnonzero(np.isin(work.pass_, codes))
            for step, places in places_by_value(work.step[own]):
                here = own[places]
                union = merge(work.intervals[here])
                found[step, name] = Hiding(int(work.start_ns[here].min()), float(length(union)))
        return found

    def hiding_of(self, index: int) -> Hiding | None:
        """Returns the pass whose computation could hide the call; None if none could."""
        call, role = self.facts.calls[index], self.roles[index]
        if role == "activation":
            return None
        after = "bwd" if role == "gradient" else "fwd"
        return self.hiding.get((call.step, after if call.pass_ == "other" else call.pass_))

    def is_backward(self, work: int) -> bool:
        return self.facts.work.pass_[work] in _CODES["bwd"]

    def step_at(self, gap_end_ns: int) -> int:
        """Returns the step that a gap in the computation belongs to, given its end: that in which it is, even if the
        next one's first kernel ends it."""
        steps = self.facts.steps
        place = bisect_left(self.facts.step_starts_ns, gap_end_ns) - 1
        return steps[place].number if place >= 0 and gap_end_ns <= steps[place].end_ns else NO_ITERATION

    def computed_while_waiting_ns(self, start_ns: int, end_ns: int) -> float:
        """Returns how long computation ran between two moments while the host waited for the device."""
        waits = within(self.waits.union, start_ns, end_ns) if start_ns < end_ns else self.waits.union[:0]
        return sum(self.exposure.compute.between(start, end) for start, end in waits.tolist())


class Seen(NamedTuple):
    """The ranks of a run among each other."""

    met: Arrivals
    views: list[RankView]


def seen_of(facts: Sequence[RankFacts]) -> Seen:
    met = arrivals(facts)
    return Seen(met, views_of(facts, [exposure_of(own) for own in facts], met))


def views_of(facts: Sequence[RankFacts], exposures: Sequence[Exposure], arrivals: Arrivals) -> list[RankView]:
    last_ns = [with_assumed_waits(own, last) for own, last in zip(facts, arrivals.last_ns, strict=True)]
    waitings = waitings_of(facts, exposures, arrivals, last_ns)
    stragglers = stragglers_of(facts, arrivals, waitings)
    alike = alike_calls(facts, arrivals)
    views = []
    for rank, (own, exposure) in enumerate(zip(facts, exposures, strict=True)):
        own_stragglers = stragglers | {(group, UNKNOWN_RANK) for group in own.groups}
        last = last_ns[rank], arrivals.last_rank[rank]
        delayed = delayed_by_stragglers(own, exposure, waitings[rank], own_stragglers, *last)
        own_alike = {i: one for one in alike for i in one.calls.get(rank, ())}
        views.append(RankView(own, exposure, last_ns[rank], waitings[rank], own_stragglers, delayed, own_alike))
    return views


@dataclass
class ExposedTime:
    """The time in which a call ran and nothing computed, without waiting for the last rank."""

    view: RankView
    exposed: Exposed
    rest_ns: float
    """Part without a cause so far."""
    waited_for: Sequence[Share]
    """Waiting for the last rank, by the rank that caused it."""

    def __post_init__(self) -> None:
        self.facts, self.index = self.view.facts, self.exposed.call
        self.call, self.role = self.facts.calls[self.index], self.view.roles[self.index]
        self.moving_ns = self.view.moving_ns[self.index]
        self.hiding = self.view.hiding_of(self.index)
        """The pass whose computation could have hidden the call; None for activations."""

    @cached_property
    def available_ns(self) -> float:
        """Returns the computation of the pass before the call that no other communication used."""
        call, hiding, compute = self.call, self.hiding, self.view.exposure.compute
        assert hiding
        available = max(0.0, compute.between(self.ready_ns, call.start_ns) - hiding.used_ns)
        if self.role == "gradient" and call.pass_ == "bwd" and hiding.last_launch_ns is not None:
            # Its gradients were computed after those of the reduction before.
            available = min(available, compute.between(hiding.last_launch_ns, call.start_ns))
        return available

    @property
    def ready_ns(self) -> int:
        """Returns from when on the call could have run: parameters are there only after the optimizer's step."""
        assert self.hiding
        after_step = self.role == "parameter" and self.call.pass_ == "other"
        return self.call.start_ns if after_step else self.hiding.start_ns

    @cached_property
    def hideable_ns(self) -> float:
        """Returns the part of the rest that an earlier start would have hidden, and that computation as used."""
        if not self.hiding:
            return self.rest_ns
        hideable = min(self.rest_ns, self.available_ns)
        self.hiding.used_ns += hideable
        return hideable

    @cached_property
    def blocks_backward(self) -> bool:
        """Returns whether the backward pass waited for a reduction of gradients, which it does not need: its next
        kernel was launched right after the call, or after a later one that waited for this one."""
        view, work, call = self.view, self.facts.work, self.call
        blocked, last = self.exposed.first_blocked, self.exposed.ended_by
        if not self.hiding or self.role != "gradient" or blocked is None or last is None or call.launch_ns == NEVER:
            return False
        if not view.is_backward(blocked) or view.roles[last] != "gradient":
            return False
        launch = int(work.launch_ns[blocked])
        if self.facts.on_device and launch > call.end_ns:
            return False
        launches = (other.launch_ns for other in self.facts.calls[self.index :])
        before = max((at for at in launches if call.launch_ns <= at < launch), default=NEVER)
        if before == NEVER:
            return False
        first, beyond = work.launch_ns.searchsorted((before, launch), sorter=view.by_launch)
        return bool(beyond - first <= 1)

    def take(self, cause: str, loss: Loss) -> Loss | None:
        """Returns the loss as one of this call, at most as long as what is left, which it takes; None if that is
        nothing."""
        lost_ns = max(0.0, min(loss.lost_ns, self.rest_ns)) if loss.takes else loss.lost_ns
        if not lost_ns:
            return None
        if loss.takes:
            self.rest_ns -= lost_ns
            if "hideable_ns" in self.__dict__:
                self.hideable_ns -= lost_ns
        return replace(
            loss,
            lost_ns=lost_ns,
            cause=cause,
            step=self.call.step,
            call=self.index,
            work=self.exposed.first_blocked,
            role=self.role,
        )


@dataclass
class IdleTime:
    """A time in which nothing computed because the host was late."""

    view: RankView
    late: Late
    rest_ns: float
    """Part without a cause so far."""
    loading_ns: float
    """Part in which the host waited for a DataLoader's next batch."""
    pauses: range
    """The host's pauses in it, as indices."""
    waited_ns: list[tuple[int, float]]
    """Waits of the host before, as indices, each with the part of its time to which nothing was lost yet."""

    def take(self, cause: str, loss: Loss) -> Loss | None:
        """Returns the loss as one of this time, of which it takes that; None if nothing is lost."""
        self.rest_ns -= loss.lost_ns
        if loss.lost_ns <= 0:
            return None
        return replace(loss, cause=cause, step=self.view.step_at(self.late.end_ns), work=self.late.work)


_EXPOSED = sorted(((one.name, one.exposed) for one in CAUSES.values() if one.exposed), key=lambda pair: pair[1].order)
_IDLE = sorted(((one.name, rule) for one in CAUSES.values() for rule in one.idle), key=lambda pair: pair[1].order)


def losses_of(view: RankView) -> list[Loss]:
    return [*_of_idle_time(view), *_other_losses(view), *_of_exposed_time(view)]


def _other_losses(view: RankView) -> Iterator[Loss]:
    for cause in CAUSES.values():
        for loss in cause.others(view):
            step = loss.step if loss.call is None else view.facts.calls[loss.call].step
            yield replace(loss, cause=cause.name, step=step)


def _of_exposed_time(view: RankView) -> Iterator[Loss]:
    repeated = once(view, repeated_reductions)
    for i in range(len(view.facts.calls)):
        if i not in repeated and (hiding := view.hiding_of(i)):
            hiding.comm_ns += view.moving_ns[i]
    for i, call in enumerate(view.facts.calls):
        if not call.is_in_step:
            # What waits in a barrier between two steps delays neither.
            continue
        exposed, waiting, exposed_ns = view.exposure.exposed.get(i), view.waitings.get(i), 0.0
        if exposed:
            exposed_ns = waiting.rest_ns if waiting else exposed.total_ns
            time = ExposedTime(view, exposed, exposed_ns, waiting.shares if waiting else ())
            yield from _explained(time, _EXPOSED)
        if hiding := view.hiding_of(i):
            hiding.used_ns += view.moving_ns[i] - exposed_ns
            hiding.last_launch_ns = call.launch_ns if call.launch_ns != NEVER else call.start_ns


def _of_idle_time(view: RankView) -> Iterator[Loss]:
    waits = view.facts.waits
    to_come = sorted(range(len(waits)), key=lambda i: waits[i].end_ns)[::-1]
    waited_ns: list[tuple[int, float]] = []
    spans, pauses = intervals_of(view.exposure.late), intervals_of(view.facts.pauses)
    paused = map(range, pauses[:, 1].searchsorted(spans[:, 0], "right"), pauses[:, 0].searchsorted(spans[:, 1]))
    for late, loading_ns, own in zip(view.exposure.late, view.exposure.loading_ns.tolist(), paused, strict=True):
        launch = int(view.facts.work.launch_ns[late.work])
        while to_come and waits[to_come[-1]].end_ns <= max(launch, late.start_ns):
            ended = to_come.pop()
            waited_ns.append((ended, float(waits[ended].end_ns - waits[ended].start_ns)))
        time = IdleTime(view, late, late.idle_ns + late.comm_ns, loading_ns, own, waited_ns)
        yield from _explained(time, _IDLE)


Explained = TypeVar("Explained", ExposedTime, IdleTime)


def _explained(time: Explained, rules: list[tuple[str, Rule[Explained]]]) -> Iterator[Loss]:
    for cause, rule in rules:
        for part in rule.losses(time):
            if loss := time.take(cause, part):
                yield loss
