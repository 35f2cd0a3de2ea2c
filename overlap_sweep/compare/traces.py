"""Traces against each other: those of the same rank, every quantity of every phase, and which kernels got slower,
appeared or disappeared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import add
from pathlib import Path
from statistics import median, median_low
from typing import Any, Literal, NamedTuple

from overlap_sweep.errors import UserError
from overlap_sweep.results.verdict import ratio
from overlap_sweep.trace import Grouping, Overlap, PhaseSummary, summarise
from overlap_sweep.trace.files import TraceFile, of_startup, read_trace_files

PHASES = ("fwd", "bwd", "recompute", "all")
QUANTITIES = Overlap.__struct_fields__
"""Microseconds, a ratio, and numbers of events."""

Change = Literal["faster", "slower", "same", "appeared", "disappeared"]


@dataclass(frozen=True)
class TraceDataset:
    """One operand, read: the traces of one run, one per rank."""

    label: str
    path: Path
    files: list[TraceFile]
    """Those that could be analysed."""
    problems: list[str]
    warnings: list[str]

    @property
    def ranks(self) -> dict[int, TraceFile]:
        """The traces by rank; empty unless they tell which of them is whose."""
        found = {file.rank: file for file in self.files if file.rank is not None}
        return found if len(found) == len(self.files) else {}


@dataclass(frozen=True)
class Pair:
    """One trace beside the reference's of the same rank."""

    rank: int | None
    """Of both; None where they are matched by their order, or only one of each is there."""
    ours: TraceFile
    theirs: TraceFile


@dataclass(frozen=True)
class QuantityMatch:
    """One quantity of one phase: of one rank, or over all ranks that both have."""

    dataset: str
    reference: str
    rank: int | None
    """None for the median over the ranks."""
    phase: str
    quantity: str
    value: float | None
    """The median over the iterations, and over the ranks; None where it is undefined."""
    reference_value: float | None

    @property
    def difference(self) -> float:
        """NaN where either is undefined."""
        if self.value is None or self.reference_value is None:
            return math.nan
        return self.value - self.reference_value

    @property
    def ratio(self) -> float:
        """NaN where it is undefined."""
        return ratio(self.value, self.reference_value)


class Busy(NamedTuple):
    """What a part took: medians over the iterations but start-up, and over the ranks; an iteration without it counts
    0."""

    busy_us: float
    """The union of its spans."""
    total_us: float
    """The sum of its spans."""
    num_events: float


@dataclass(frozen=True)
class PartMatch:
    """A class of kernels, a kernel or a stream."""

    dataset: str
    reference: str
    phase: str
    by: Grouping
    kind: str
    library: str
    name: str
    ours: Busy
    theirs: Busy
    apart: bool
    """Whether every iteration's busy time in the one is longer than every iteration's in the other."""

    @property
    def difference_us(self) -> float:
        return self.ours.busy_us - self.theirs.busy_us

    @property
    def ratio(self) -> float:
        """NaN where it appeared."""
        return ratio(self.ours.busy_us, self.theirs.busy_us)

    @property
    def change(self) -> Change:
        """`same` where the iterations of both overlap."""
        if not self.theirs.num_events and self.ours.num_events:
            return "appeared"
        if not self.ours.num_events and self.theirs.num_events:
            return "disappeared"
        if not self.apart or not self.difference_us:
            return "same"
        return "slower" if self.difference_us > 0 else "faster"


@dataclass(frozen=True)
class TraceComparison:
    """All that is known about traces beside each other."""

    datasets: list[TraceDataset]
    reference: str
    pairs: dict[str, list[Pair]]
    """By dataset, of all but the reference."""
    unmatched: list[str]
    """A sentence for each dataset that has ranks which the reference has not, or the other way round."""
    quantities: list[QuantityMatch]
    """By dataset and phase, first over the ranks and then of each rank."""
    parts: list[PartMatch]
    """By dataset, phase and grouping, the largest difference first."""
    problems: list[str]
    warnings: list[str]


