"""Finds when nothing computes, and what the computation that ends each such gap had waited for: the host, which
launched it just before, or the communication that ended just before."""

from bisect import bisect, bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import LATENCY_NS, NEVER, UNBLOCKED_NS
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.trace.intervals import Intervals, Measure, intervals_of, merge, subtract

UNBLOCKED_CPU_NS = 1_000_000
"""UNBLOCKED_NS on a CPU, where the thread that waited has to wake up and to run Python first."""


UNBLOCKED_CPU = 0.25
"""The same as a share of the time that was waited: on a busy CPU waking up takes longer."""


@dataclass
class Exposed:
    """The part of a call in which nothing computes."""

    call: int
    """Index into the rank's calls."""
    pieces: list[tuple[int, int]] = field(default_factory=list)
    """When computation was blocked by this call, or by one that waited for it. Nanoseconds."""
    first_blocked: int | None = None
    """Index of the work that waited; None if nothing came after."""
    ended_by: int | None = None
    """Call that the work waited for last: this one, or one that waited for this one."""

    @property
    def total_ns(self) -> float:
        return float(sum(end - start for start, end in self.pieces))


class Late(NamedTuple):
    """Time in which nothing computed because the host had not launched anything."""

    start_ns: int
    end_ns: int
    idle_ns: float
    """Part without communication or copies."""
    work: int
    """Index of the work that was launched late."""
    comm_ns: float
    """Part with communication that nothing waited for."""


@dataclass(frozen=True)
class Exposure:
    """The gaps of one rank."""

    exposed: dict[int, Exposed]
    """By call, those that blocked computation."""
    late: list[Late]
    """By time."""
    compute: Measure
    comm: Measure
    gaps: Intervals
    loading_ns: NDArray[np.float64]
    """By `late`: the part of `idle_ns` in which the host waited for the next batch."""
    host_late: Intervals
    """Union of `late`, without communication and copies: where the host was is in `host.paused_ns` of these."""
    unexplained_ns: NDArray[np.float64]
    """By the rank's stalls: the part in which nothing computed inside of a step, and the host was not late."""


def exposure_of(facts: RankFacts) -> Exposure:
    """Returns when nothing computed on a rank, and what was waited for."""
    work, calls = facts.work, facts.calls
    spans = intervals_of(calls)
    starts, ends = spans[:, 0], spans[:, 1]
    compute, comm = Measure(work.intervals), Measure(spans)
    busy = Measure(np.concatenate((spans, facts.copies)))
    gaps = subtract(merge(intervals_of(facts.steps)), compute.union)
    exposed: dict[int, Exposed] = {}
    reach = np.maximum.accumulate(ends) if len(ends) else ends
    found: list[tuple[int, int, int]] = []
    # Calls that overlap a gap: sorted by start, those that may still run at `a`.
    firsts, beyonds = np.searchsorted(reach, gaps[:, 0], side="right"), np.searchsorted(starts, gaps[:, 1])
    afters = np.searchsorted(work.start_ns, gaps[:, 1])
    ended = np.append(work.start_ns, np.iinfo(np.int64).max)[afters] == gaps[:, 1]
    launches = np.where(ended, np.append(work.launch_ns, NEVER)[afters], NEVER)
    # Most gaps have no call, and neither was the host late: see `_one_gap`.
    held_back = (launches == NEVER) | ((launches <= gaps[:, 0]) & facts.on_device)
    chosen = np.flatnonzero((firsts < beyonds) | ~held_back)
    columns = (column[chosen].tolist() for column in (gaps, firsts, beyonds, afters, ended))
    ends_ns = ends.tolist()
    for (a, b), first, beyond, after, is_ended in zip(*columns, strict=True):
        inside = [i for i in range(first, beyond) if ends_ns[i] > a]
        for start, end, number in _one_gap(facts, exposed, busy, (a, b), inside, after if is_ended else None):
            found += [(one, other, number) for one, other in _by_step(facts, start, end)]
    loading = Measure(subtract(facts.loading, busy.union))
    spans = np.array(found, np.int64).reshape(-1, 3)[:, :2]
    idle_ns = np.maximum(spans[:, 1] - spans[:, 0] - busy.within(spans), 0.0)
    times_ns = zip(idle_ns.tolist(), comm.within(spans).tolist(), strict=True)
    late = [
        Late(start, end, idle, number, beside)
        for (start, end, number), (idle, beside) in zip(found, times_ns, strict=True)
    ]
    in_time = Measure(subtract(gaps, merge(spans)))
    return Exposure(
        exposed=exposed,
        late=late,
        compute=compute,
        comm=comm,
        gaps=gaps,
        loading_ns=loading.within(spans),
        host_late=subtract(merge(spans), busy.union),
        unexplained_ns=in_time.within(intervals_of(facts.stalls)),
    )


