"""Finds what exposed communication waited for: which rank came last, and what it did more than the waiting one since
both had left the last collective that they have in common: it computed longer, or its host launched late, or it had
waited itself, in another process group, for a third rank, which is the root then."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import LATENCY_NS, NEVER, UNKNOWN_RANK, Why
from overlap_sweep.diagnosis.arrivals import MEETING, SAME_HOST_CLOCK_NS, Arrivals
from overlap_sweep.diagnosis.exposure import Exposure
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.trace.activity import NO_ITERATION
from overlap_sweep.trace.intervals import Measure, intersect

MOSTLY = 0.6
"""Share of a process group's waiting that one rank must have caused for the others to wait for it; else ranks are late
in turn."""

STARTS_NS = 30_000
"""Most that starting a collective adds to the time of moving its bytes."""


class Share(NamedTuple):
    """Part of a call's waiting."""

    root: int
    """Index of the rank that caused it; UNKNOWN_RANK."""
    waited_ns: float
    why: Why = Why()


def by_root(shares: Iterable[Share]) -> dict[int, Share]:
    """Returns the sum of the shares of each root."""
    found: dict[int, Share] = {}
    for root, waited_ns, why in shares:
        before = found.get(root, Share(root, 0.0))
        found[root] = Share(root, before.waited_ns + waited_ns, before.why.plus(why))
    return found


class Waiting(NamedTuple):
    """The exposed time in which a call waited for the last rank."""

    late: int
    """Index of the rank that started last; UNKNOWN_RANK."""
    shares: list[Share]
    rest_ns: float
    """Exposed time after the last rank's start."""

    @property
    def waited_ns(self) -> float:
        return sum(share.waited_ns for share in self.shares)


def waitings_of(
    facts: Sequence[RankFacts],
    exposures: Sequence[Exposure],
    arrivals: Arrivals,
    last_ns: Sequence[NDArray[np.int64]],
) -> list[dict[int, Waiting]]:
    """Returns what each rank's exposed calls waited for, by call. `last_ns`: as in `arrivals`, but also where the last
    rank's start is assumed."""
    found: list[dict[int, Waiting]] = [{} for _ in facts]
    for rank, exposure in enumerate(exposures):
        for i, exposed in exposure.exposed.items():
            call, last = facts[rank].calls[i], int(last_ns[rank][i])
            late = int(arrivals.last_rank[rank][i])
            # On a CPU what is within the noise of its threads is no waiting.
            noise_ns = 0 if facts[rank].on_device else SAME_HOST_CLOCK_NS
            if last == NEVER or last <= call.start_ns + noise_ns or call.is_message:
                continue
            waited_ns = float(sum(max(0, min(end, last) - start) for start, end in exposed.pieces))
            if waited_ns and (late != UNKNOWN_RANK or call.group in facts[rank].groups):
                found[rank][i] = Waiting(late, [Share(late, waited_ns)], exposed.total_ns - waited_ns)
    known = ((rank, i) for rank, own in enumerate(found) for i, one in own.items() if one.late != UNKNOWN_RANK)
    history = _History(facts, exposures, arrivals)
    # What a rank had waited for itself is known before what others wait for it.
    for rank, i in sorted(known, key=lambda one: int(last_ns[one[0]][one[1]]) + arrivals.offsets_ns[one[0]]):
        waiting = found[rank][i]
        found[rank][i] = waiting._replace(shares=history.shares(rank, i, waiting, found))
    return found


