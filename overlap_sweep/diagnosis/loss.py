"""What is lost to a cause in one step of one rank, and what late ranks did more than those that waited for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from overlap_sweep.diagnosis import UNKNOWN_RANK, Role


class Why(NamedTuple):
    """What late ranks did more than those that waited. Nanoseconds."""

    host_ns: float = 0.0
    """Time in which their hosts had launched nothing."""
    loading_ns: float = 0.0
    """Part of it in which their hosts waited for a DataLoader's next batch."""
    work_ns: float = 0.0
    """Time in which they computed."""
    before_ns: float = 0.0
    """Time by which their recording of the step begins later, where no collective in common came before."""

    def plus_all(self, others: Iterable[Why]) -> Why:
        return reduce(Why.plus, others, self)

    def plus(self, other: Why, times: float = 1.0) -> Why:
        return Why(*(own + times * more for own, more in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Loss:
    """Time lost in one step of one rank. Rules leave cause, call, step, work and role to `losses.py`."""

    lost_ns: float
    cause: str = ""
    step: int = -1
    call: int | None = None
    """Index into the rank's calls."""
    wait: int | None = None
    """Index into the rank's waits."""
    pause: int | None = None
    """Index into the rank's pauses."""
    work: int | None = None
    """Index of the work that was late."""
    stall: int | None = None
    """Index into the rank's stalls."""
    role: Role | None = None
    """What the call carries."""
    about: str = ""
    """What losses have in common that make one finding, if that is not the kind of call, such as IN_TURN."""
    where: str = ""
    """Where it happened; empty: where the call was launched."""
    late_rank: int = UNKNOWN_RANK
    """Of a straggler: index of the rank that is waited for."""
    why: Why = field(default_factory=Why)
    """Of a straggler: what that rank did more."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What decided, for the evidence."""
    makes_late: bool = False
    """Whether it does not count for a rank that is listed as a straggler, of which it is the reason."""
    takes: bool = True
    """Whether it is part of the time that is left for other causes: what is waited for others is not."""
