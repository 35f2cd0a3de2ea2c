"""Asks the rules of all causes what each rank lost to which cause: of the time in which a call is exposed, and of
that in which the host was late.

Each nanosecond is given to one cause, but for what `dependency` and `issued_late` both are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from overlap_sweep.diagnosis import NEVER
from overlap_sweep.diagnosis.cause import Loss, Rule
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.diagnosis.causes.repeated_reduction import repeated_reductions
from overlap_sweep.diagnosis.exposure import Exposed, Late
from overlap_sweep.diagnosis.lateness import Share
from overlap_sweep.diagnosis.rank import RankView


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
        """Returns whether the backward pass waited for a reduction of gradients, which it does not need.

        Its first kernel to start was launched right after the call, or right after a later one that waited for this
        one.
        """
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
    waited_ns: list[tuple[int, float]]
    """Waits of the host before, as indices, each with the part of its time to which nothing was lost yet."""

    @property
    def step(self) -> int:
        return self.view.step_at(self.late.end_ns)

    def take(self, cause: str, loss: Loss) -> Loss | None:
        """Returns the loss as one of this time, of which it takes that; None if nothing is lost."""
        self.rest_ns -= loss.lost_ns
        return replace(loss, cause=cause, step=self.step, work=self.late.work) if loss.lost_ns > 0 else None


_EXPOSED = sorted(((one.name, one.exposed) for one in CAUSES.values() if one.exposed), key=lambda pair: pair[1].order)
_IDLE = sorted(((one.name, rule) for one in CAUSES.values() for rule in one.idle), key=lambda pair: pair[1].order)


def losses_of(view: RankView) -> list[Loss]:
    """Returns the losses of one rank."""
    return [*_of_idle_time(view), *_of_rank(view), *_of_exposed_time(view)]


def _of_rank(view: RankView) -> Iterator[Loss]:
    for cause in CAUSES.values():
        for loss in cause.of_rank(view) if cause.of_rank else ():
            step = loss.step if loss.call is None else view.facts.calls[loss.call].step
            yield replace(loss, cause=cause.name, step=step)


def _of_exposed_time(view: RankView) -> Iterator[Loss]:
    repeated = view.once(repeated_reductions)
    for i in range(len(view.facts.calls)):
        if i not in repeated and (hiding := view.hiding_of(i)):
            hiding.comm_ns += view.moving_ns[i]
    for i, call in enumerate(view.facts.calls):
        if not call.is_in_step:
            # What waits in a barrier between two steps delays neither.
            continue
        exposed, waiting, exposed_ns = view.exposure.exposed.get(i), view.waitings.get(i), 0.0
        if exposed:
            pieces = waiting.rest if waiting else exposed.pieces
            exposed_ns = float(sum(end - start for start, end in pieces))
            time = ExposedTime(view, exposed, exposed_ns, waiting.shares if waiting else ())
            yield from _explained(time, _EXPOSED)
        if hiding := view.hiding_of(i):
            hiding.used_ns += view.moving_ns[i] - exposed_ns
            hiding.last_launch_ns = call.launch_ns if call.launch_ns != NEVER else call.start_ns


def _of_idle_time(view: RankView) -> Iterator[Loss]:
    """Yields what was lost while the host was late."""
    waits = view.facts.waits
    to_come = sorted(range(len(waits)), key=lambda i: waits[i].end_ns)[::-1]
    waited_ns: list[tuple[int, float]] = []
    for late, loading_ns in zip(view.exposure.late, view.exposure.loading_ns.tolist(), strict=True):
        launch = int(view.facts.work.launch_ns[late.work])
        while to_come and waits[to_come[-1]].end_ns <= max(launch, late.start_ns):
            ended = to_come.pop()
            waited_ns.append((ended, float(waits[ended].end_ns - waits[ended].start_ns)))
        time = IdleTime(view, late, late.idle_ns + late.comm_ns, loading_ns, waited_ns)
        yield from _explained(time, _IDLE)


def _explained(time: ExposedTime | IdleTime, rules: list[tuple[str, Rule[Any]]]) -> Iterator[Loss]:
    for cause, rule in rules:
        for part in rule.losses(time):
            if loss := time.take(cause, part):
                yield loss