def read_trace_dataset(label: str, path: Path, files: Sequence[Path]) -> TraceDataset:
    """Reads the traces, those of `path`. UserError when none can be analysed."""
    read = read_trace_files(files)
    problems = [file.problem for file in read if file.problem]
    good = sorted((f for f in read if not f.problem), key=lambda file: (file.rank is None, file.rank or 0))
    if not good:
        raise UserError(problems[0] if problems else f"{path} holds no traces; give files of torch.profiler.")
    warnings = [*(warning for file in good for warning in file.warnings), *of_startup(good)]
    return TraceDataset(label, path, good, problems, warnings)


def compare_traces(datasets: Sequence[TraceDataset], reference: str) -> TraceComparison:
    """`reference` is the label of one of them. UserError where no rank is in both."""
    base = next(dataset for dataset in datasets if dataset.label == reference)
    others = [dataset for dataset in datasets if dataset is not base]
    pairs = {other.label: _pairs(other, base) for other in others}
    return TraceComparison(
        datasets=list(datasets),
        reference=reference,
        pairs=pairs,
        unmatched=[said for other in others for said in _unmatched(other, base)],
        quantities=[match for label, of_one in pairs.items() for match in _quantities(label, reference, of_one)],
        parts=[
            part
            for label, of_one in pairs.items()
            for phase in PHASES
            for part in _parts(label, reference, of_one, phase)
        ],
        problems=[problem for dataset in datasets for problem in dataset.problems],
        warnings=[warning for dataset in datasets for warning in dataset.warnings],
    )


def own_medians(dataset: TraceDataset) -> dict[str, dict[str, float | None]]:
    """Returns by phase and quantity the median over the iterations, and over all ranks of the dataset, whether matched
    or not."""
    summaries = [_summaries(file) for file in dataset.files]
    return {
        phase: {name: _over_ranks(getattr(s[phase], name) for s in summaries if phase in s) for name in QUANTITIES}
        for phase in PHASES
        if any(phase in of_file for of_file in summaries)
    }


def _pairs(dataset: TraceDataset, base: TraceDataset) -> list[Pair]:
    """By rank, where both tell them; one trace of each is a pair whosever they are. UserError where no rank is in
    both."""
    if len(dataset.files) == len(base.files) == 1:
        (one,), (other,) = dataset.files, base.files
        return [Pair(one.rank if one.rank == other.rank else None, one, other)]
    if not (dataset.ranks and base.ranks):
        return [Pair(None, one, other) for one, other in zip(dataset.files, base.files, strict=False)]
    common = sorted(dataset.ranks.keys() & base.ranks.keys())
    if not common:
        raise UserError(
            f"{dataset.label} has traces of {_named(dataset.ranks)}, {base.label} of {_named(base.ranks)}: no rank is "
            "in both; compare one file with one."
        )
    return [Pair(rank, dataset.ranks[rank], base.ranks[rank]) for rank in common]


def _unmatched(dataset: TraceDataset, base: TraceDataset) -> Iterator[str]:
    """A sentence for each of the two that has more."""
    if len(dataset.files) == len(base.files) == 1:
        return
    if not (dataset.ranks and base.ranks):
        if len(dataset.files) != len(base.files):
            yield (
                f"{dataset.label} has {len(dataset.files)} traces, {base.label} {len(base.files)}: they don't tell "
                "their ranks and are matched by their order."
            )
        return
    for one, other in ((base, dataset), (dataset, base)):
        if only := one.ranks.keys() - other.ranks.keys():
            yield f"{one.label} has traces of {_named(only)}, {other.label} has not: left out."


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _quantities(dataset: str, reference: str, pairs: Sequence[Pair]) -> Iterator[QuantityMatch]:
    both = [(pair.rank, _summaries(pair.ours), _summaries(pair.theirs)) for pair in pairs]
    for phase in PHASES:
        of_phase = [(rank, a[phase], b[phase]) for rank, a, b in both if phase in a and phase in b]
        if not of_phase:
            continue
        for name in QUANTITIES:
            value = _over_ranks(getattr(ours, name) for _, ours, _ in of_phase)
            other = _over_ranks(getattr(theirs, name) for _, _, theirs in of_phase)
            yield QuantityMatch(dataset, reference, None, phase, name, value, other)
        for rank, ours, theirs in of_phase:
            for name in QUANTITIES if rank is not None else ():
                yield QuantityMatch(dataset, reference, rank, phase, name, getattr(ours, name), getattr(theirs, name))


