"""What a cause of lost time consists of: rules that say which time is lost to it, evidence, and when it is listed.

Each module of `causes` declares one; it needs neither numpy nor pandas to be imported, since help lists all causes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from overlap_sweep.diagnosis import LISTED, Finding, StepLoss

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.loss import Loss
    from overlap_sweep.diagnosis.rank import RankView
    from overlap_sweep.diagnosis.times import ExposedTime, IdleTime

Time = TypeVar("Time")


@dataclass(frozen=True)
class Rule(Generic[Time]):
    """Says which part of a time is lost to a cause."""

    order: int
    """Rules are asked in this order: each takes of what those before have left."""
    losses: Callable[[Time], Iterable[Loss]]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of lost time."""

    order: int
    """Place in lists of all causes."""
    meaning: str
    """In help and docs: what is so if this is the cause."""
    name: str = ""
    """That of its module."""
    evidence: Callable[[Basis], str] = lambda basis: ""
    """Returns the sentence with the numbers that decided."""
    exposed: Rule[ExposedTime] | None = None
    """For the time in which a call ran and nothing computed."""
    idle: Sequence[Rule[IdleTime]] = ()
    """For the time in which nothing ran, because the host was late."""
    of_rank: Callable[[RankView], Iterable[Loss]] | None = None
    """Returns other losses of a rank."""
    of_run: Callable[[Sequence[StepLoss]], Finding | None] | None = None
    """Returns the finding of a whole run, given what all ranks lose."""
    conditions: Callable[[Basis], Iterable[str]] = lambda basis: ()
    """Returns the cause's own conditions of `advice.yaml` that hold."""
    condition_names: frozenset[str] = frozenset()
    """All that `conditions` may return."""
    is_exposed: bool = False
    """Whether it is not listed if exposed communication costs next to nothing."""
    least_share: float = LISTED
    """Share of a step from which on a finding is listed."""
    least_total: float = 0.0
    """Share of a step that all findings of this cause must have together."""
    least_total_on_cpu: float = 0.0

    def is_listed(self, share: float, total: float, *, on_device: bool) -> bool:
        """Returns whether a finding of this share of a step is listed, given that of all findings of the cause."""
        return share >= self.least_share and total >= (self.least_total if on_device else self.least_total_on_cpu)