def _one_gap(
    facts: RankFacts,
    found: dict[int, Exposed],
    busy: Measure,
    gap: tuple[int, int],
    inside: list[int],
    after: int | None,
) -> Iterator[tuple[int, int, int]]:
    """Yields when the host was late in the gap, with the work that it then launched; the rest of the gap is added to
    the calls that were waited for."""
    a, b = gap
    calls = facts.calls
    launch = int(facts.work.launch_ns[after]) if after is not None else NEVER
    blocking = _blocking(facts, busy, a, b, inside, launch, after)
    if blocking is None:
        if after is None or launch == NEVER or (launch <= a and facts.on_device):
            # Launched, but held back by a copy, or by something that the trace does not show: a stall.
            return
        end = b if b - launch <= LATENCY_NS else launch
        yield a, end, after
        return
    end_of_comm = min(calls[blocking].end_ns, b)
    reached = end_of_comm
    first_start = end_of_comm
    for i in sorted(inside, key=lambda i: (i != blocking, -calls[i].end_ns)):
        start, end = max(calls[i].start_ns, a), min(calls[i].end_ns, reached)
        if start < end:
            exposed = found.setdefault(i, Exposed(i))
            exposed.pieces.append((start, end))
            if exposed.ended_by is None:
                exposed.first_blocked, exposed.ended_by = after, blocking
            reached = start
        first_start = min(first_start, max(calls[i].start_ns, a))
    first = min(inside, key=lambda i: calls[i].start_ns)
    if a < first_start and calls[first].launch_ns > a and after is not None:
        # The host launched even the communication only after the computation had run dry.
        yield a, first_start, after
    if after is not None and launch > end_of_comm:
        yield end_of_comm, b, after


def _blocking(
    facts: RankFacts, busy: Measure, a: int, b: int, inside: list[int], launch: int, after: int | None
) -> int | None:
    """Returns the call that held back the computation after the gap; None if the host did, or something else."""
    if not inside:
        return None
    calls = facts.calls
    if after is None:
        return max(inside, key=lambda i: calls[i].end_ns)
    ended = [i for i in inside if calls[i].end_ns <= b]
    if not ended:
        return None
    last = max(ended, key=lambda i: calls[i].end_ns)
    end = calls[last].end_ns
    # What was communicated may have to be copied first.
    pause = b - end - busy.between(end, b)
    if not facts.on_device:
        return last if pause <= max(UNBLOCKED_CPU_NS, UNBLOCKED_CPU * (end - a)) else None
    if launch <= end:
        return last if b - launch > LATENCY_NS else None
    # The host itself may have waited for the communication.
    waits, order = facts.waits, facts.waits_by_end
    first = bisect_left(order, end - UNBLOCKED_NS, key=lambda i: waits[i].end_ns)
    beyond = bisect(order, b, key=lambda i: waits[i].end_ns)
    return last if any(waits[i].start_ns < end for i in order[first:beyond]) else None


def _by_step(facts: RankFacts, start: int, end: int) -> Iterator[tuple[int, int]]:
    starts_ns = facts.step_starts_ns
    return pairwise((start, *starts_ns[bisect(starts_ns, start) : bisect(starts_ns, end - 1)], end))
