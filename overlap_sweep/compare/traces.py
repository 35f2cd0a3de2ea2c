"""Compares traces rank by rank: quantities of every phase, and kernels that got slower, appeared or disappeared. Two
ranks of one run are recognised, since the one that waits for the other is not slower."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import TYPE_CHECKING, Literal, NamedTuple

from overlap_sweep.errors import UserError
from overlap_sweep.report.comparison import Change as Ratio
from overlap_sweep.report.comparison import mean_change
from overlap_sweep.results.estimate import estimate
from overlap_sweep.results.verdict import ratio
from overlap_sweep.trace import Grouping, Overlap, PhaseSummary, summarise
from overlap_sweep.trace.files import TraceFile, read_trace_files, runs_of

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

PHASES = ("fwd", "bwd", "recompute", "all")

COMPUTING = ("gemm", "compute")

Change = Literal["faster", "slower", "same", "appeared", "disappeared", "waits", "awaited"]


@dataclass(frozen=True)
class TraceDataset:
    """The traces of one operand: one run, one trace per rank."""

    label: str
    path: Path
    files: list[TraceFile]
    """The traces that could be analysed."""
    problems: list[str]

    @property
    def ranks(self) -> dict[int, TraceFile]:
        """Returns the traces by rank; empty unless every trace's rank is known."""
        found = {file.rank: file for file in self.files if file.rank is not None}
        return found if len(found) == len(self.files) else {}


class Pair(NamedTuple):
    """A trace and the reference's trace of the same rank."""

    rank: int | None
    """The rank of both traces; None where the traces of a single pair have different ranks."""
    ours: TraceFile
    theirs: TraceFile


@dataclass(frozen=True)
class Match:
    """A value of a dataset and of the reference: a median over the iterations, and over the ranks."""

    dataset: str
    reference: str
    phase: str
    value: float | None
    """None where it is undefined."""
    reference_value: float | None

    @property
    def difference(self) -> float:
        """Returns the difference; NaN where either is undefined."""
        if self.value is None or self.reference_value is None:
            return math.nan
        return self.value - self.reference_value

    @property
    def ratio(self) -> float:
        """Returns the ratio; NaN where it is undefined."""
        return ratio(self.value, self.reference_value)


@dataclass(frozen=True)
class QuantityMatch(Match):
    """One quantity of one phase."""

    rank: int | None
    """None for the median over the ranks in common."""
    quantity: str
    noise: float
    """Half-width of the logarithm of the ratio's confidence interval; NaN if it is unknown."""

    @property
    def ratio_ends(self) -> tuple[float, float]:
        return Ratio(self.ratio, self.noise).ends

    @property
    def change(self) -> Literal["higher", "lower", "same", "unknown"]:
        """Returns whether the value differs beyond the noise; of counts, which have none, whether it differs."""
        if self.difference == 0:
            return "same"
        if not self.quantity.startswith("num_"):
            if math.isnan(self.noise):
                return "unknown"
            if self.ratio > 0 and not Ratio(self.ratio, self.noise).differs:
                return "same"
        return "higher" if self.difference > 0 else "lower"


@dataclass(frozen=True)
class PartMatch(Match):
    """Busy time of a kernel class, kernel or stream in microseconds, the length of the union of its spans: median over
    the ranks, then over the iterations without start-up. A rank or iteration that lacks it counts 0."""

    by: Grouping
    kind: str
    library: str
    name: str
    num_events: float
    reference_num_events: float
    change: Change
    """`same` where the ranges of the iterations' times overlap. Communication that takes longer on one rank of a run
    than on another `waits` for that one, which is `awaited`."""


@dataclass(frozen=True)
class TraceComparison:
    """The whole comparison of two or more traces."""

    datasets: list[TraceDataset]
    reference: str
    pairs: dict[str, list[Pair]]
    """Pairs by dataset; the reference has none."""
    unmatched: list[str]
    """A sentence for each dataset with ranks that the other one lacks."""
    quantities: list[QuantityMatch]
    """By dataset and phase, first over the ranks and then of each rank."""
    parts: list[PartMatch]
    """By dataset, phase and grouping, the largest difference first."""

    @property
    def one_run(self) -> set[str]:
        """Returns the datasets that are another rank of the reference's run."""
        return {label for label, pairs in self.pairs.items() if are_ranks_of_one_run(pairs)}

    def quantities_by(self, by: str) -> list[QuantityMatch]:
        """Returns those of each rank with by="rank", else those over the ranks."""
        return [match for match in self.quantities if (match.rank is not None) == (by == "rank")]

    def parts_by(self, by: str) -> list[PartMatch]:
        return [part for part in self.parts if part.by == by]