class _History:
    """What the ranks did before they came to a collective."""

    def __init__(self, facts: Sequence[RankFacts], exposures: Sequence[Exposure], arrivals: Arrivals) -> None:
        self._facts, self._exposures, self._offsets = facts, exposures, arrivals.offsets_ns
        self._members = [dict(match) for match in arrivals.matches]
        self._meetings: list[list[int]] = [[] for _ in facts]
        self._match: list[dict[int, int]] = [{} for _ in facts]
        for number, match in enumerate(arrivals.matches):
            for rank, i in match:
                self._match[rank][i] = number
                if facts[rank].calls[i].collective in MEETING:
                    self._meetings[rank].append(number)
        self._common: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._starts = [[call.start_ns for call in rank.calls] for rank in facts]
        self._idle = [Measure(exposure.host_late) for exposure in exposures]
        self._loading = [
            Measure(intersect(idle.union, own.loading)) for own, idle in zip(facts, self._idle, strict=True)
        ]

    def shares(self, rank: int, index: int, waiting: Waiting, known: Sequence[dict[int, Waiting]]) -> list[Share]:
        """Returns the shares of a call's waiting by the rank that caused them. `known`: what was waited for before."""
        late, left = waiting.late, waiting.waited_ns
        own_window, late_window, met = self._windows(rank, index, late)
        before = self._waited(late, late_window, known[late])
        for root, share in self._waited(rank, own_window, known[rank]).items():
            if root in before:
                before[root] = before[root]._replace(waited_ns=before[root].waited_ns - share.waited_ns)
        found = []
        for root, share in before.items():
            if root not in (rank, late) and share.waited_ns > 0 and left > 0:
                part = min(left, share.waited_ns)
                found.append(Share(root, part, Why().plus(share.why, part / share.waited_ns)))
                left -= part
        if left > 0:
            found.append(Share(late, left, self._more(late, late_window, rank, own_window, left, met=met)))
        return found

    def _windows(self, rank: int, index: int, late: int) -> tuple[tuple[int, int], tuple[int, int], bool]:
        """Returns the time of both ranks from the end of the last collective that they have in common to this one, and
        whether there is one; else from the start of the step."""
        if (rank, late) not in self._common:
            both = (self._members[number] for number in self._meetings[rank])
            self._common[rank, late] = sorted((match[rank], match[late]) for match in both if late in match)
        common = self._common[rank, late]
        place = bisect_left(common, (index, 0))
        windows = []
        for column, (who, i) in enumerate(((rank, index), (late, self._members[self._match[rank][index]][late]))):
            facts, call = self._facts[who], self._facts[who].calls[i]
            starts = (step.start_ns for step in facts.steps if step.number == call.step)
            start = facts.calls[common[place - 1][column]].end_ns if place else next(starts, call.start_ns)
            windows.append((start, call.start_ns))
        return windows[0], windows[1], bool(place)

    def _waited(self, rank: int, window: tuple[int, int], known: dict[int, Waiting]) -> dict[int, Share]:
        first, beyond = (bisect_left(self._starts[rank], moment) for moment in window)
        return by_root(share for i in range(first, beyond) if i in known for share in known[i].shares)

    def _more(
        self, late: int, its: tuple[int, int], rank: int, own: tuple[int, int], waited_ns: float, *, met: bool
    ) -> Why:
        """Returns what the late rank did more than the other one in their windows, at most as long as was waited.
        `met`: whether both windows begin with a collective that they had in common."""
        more = self._spent(late, its).plus(self._spent(rank, own), -1.0)
        host_ns, work_ns = max(0.0, more.host_ns), max(0.0, more.work_ns)
        loading_ns = max(0.0, min(more.loading_ns, host_ns))
        # Both have left a collective in common at the same time, but for the noise of clocks.
        before_ns = 0.0 if met else max(0.0, float(its[0] + self._offsets[late] - own[0] - self._offsets[rank]))
        total_ns = host_ns + work_ns + before_ns
        times = min(1.0, waited_ns / total_ns) if total_ns else 0.0
        return Why().plus(Why(host_ns, loading_ns, work_ns, before_ns), times)

    def _spent(self, rank: int, window: tuple[int, int]) -> Why:
        measures = self._idle[rank], self._loading[rank], self._exposures[rank].compute
        return Why(*(measure.between(*window) for measure in measures))


