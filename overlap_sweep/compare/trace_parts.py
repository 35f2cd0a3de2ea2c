"""What the time of traces went to, beside each other: classes of kernels, kernels and streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from overlap_sweep.compare.ratios import ratio
from overlap_sweep.compare.trace_pairs import Pair
from overlap_sweep.trace.files import TraceFile
from overlap_sweep.trace.overlap import Grouping

Change = Literal["faster", "slower", "same", "appeared", "disappeared"]


@dataclass(frozen=True)
class PartMatch:
    """A class of kernels, a kernel or a stream. Values are medians over the iterations but start-up, and over the
    ranks; a part that an iteration does not have counts 0 there."""

    dataset: str
    reference: str
    phase: str
    by: Grouping
    kind: str
    library: str
    name: str
    busy_us: float
    """The union of its spans."""
    reference_busy_us: float
    total_us: float
    """The sum of its spans."""
    reference_total_us: float
    num_events: float
    reference_num_events: float
    apart: bool
    """Whether every iteration's busy time in the one is longer than every iteration's in the other."""

    @property
    def difference_us(self) -> float:
        return self.busy_us - self.reference_busy_us

    @property
    def ratio(self) -> float:
        """NaN where it appeared."""
        return ratio(self.busy_us, self.reference_busy_us)

    @property
    def change(self) -> Change:
        """`same` where the iterations of both overlap."""
        if not self.reference_num_events and self.num_events:
            return "appeared"
        if not self.num_events and self.reference_num_events:
            return "disappeared"
        if not self.apart or not self.difference_us:
            return "same"
        return "slower" if self.difference_us > 0 else "faster"


class _Part(NamedTuple):
    by: Grouping
    kind: str
    library: str
    name: str


_Turn = tuple[int, int]
"""A trace and an iteration, both by their numbers."""


class _Values(NamedTuple):
    busy_us: float = 0.0
    total_us: float = 0.0
    num_events: float = 0


def compare_parts(dataset: str, reference: str, pairs: Sequence[Pair], phase: str) -> list[PartMatch]:
    """Of one phase, by grouping, the largest difference first; empty where only one of the two has the phase."""
    our_files, their_files = [pair.ours for pair in pairs], [pair.theirs for pair in pairs]
    our_turns, their_turns = _turns(our_files, phase), _turns(their_files, phase)
    if not (our_turns and their_turns):
        return []
    ours, theirs = _parts(our_files, phase), _parts(their_files, phase)
    found = []
    for part in dict.fromkeys([*theirs, *ours]):
        one, other = _every(ours.get(part, {}), our_turns), _every(theirs.get(part, {}), their_turns)
        here, there = _medians(one), _medians(other)
        found.append(
            PartMatch(
                dataset=dataset,
                reference=reference,
                phase=phase,
                **part._asdict(),
                busy_us=here.busy_us,
                reference_busy_us=there.busy_us,
                total_us=here.total_us,
                reference_total_us=there.total_us,
                num_events=here.num_events,
                reference_num_events=there.num_events,
                apart=_apart(_busy_by_iteration(one), _busy_by_iteration(other)),
            )
        )
    return sorted(found, key=lambda part: (part.by, -abs(part.difference_us)))


def _turns(files: Sequence[TraceFile], phase: str) -> list[_Turn]:
    """Those that have the phase and are no start-up."""
    steady = [(number, row) for number, file in enumerate(files) for row in file.steady_rows]
    return [(number, row.iteration) for number, row in steady if row.phase == phase]


def _parts(files: Sequence[TraceFile], phase: str) -> dict[_Part, dict[_Turn, _Values]]:
    found: dict[_Part, dict[_Turn, _Values]] = defaultdict(dict)
    for number, file in enumerate(files):
        for row in file.steady_parts:
            if row.phase == phase:
                # What a stream carries may change; it is the same stream all the same.
                what = ("", "") if row.by == "stream" else (row.kind, row.library)
                values = found[_Part(row.by, *what, row.name)]
                so_far = values.get((number, row.iteration), _Values())
                values[number, row.iteration] = _Values(
                    so_far.busy_us + row.busy_us, so_far.total_us + row.total_us, so_far.num_events + row.num_events
                )
    return found


def _every(values: Mapping[_Turn, _Values], turns: Iterable[_Turn]) -> dict[_Turn, _Values]:
    return {turn: values.get(turn, _Values()) for turn in turns}


def _medians(values: Mapping[_Turn, _Values]) -> _Values:
    """Over the iterations of each trace, and then over the traces."""
    of_trace: dict[int, list[_Values]] = defaultdict(list)
    for (number, _), of_turn in values.items():
        of_trace[number].append(of_turn)
    each = [[median(column) for column in zip(*rows, strict=True)] for rows in of_trace.values()]
    return _Values(*(median(column) for column in zip(*each, strict=True)))


def _busy_by_iteration(values: Mapping[_Turn, _Values]) -> list[float]:
    """The median over the traces, by their first, second, ... iteration: these need not have the same numbers."""
    of_trace: dict[int, list[float]] = defaultdict(list)
    for (number, _), of_turn in sorted(values.items()):
        of_trace[number].append(of_turn.busy_us)
    longest = max(map(len, of_trace.values()))
    return [median(of[turn] for of in of_trace.values() if turn < len(of)) for turn in range(longest)]


def _apart(one: Collection[float], other: Collection[float]) -> bool:
    return min(one) > max(other) or max(one) < min(other)
