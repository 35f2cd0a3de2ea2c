"""Diagnoses why communication is exposed in Kineto traces, and which setting to try. This module: what is found."""

from __future__ import annotations

import math
import re
from typing import Literal

import msgspec

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


def counted(count: float, noun: str) -> str:
    """Returns such as `1 call` or `2.5 calls`."""
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


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
    """Name and description of the process group; empty if unknown, or if the cause is not about one."""
    collective: str
    """Such as all_gather; empty if the cause is not about one."""
    pass_: Pass = msgspec.field(name="pass", default="")
    where: str
    """Module, annotation or operator that launched it; empty if the trace does not know."""
    evidence: str
    """A sentence with the numbers that decided."""
    try_: str = msgspec.field(name="try", default="")
    """A sentence with the setting to change."""
    waiting_us: float | None = None
    """Exposed time per step in which the calls waited for the last rank to start, median, of the rank that waits most.
    None if the cause is not about a collective, or if nobody knows when the last rank started."""
    transfer_us: float | None = None
    """The rest of the calls' exposed time, of the finding's rank."""


class StepLoss(msgspec.Struct, kw_only=True):
    """One step of one rank: what was lost. Microseconds."""

    rank: int | None
    step: int
    """N of ProfilerStep#N; counted from 0 in a trace without such steps."""
    step_us: float
    comm_us: float
    """Union of communication and of waiting in communication kernels."""
    exposed_comm_us: float
    """Part of comm_us in which nothing computes."""
    idle_us: float
    """Time in which nothing computes or communicates."""
    slowed_us: float
    """What GEMMs lost to communication next to them."""
    startup: bool
    """Whether the step was left out, because it contains the profiler's start."""


class Diagnosis(msgspec.Struct, kw_only=True):
    """The findings of one run: of the traces of its ranks."""

    run: str
    """Common name of the traces, with their directory."""
    ranks: list[int | None]
    world_size: int | None
    findings: list[Finding]
    """The most worthwhile first."""
    steps: list[StepLoss]
    """Steps of every rank."""
    notes: list[str] = []
    """A sentence for everything that is unknown, or was left out."""
