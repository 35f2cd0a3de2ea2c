"""Time that causes are found for: that in which a call is exposed, and that in which the host was late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from overlap_sweep.diagnosis import NEVER, Role
from overlap_sweep.diagnosis.calls import Call
from overlap_sweep.diagnosis.exposure import Exposed, Late
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.diagnosis.lateness import Share
from overlap_sweep.diagnosis.loss import Loss
from overlap_sweep.diagnosis.rank import Hiding, RankView


@dataclass
class ExposedTime:
    """The time in which a call ran and nothing computed, without waiting for the last rank."""

    view: RankView
    exposed: Exposed
    rest_ns: float
    """Part without a cause so far."""
    waited_for: Sequence[Share]
    """Waiting for the last rank, by the rank that caused it."""

    @property
    def facts(self) -> RankFacts:
        return self.view.facts

    @property
    def index(self) -> int:
        """Returns the index of the call."""
        return self.exposed.call

    @property
    def call(self) -> Call:
        return self.facts.calls[self.index]

    @property
    def role(self) -> Role:
        return self.view.roles[self.index]

    @property
    def moving_ns(self) -> float:
        return self.view.moving_ns[self.index]

    @property
    def hiding(self) -> Hiding | None:
        """Returns the pass whose computation could have hidden the call; None for activations."""
        return self.view.hiding_of(self.index)

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
