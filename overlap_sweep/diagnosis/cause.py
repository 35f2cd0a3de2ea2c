"""What a cause of lost time consists of: rules that say which time is lost to it, evidence, when it is
listed, and advice.

Each module of `causes` declares one, which needs neither numpy nor pandas to be imported, since help lists all causes.
What to try is chosen from `advice.yaml` by what the calls carry and by the libraries in the trace; causes are decided
without names of libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import msgspec

from overlap_sweep.diagnosis import LISTED, UNKNOWN_RANK, Finding, Role, StepLoss

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import ExposedTime, IdleTime, RankView

Time = TypeVar("Time")

IF_CORES_ARE_FREE = " It gains time only if cores are free: gloo computes on those that GEMMs use."


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


class Advice(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `advice.yaml`, which explains the fields."""

    when: list[str] = []
    try_: str = msgspec.field(name="try", default="")
    overlap: str = ""

    @property
    def sentence(self) -> str:
        return self.try_ or self.overlap


@cache
def advice_by_cause() -> dict[str, list[Advice]]:
    """Returns the entries of `advice.yaml`, by cause."""
    text = resources.files(__package__).joinpath("advice.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, list[Advice]])


def advice_for(cause: str, conditions: Mapping[str, str]) -> str:
    """Returns the sentence with the setting to try. `conditions`: those that hold, each with its value if it has
    one."""
    advice = next(one for one in advice_by_cause()[cause] if all(_holds(name, conditions) for name in one.when))
    suffix = IF_CORES_ARE_FREE if advice.overlap and "cpu" in conditions else ""
    return advice.sentence.format_map(conditions) + suffix


def _holds(name: str, conditions: Mapping[str, str]) -> bool:
    return name[1:] not in conditions if name.startswith("!") else name in conditions
