"""Diagnoses why communication is exposed in Kineto traces, and which setting to try. This module: what is found, and
what a cause consists of. It needs neither numpy nor pandas, since help lists all causes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

import msgspec

if TYPE_CHECKING:
    from overlap_sweep.diagnosis.basis import Basis
    from overlap_sweep.diagnosis.losses import ExposedTime, IdleTime, RankView

Time = TypeVar("Time")
Owner = TypeVar("Owner")
Computed = TypeVar("Computed")

Role = Literal["activation", "parameter", "gradient"]
"""What a collective carries."""

Pass = Literal["fwd", "bwd", "other", ""]
"""Where a collective was launched. `other`: the optimizer and what follows the backward pass; empty: several passes, or
a trace that does not separate them."""

NEGLIGIBLE = 0.02
"""Share of a step below which communication costs nothing worth fixing."""

END_OF_STEP = "end of the step"
"""Where the host waits for the device that then has nothing to run until the next step is launched."""

RECORDING_SLOWS = "Recording slows the host down: compare the step's time with that without the profiler."

LISTED = 0.01
"""Share of a step from which on a finding is listed."""

NEVER = -1
"""Launch of an event whose launch the trace does not have."""

UNKNOWN_RANK = -1
"""Index of a rank that came last, where its trace is missing or its call was not matched."""

LOADING = re.compile(r"enumerate\(DataLoader\)#")
"""Annotation of torch's DataLoader around the making of a batch."""

PAUSE_NS = 1_000_000
"""Shortest time in which a host that starts nothing is busy with something else."""

LATENCY_NS = 30_000
"""A kernel that nothing holds back may start so much later than its launch while a profiler records."""

TOGETHER_NS = 5_000
"""Longest time between the end of a kernel and the start of one that waited for it on another stream."""

UNBLOCKED_NS = 50_000
"""Longest time from the end of communication to the kernel that waited for it: copies may be in between."""

MUCH = 0.3
"""Share of the time lost from which on something explains it: what differs between two ranks, or what the host does."""

MENTIONED = 0.1
"""Least share of the time lost that evidence mentions."""


def as_share(share: float) -> str:
    """Returns the share in percent, with a decimal below ten percent, and at least one digit that is not zero."""
    decimals = 0 if share >= 0.0995 or not share else max(1, -math.floor(math.log10(100 * share)))
    return f"{share:.{decimals}%}"


def as_rate(rate: float) -> str:
    """Returns the rate with three digits; empty if it is unknown."""
    if math.isnan(rate):
        return ""
    if 0 < rate < 1e-4:
        # Without an exponent.
        return f"{rate:.{2 - math.floor(math.log10(rate))}f}"
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def as_time(time_us: float) -> str:
    """Returns the time for a sentence."""
    return f"{time_us:,.0f} us" if abs(time_us) >= 10 else f"{time_us:,.1f} us"


def as_size(size: float) -> str:
    """Returns the bytes for a sentence."""
    if size < 1000:
        return f"{size:g} bytes"
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} KB"


def counted(count: float, noun: str) -> str:
    """Returns such as `1 call` or `2.5 calls`."""
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def once(owner: Owner, compute: Callable[[Owner], Computed]) -> Computed:
    """Returns what the function returns for the owner, which keeps it as it keeps its cached properties."""
    kept, name = vars(owner), f"{compute.__module__}.{compute.__qualname__}"
    if name not in kept:
        kept[name] = compute(owner)
    found: Computed = kept[name]
    return found


def some_of(names: Iterable[object], most: int = 4, separator: str = ", ") -> str:
    """Returns `a, b`; of many names the first ones and the number of others."""
    texts = list(map(str, names))
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{separator.join(texts[:most])}{more}"


class Finding(msgspec.Struct, kw_only=True):
    """One cause of lost time, for one collective of one process group in one pass."""

    cause: str
    """Name of a module of `causes`."""
    lost_us: float
    """Median per step, of the rank that loses most: an upper bound of what fixing this cause alone could gain."""
    share: float
    """lost_us / step time."""
    rank: int | None
    """Rank that loses most; of a straggler the rank that the others wait for. None if ranks are late in turn, or if the
    trace does not record it."""
    process_group: str
    """Name and description; like collective, pass and where empty if unknown, or if the cause is not about one."""
    collective: str
    pass_: Pass = msgspec.field(name="pass", default="")
    where: str
    """Module, annotation or operator that launched it."""
    evidence: str
    try_: str = msgspec.field(name="try", default="")
    changes: list[str] | None = None
    """As of Advice."""
    roles: list[Role] = []
    """What its calls carry, as far as that is known."""
    cannot_tell: bool = False
    """As of Advice."""
    waiting_us: float | None = None
    """Exposed time per step in which the calls waited for the last rank to start, median, of the rank that waits most.
    None if the cause is not about a collective, or if nobody knows when the last rank started."""
    transfer_us: float | None = None
    """The rest of the calls' exposed time, of the finding's rank."""