def _summaries(file: TraceFile) -> dict[str, PhaseSummary]:
    return {summary.phase: summary for summary in summarise(file.steady_rows)}


def _over_ranks(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return median_low(known) if isinstance(known[0], int) else median(known)


class _Part(NamedTuple):
    by: Grouping
    kind: str
    library: str
    name: str


_Iterations = dict[int, Busy]
"""Of one trace, by iteration."""


def _parts(dataset: str, reference: str, pairs: Sequence[Pair], phase: str) -> list[PartMatch]:
    """Of one phase, by grouping, the largest difference first; none where only one of the two has the phase."""
    ours, theirs = _of_phase([pair.ours for pair in pairs], phase), _of_phase([pair.theirs for pair in pairs], phase)
    found = []
    for part in dict.fromkeys([*theirs.parts, *ours.parts]) if ours.nothing and theirs.nothing else ():
        one, other = ours.parts.get(part, ours.nothing), theirs.parts.get(part, theirs.nothing)
        apart = _apart(_busy_by_turn(one), _busy_by_turn(other))
        found.append(PartMatch(dataset, reference, phase, *part, _medians(one), _medians(other), apart))
    return sorted(found, key=lambda part: (part.by, -abs(part.difference_us)))


class _OfPhase(NamedTuple):
    parts: dict[_Part, list[_Iterations]]
    """By part of each trace that has the phase its iterations but start-up."""
    nothing: list[_Iterations]
    """What a part has that is in no trace."""


def _of_phase(files: Sequence[TraceFile], phase: str) -> _OfPhase:
    iterations = [[row.iteration for row in file.steady_rows if row.phase == phase] for file in files]
    nothing: list[_Iterations] = [dict.fromkeys(of_file, Busy(0.0, 0.0, 0)) for of_file in iterations]
    found: dict[_Part, list[_Iterations]] = defaultdict(lambda: [dict(of_file) for of_file in nothing])
    for number, file in enumerate(files):
        for row in file.steady_parts:
            if row.phase == phase and row.iteration in nothing[number]:
                # What a stream carries may change; it is the same stream all the same.
                what = ("", "") if row.by == "stream" else (row.kind, row.library)
                values = found[_Part(row.by, *what, row.name)][number]
                sums = map(add, values[row.iteration], (row.busy_us, row.total_us, row.num_events))
                values[row.iteration] = Busy(*sums)
    parts = {part: [of_file for of_file in of_part if of_file] for part, of_part in found.items()}
    return _OfPhase(parts, [of_file for of_file in nothing if of_file])


def _medians(traces: Iterable[_Iterations]) -> Busy:
    """Over the iterations of each trace, and then over the traces."""
    each = [[median(column) for column in zip(*of_trace.values(), strict=True)] for of_trace in traces]
    return Busy(*(median(column) for column in zip(*each, strict=True)))


def _busy_by_turn(traces: Iterable[_Iterations]) -> list[float]:
    """The median over the traces, by their first, second, ... iteration: these need not have the same numbers."""
    busy_us = [[of_trace[iteration].busy_us for iteration in sorted(of_trace)] for of_trace in traces]
    return [median(time for time in turn if time is not None) for turn in zip_longest(*busy_us)]


def _apart(one: Sequence[float], other: Sequence[float]) -> bool:
    return min(one) > max(other) or max(one) < min(other)
