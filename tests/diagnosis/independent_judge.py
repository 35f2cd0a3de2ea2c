"""Judges a run by other means than the product: what its ranks waited for, sent, hid and idled, and who was late.

Shares no code and no method with overlap_sweep. The product finds the last rank of a call by when kernels start, and
so needs clocks that agree; here the last rank is the one whose kernel of a call is the shortest, since all ranks
leave a collective together: that kernel is the transfer, and what others take longer is their waiting. No clock is
compared.

python -m tests.diagnosis.independent_judge DIRECTORY...
"""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from tests.diagnosis.independent_trace import Event, Rank, covered, read

LAUNCH_LATENCY = 50.0
"""A kernel that starts within this time after its launch, on an idle device, did not wait for anything."""


@dataclass(kw_only=True)
class Call:
    """One collective call, on every rank that takes part."""

    collective: str
    by_rank: dict[int, Event]

    @property
    def transfer_us(self) -> float:
        return min(event.end - event.start for event in self.by_rank.values())

    @property
    def last(self) -> int:
        return min(self.by_rank, key=lambda rank: self.by_rank[rank].end - self.by_rank[rank].start)

    def waiting_us(self, rank: int) -> float:
        return self.by_rank[rank].end - self.by_rank[rank].start - self.transfer_us


def matched(ranks: dict[int, Rank]) -> list[Call]:
    """Returns the calls of which the kernel of every rank is known: by group and collective, in their order, without
    those that some rank did not record at its start.

    The other end of a send is not told, and what is unknown may be another call on each rank.
    """
    sequences: dict[tuple[str, str], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for number, rank in ranks.items():
        for event in rank.events:
            if event.communicates and event.collective not in ("send_recv", "unknown"):
                sequences[event.group, event.collective][number].append(event)
    calls = []
    for (_, collective), by_rank in sequences.items():
        fewest = min(map(len, by_rank.values()))
        for same in zip(*(events[len(events) - fewest :] for events in by_rank.values()), strict=True):
            if len(same) > 1:
                calls.append(Call(collective=collective, by_rank=dict(zip(by_rank, same, strict=True))))
    return sorted(calls, key=lambda call: min(event.start for event in call.by_rank.values()))


@dataclass(kw_only=True)
class Late:
    """In how many calls a rank was last, and what that cost the mean of the other ranks, over the whole trace."""

    calls: int = 0
    cost_us: float = 0.0


@dataclass(kw_only=True)
class Verdict:
    ranks: list[int | None]
    world_size: int | None
    steps: dict[int, dict[int, dict[str, float]]] = field(default_factory=dict)
    """By rank and step: step_us, comm_us, exposed_us, idle_us, unexplained_us; with several ranks also waiting_us,
    exposed_waiting_us."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Calls of the first rank."""
    transfer_us: float | None = None
    """Of all calls of a step, median over the steps; None with one rank."""
    late: dict[int, Late] = field(default_factory=dict)

    def worst(self, quantity: str) -> float:
        """Returns the largest of the ranks' medians over the steps."""
        return max(median(step[quantity] for step in steps.values()) for steps in self.steps.values())


def judge(paths: Sequence[Path], left_out: frozenset[int] = frozenset()) -> Verdict:
    """Judges the traces of a run's ranks, without these steps."""
    read_ranks = [read(path) for path in paths]
    for rank in read_ranks:
        rank.cuts = [cut for cut in rank.cuts if cut[0] not in left_out]
    ranks = {index if rank.number is None else int(rank.number): rank for index, rank in enumerate(read_ranks)}
    ranks = {number: rank for number, rank in sorted(ranks.items()) if rank.events}
    verdict = Verdict(ranks=[rank.number for rank in ranks.values()], world_size=read_ranks[0].world_size)
    for number, rank in ranks.items():
        verdict.steps[number] = {step: _step(rank, start, end) for step, start, end in rank.cuts}
    verdict.collectives = Counter(event.collective for event in next(iter(ranks.values())).events if event.communicates)
    calls = matched(ranks)
    if calls:
        _judge_calls(verdict, ranks, calls)
    return verdict


def _step(rank: Rank, start: float, end: float) -> dict[str, float]:
    computing, communicating = rank.computing, rank.communicating
    return {
        "step_us": end - start,
        "comm_us": covered(start, end, by=communicating),
        "exposed_us": covered(start, end, by=communicating, but=computing),
        "idle_us": end - start - covered(start, end, by=rank.busy),
        "unexplained_us": sum(
            max(0.0, min(after, end) - max(before, launched, start))
            for before, after, launched in _gaps(rank)
            if min(after, end) - max(before, launched, start) > LAUNCH_LATENCY
        ),
    }


def _gaps(rank: Rank) -> list[tuple[float, float, float]]:
    """Returns start, end, and when the host had launched what ends it, of each time in which the device idles."""
    gaps, until = [], rank.events[0].end
    for event in rank.events[1:]:
        if event.start > until:
            gaps.append((until, event.start, event.launched[1] if event.launched else event.start))
        until = max(until, event.end)
    return gaps


def _judge_calls(verdict: Verdict, ranks: dict[int, Rank], calls: list[Call]) -> None:
    for number, rank in ranks.items():
        computing = rank.computing
        own = [(call.by_rank[number], call.waiting_us(number)) for call in calls if number in call.by_rank]
        waits = np.array([(event.start, event.start + wait) for event, wait in own]).reshape(-1, 2)
        for step, start, end in rank.cuts:
            verdict.steps[number][step]["waiting_us"] = covered(start, end, by=waits)
            verdict.steps[number][step]["exposed_waiting_us"] = covered(start, end, by=waits, but=computing)
    first = next(iter(ranks))
    by_step = defaultdict(float)
    for call in calls:
        for step, start, end in ranks[first].cuts:
            if first in call.by_rank and start <= call.by_rank[first].start < end:
                by_step[step] += call.transfer_us
    verdict.transfer_us = median(by_step[step] for step, _, _ in ranks[first].cuts)
    for call in calls:
        late = verdict.late.setdefault(call.last, Late())
        late.cost_us += float(np.mean([call.waiting_us(rank) for rank in call.by_rank if rank != call.last]))
        late.calls += 1


def traces_in(directory: Path) -> list[Path]:
    return sorted(
        path for path in directory.iterdir() if re.search(r"\.json(\.gz)?$", path.name) and path.name != "scenario.json"
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, judge(traces_in(Path(name))), sep="\n")