class StepLoss(msgspec.Struct, kw_only=True):
    """One step of one rank: what was lost. Microseconds."""

    rank: int | None
    step: int
    step_us: float
    comm_us: float
    """Time of communication and of waiting in communication kernels."""
    exposed_comm_us: float
    idle_us: float
    """Time of neither computation nor communication."""
    slowed_us: float
    """What GEMMs lost to communication next to them."""
    startup: bool
    """Whether it was left out, because it contains the profiler's start."""


class Diagnosis(msgspec.Struct, kw_only=True):
    """The findings of one run: of the traces of its ranks."""

    run: str
    """Common name of the traces, with their directory."""
    ranks: list[int | None]
    world_size: int | None
    device: str
    """Name of the GPU, GPU if the traces do not name it, or CPU."""
    findings: list[Finding]
    """The most worthwhile first."""
    steps: list[StepLoss]
    notes: list[str] = []
    """A sentence for everything that is unknown, or was left out."""


class Why(NamedTuple):
    """Nanoseconds that late ranks spent more than those that waited, by what they did."""

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


class Loss(msgspec.Struct, frozen=True):
    """Time lost in one step of one rank. Rules leave cause, call, step, work and role to `losses.py`. `call`, `wait`,
    `pause`, `stall` and `work` are indices into the rank's lists; work is what was late."""

    lost_ns: float
    cause: str = ""
    step: int = -1
    call: int | None = None
    wait: int | None = None
    pause: int | None = None
    work: int | None = None
    stall: int | None = None
    role: Role | None = None
    about: str = ""
    """Key of losses that make one finding, if that is not the kind of call, such as IN_TURN."""
    where: str = ""
    """Place of the loss; empty: where the call was launched."""
    late_rank: int = UNKNOWN_RANK
    """Index of the straggler that is waited for."""
    why: Why = Why()
    """Times by which the straggler was late."""
    numbers: dict[str, float] = {}
    """Numbers that decided, by name, for the evidence."""
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
    others: Callable[[RankView], Iterable[Loss]] = lambda view: ()
    """Returns other losses of a rank."""
    conditions: Mapping[str, Callable[[Basis], bool]] = field(default_factory=dict)
    """The cause's own conditions of `advice.yaml`, by name."""
    is_exposed: bool = False
    """Whether it is not listed if exposed communication costs next to nothing."""
    least_share: float = LISTED
    """Share of a step from which on a finding is listed."""
    least_total: float = 0.0
    """Share of a step that all findings of this cause must have together."""
    least_total_on_cpu: float = 0.0


class Advice(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `advice.yaml`, which explains the fields."""

    when: list[str] = []
    try_: str = msgspec.field(name="try", default="")
    overlap: str = ""
    changes: list[str] | None = None
    """Those of `predict` that are what it says; None: all that mend the cause."""
    cannot_tell: bool = False
    """Whether the time may be lost to ranks that have no trace."""

    @property
    def sentence(self) -> str:
        return self.try_ or self.overlap


MAY_BE_WAITING = frozenset({"dependency", "issued_late", "bandwidth", "latency"})
"""Causes as which waiting for a rank without a trace may look."""


@cache
def advice_by_cause() -> dict[str, list[Advice]]:
    """Returns the entries of `advice.yaml`, by cause."""
    return msgspec.yaml.decode(Path(__file__).with_name("advice.yaml").read_bytes(), type=dict[str, list[Advice]])


def advice_for(cause: str, conditions: Mapping[str, str]) -> Advice:
    """Returns the advice on what to try, with values. `conditions`: those that hold, each with its value if it has
    one."""
    advice = next(
        one
        for one in advice_by_cause()[cause]
        if all((name.removeprefix("!") in conditions) != name.startswith("!") for name in one.when)
    )
    sentence = advice.sentence.format_map(conditions)
    if advice.overlap and "cpu" in conditions:
        sentence += " It gains time only if cores are free: gloo computes on those that GEMMs use."
    if cause in MAY_BE_WAITING and (missing := conditions.get("missing_ranks")):
        sentence = f"Record {missing} as well, which may be what is late. If it is not: {sentence}"
        return msgspec.structs.replace(advice, try_=sentence, changes=[], cannot_tell=True)
    changes = None if advice.changes is None else [change.format_map(conditions) for change in advice.changes]
    return msgspec.structs.replace(advice, try_=sentence, changes=changes)