def read_trace_dataset(label: str, path: Path, files: Sequence[Path]) -> TraceDataset:
    """Reads the traces of `path`. UserError when none can be analysed."""
    read = read_trace_files(files)
    problems = [file.problem for file in read if file.problem]
    if len(problems) == len(read):
        raise UserError(problems[0])
    good = sorted((f for f in read if not f.problem), key=lambda file: (file.rank is None, file.rank or 0))
    return TraceDataset(label, path, good, problems)


def compare_traces(datasets: Sequence[TraceDataset], reference: str) -> TraceComparison:
    """Returns the comparison; `reference` is the label of one dataset. UserError where no rank is in common."""
    base = next(dataset for dataset in datasets if dataset.label == reference)
    others = [dataset for dataset in datasets if dataset is not base]
    pairs = {other.label: _pairs(other, base) for other in others}
    return TraceComparison(
        datasets=list(datasets),
        reference=reference,
        pairs=pairs,
        unmatched=[
            f"Left out: ranks {', '.join(map(str, only))}, which {one.label} has and {another.label} has not."
            for other in others
            for one, another in ((base, other), (other, base))
            if (only := sorted(one.ranks.keys() - another.ranks.keys())) and len(one.files) > 1
        ],
        quantities=[match for label, found in pairs.items() for match in _quantities(label, reference, found)],
        parts=[
            part
            for label, found in pairs.items()
            for phase in PHASES
            for part in _parts(label, reference, found, phase)
        ],
    )


def _pairs(dataset: TraceDataset, base: TraceDataset) -> list[Pair]:
    """Returns the pairs by rank; two single traces always make a pair. UserError where no rank is in common."""
    if len(dataset.files) == len(base.files) == 1:
        (one,), (other,) = dataset.files, base.files
        return [Pair(one.rank if one.rank == other.rank else None, one, other)]
    common = sorted(dataset.ranks.keys() & base.ranks.keys())
    if not common:
        found = (f"{one.label} has {sorted(one.ranks) or 'unknown ranks'}" for one in (dataset, base))
        raise UserError(f"No rank in common: {', '.join(found)}; compare one file with one file.")
    return [Pair(rank, dataset.ranks[rank], base.ranks[rank]) for rank in common]


def are_ranks_of_one_run(pairs: Sequence[Pair]) -> bool:
    """Returns whether it is a single pair, of two ranks whose traces have one name but for the rank."""
    if len(pairs) != 1 or pairs[0].rank is not None:
        return False
    ours, theirs = pairs[0].ours, pairs[0].theirs
    runs = runs_of([ours, theirs])
    return [len(by_rank) for by_rank in runs.values()] == [2] and ours.world_size == theirs.world_size


def _quantities(dataset: str, reference: str, pairs: Sequence[Pair]) -> Iterator[QuantityMatch]:
    for phase in PHASES:
        # By rank, and first over all ranks.
        members: dict[int | None, list[tuple[Pair, list[PhaseSummary]]]] = {None: []}
        for pair in pairs:
            rows = [
                row for file in (pair.ours, pair.theirs) for row in summarise(file.steady_rows) if row.phase == phase
            ]
            if len(rows) == 2:
                members[None].append((pair, rows))
                members[pair.rank] = members[None] if pair.rank is None else [(pair, rows)]
        for rank, summaries in members.items() if members[None] else ():
            for name in Overlap.__struct_fields__:
                value, other = (_median(getattr(both[i], name) for _, both in summaries) for i in (0, 1))
                noise = _noise([pair for pair, _ in summaries], phase, name)
                yield QuantityMatch(dataset, reference, phase, value, other, rank, name, noise)


def _noise(pairs: Sequence[Pair], phase: str, quantity: str) -> float:
    """Returns the noise of the ratio, by what the iterations differ by."""
    sides = ([pair.ours for pair in pairs], [pair.theirs for pair in pairs])
    ours, theirs = (by_iteration(files, phase, quantity) for files in sides)
    if not ours or not theirs:
        return math.nan
    if not median(ours) or not median(theirs):
        # A ratio to nothing has no noise, if no iteration of either side is as one of the other.
        return 0.0 if max(ours) < min(theirs) or max(theirs) < min(ours) else math.nan
    return mean_change([[(estimate(ours), estimate(theirs))]]).noise


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return median_low(known) if isinstance(known[0], int) else median(known)


_Part = tuple[Grouping, str, str, str]