def stragglers_of(
    facts: Sequence[RankFacts], arrivals: Arrivals, waitings: Sequence[dict[int, Waiting]]
) -> set[tuple[str, int]]:
    """Returns the pairs of process group and index of a rank for which the group's other ranks wait: it causes most of
    all waiting, and most of it in most steps."""
    members = {(rank, i): tuple(member for member, _ in match) for match in arrivals.matches for rank, i in match}
    waited: dict[tuple[str, tuple[int, ...]], dict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    for rank, own in enumerate(waitings):
        for i, waiting in own.items():
            call = facts[rank].calls[i]
            if waiting.late != UNKNOWN_RANK and call.step not in facts[rank].startup_steps:
                for share in waiting.shares:
                    waited[call.group, members.get((rank, i), ())][call.step][share.root] += round(share.waited_ns)
    found = set()
    for (group, _), by_step in waited.items():
        total = sum(by_step.values(), Counter())
        for late, lost in total.items():
            steps = [2 * by_rank[late] > by_rank.total() for by_rank in by_step.values() if by_rank.total()]
            if lost and lost >= MOSTLY * total.total() and sum(steps) > len(steps) / 2:
                found.add((group, late))
    return found


class Often(NamedTuple):
    """How often a rank came last."""

    last: int
    met: int
    """Collectives that it took part in, and that had a last rank."""


def often_of(facts: Sequence[RankFacts], arrivals: Arrivals) -> list[Often]:
    """Returns how often each rank came last, start-up steps left out."""
    last, met = [0] * len(facts), [0] * len(facts)
    for match in arrivals.matches:
        rank, i = match[0]
        call = facts[rank].calls[i]
        if not call.is_message and call.step not in facts[rank].startup_steps:
            last[int(arrivals.last_rank[rank][i])] += 1
            for member, _ in match:
                met[member] += 1
    return [Often(*both) for both in zip(last, met, strict=True)]


def with_assumed_waits(facts: RankFacts, last_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the start of the last rank, for calls without other ranks' traces as estimated: a call that takes much
    longer than the fastest of its size, or than its bytes at the group's best rate, has waited before."""
    unknown = [
        i
        for i, call in enumerate(facts.calls)
        if last_ns[i] == NEVER and not call.is_message and not call.is_wait and call.elements
    ]
    fastest: dict[tuple[str, str, int], int] = {}
    rate: dict[tuple[str, str], float] = defaultdict(float)
    for i in unknown:
        call, took = facts.calls[i], max(facts.calls[i].end_ns - facts.calls[i].start_ns, 1)
        size = call.group, call.collective, call.elements
        fastest[size] = min(fastest.get(size, took), took)
        rate[size[:2]] = max(rate[size[:2]], call.elements / took)
    assumed = last_ns.copy()
    for i in unknown:
        call = facts.calls[i]
        size = call.group, call.collective, call.elements
        moving = min(fastest[size], call.elements / rate[size[:2]] + STARTS_NS)
        # Next to GEMMs it may take longer, too.
        if call.end_ns - call.start_ns > 2.0 * moving + STARTS_NS:
            assumed[i] = call.end_ns - round(moving)
    return assumed


Delay = tuple[float, int]
"""Exposed time of a call that others before it caused, in nanoseconds, and the rank that was late."""


def delayed_by_stragglers(
    facts: RankFacts,
    exposure: Exposure,
    waitings: dict[int, Waiting],
    stragglers: set[tuple[str, int]],
    last_ns: NDArray[np.int64],
    late_rank: NDArray[np.intp],
) -> dict[int, Delay]:
    """Returns, by call, the exposed time that it has because calls of its group before it waited for a straggler while
    computation ran, and so ended later, each launched before the one before had ended. `last_ns`, `late_rank`: of the
    last rank to start each call."""
    found: dict[int, Delay] = {}
    before: dict[str, tuple[int, float, int]] = {}
    for i, call in enumerate(facts.calls):
        if call.step == NO_ITERATION:
            continue
        end_ns, left_ns, straggler = before.get(call.group, (NEVER, 0.0, UNKNOWN_RANK))
        if not call.group or call.launch_ns >= end_ns or call.start_ns > end_ns + LATENCY_NS:
            left_ns = 0.0
        waiting, exposed = waitings.get(i), exposure.exposed.get(i)
        if exposed and (lost_ns := min(left_ns, waiting.rest_ns if waiting else exposed.total_ns)):
            found[i] = lost_ns, straggler
            left_ns -= lost_ns
        late, waited_ns = int(late_rank[i]), float(last_ns[i] - call.start_ns)
        if (call.group, late) in stragglers and waited_ns > 0:
            left_ns += max(0.0, waited_ns - (waiting.waited_ns if waiting else 0.0))
            straggler = late
        before[call.group] = call.end_ns, left_ns, straggler
    return found