def _parts(dataset: str, reference: str, pairs: Sequence[Pair], phase: str) -> list[PartMatch]:
    """Returns a phase's parts by grouping, the largest difference first; none where only one of the two has it."""
    import numpy as np

    ours, theirs = _by_turn([pair.ours for pair in pairs], phase), _by_turn([pair.theirs for pair in pairs], phase)
    found, is_one_run = [], are_ranks_of_one_run(pairs)
    for part in dict.fromkeys([*theirs, *ours]) if ours and theirs else ():
        # A part that is in no trace took no time.
        one, other = (side[part] if part in side else next(iter(side.values())) * 0 for side in (ours, theirs))
        (busy_us, count), (other_us, other_count) = (map(float, np.median(turns, axis=0)) for turns in (one, other))
        change = _change(one, other)
        if is_one_run and part[1] in ("comm", "wait") and count == other_count:
            change = {"slower": "waits", "faster": "awaited"}.get(change, change)  # type: ignore[assignment]
        found.append(PartMatch(dataset, reference, phase, busy_us, other_us, *part, count, other_count, change))
    return sorted(found, key=lambda part: (part.by, -abs(part.difference)))


def _by_turn(files: Sequence[TraceFile], phase: str) -> dict[_Part, NDArray[float64]]:
    """Returns busy time and number of events of each part in the first, second, ... iteration of the traces [turns, 2],
    medians over the traces that have that iteration; iteration numbers may differ between traces."""
    import numpy as np

    iterations = [sorted({row.iteration for row in file.steady_rows if row.phase == phase}) for file in files]
    nothing = np.full((len(files), max(map(len, iterations)), 2), np.nan)
    for number, of_file in enumerate(iterations):
        nothing[number, : len(of_file)] = 0.0
    found: dict[_Part, NDArray[float64]] = defaultdict(nothing.copy)
    for number, file in enumerate(files):
        for row in (row for row in file.steady_parts if row.phase == phase):
            # A stream is identified by its name alone: the kernels on it may change.
            kind_and_library = ("", "") if row.by == "stream" else (row.kind, row.library)
            turn = iterations[number].index(row.iteration)
            found[row.by, *kind_and_library, row.name][number, turn] += (row.busy_us, row.num_events)
    return {part: np.nanmedian(values, axis=0) for part, values in found.items()}


def _change(ours: NDArray[float64], theirs: NDArray[float64]) -> Change:
    if not theirs.any() and ours.any():
        return "appeared"
    if not ours.any() and theirs.any():
        return "disappeared"
    if ours[:, 0].min() > theirs[:, 0].max():
        return "slower"
    return "faster" if ours[:, 0].max() < theirs[:, 0].min() else "same"


def by_iteration(files: Sequence[TraceFile], phase: str, quantity: str) -> list[float]:
    """Returns a quantity of the first, second, ... iteration, each the median over the ranks that have it."""
    each = [
        [value for row in file.steady_rows if row.phase == phase if (value := getattr(row, quantity)) is not None]
        for file in files
    ]
    return [median(own[turn] for own in each if turn < len(own)) for turn in range(max(map(len, each), default=0))]


def computation_us(files: Sequence[TraceFile]) -> list[float]:
    """Returns how long kernels compute in the first, second, ... iteration, next to communication or not."""
    by_turn = _by_turn(files, "all").items()
    computing = [values[:, 0] for (by, kind, *_), values in by_turn if by == "class" and kind in COMPUTING]
    return list(map(sum, zip(*(each.tolist() for each in computing), strict=True)))


def computing_kernels(compared: TraceComparison, dataset: str) -> list[PartMatch]:
    """Returns the kernels that compute in a whole iteration, the largest difference first."""
    return [
        part
        for part in compared.parts_by("kernel")
        if part.dataset == dataset and part.phase == "all" and part.kind in COMPUTING
    ]


def shared_computation(kernels: Sequence[PartMatch]) -> tuple[float, float]:
    """Returns the share of the computation that is in kernels as often as both run them, and how many times as long
    those take: of GEMMs or of other kernels, whichever share more, since overlap may split GEMMs. NaN where nothing
    computes."""
    by_kind = [_shared([one for one in kernels if one.kind == kind]) for kind in COMPUTING]
    return max((one for one in by_kind if not math.isnan(one[0])), default=(math.nan, math.nan))


def _shared(kernels: Sequence[PartMatch]) -> tuple[float, float]:
    common_us = whole_us = ours_us = theirs_us = 0.0
    for one in kernels:
        runs, other_runs = one.num_events, one.reference_num_events
        own_us, other_us = one.value or 0.0, one.reference_value or 0.0
        fewer, each_us = min(runs, other_runs), (own_us + other_us) / max(runs + other_runs, 1.0)
        common_us += each_us * fewer
        whole_us += each_us * max(runs, other_runs)
        if fewer:
            ours_us += own_us / runs * fewer
            theirs_us += other_us / other_runs * fewer
    return ratio(common_us, whole_us), ratio(ours_us, theirs_us)
