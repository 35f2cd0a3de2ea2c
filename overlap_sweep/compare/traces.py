"""Traces against each other: every quantity of every phase, and which kernels got slower, appeared or disappeared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

from overlap_sweep.compare.ratios import ratio
from overlap_sweep.compare.trace_pairs import Pair, TraceDataset, pairs_of
from overlap_sweep.compare.trace_parts import PartMatch, compare_parts
from overlap_sweep.trace.files import TraceFile
from overlap_sweep.trace.overlap import Overlap, PhaseSummary, summarise

PHASES = ("fwd", "bwd", "recompute", "all")
QUANTITIES = Overlap.__struct_fields__
"""Microseconds, a ratio, and numbers of events."""


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

    @property
    def candidates(self) -> list[str]:
        """The labels of all but the reference."""
        return [dataset.label for dataset in self.datasets if dataset.label != self.reference]


def compare_traces(datasets: Sequence[TraceDataset], reference: str) -> TraceComparison:
    """`reference` is the label of one of them. UserError where no rank is in both."""
    base = next(dataset for dataset in datasets if dataset.label == reference)
    pairs, unmatched = {}, []
    for dataset in datasets:
        if dataset is not base:
            pairs[dataset.label], missing = pairs_of(dataset, base)
            unmatched += missing
    return TraceComparison(
        datasets=list(datasets),
        reference=reference,
        pairs=pairs,
        unmatched=unmatched,
        quantities=[match for label, of_one in pairs.items() for match in _quantities(label, reference, of_one)],
        parts=[
            part
            for label, of_one in pairs.items()
            for phase in PHASES
            for part in compare_parts(label, reference, of_one, phase)
        ],
        problems=[problem for dataset in datasets for problem in dataset.problems],
        warnings=[warning for dataset in datasets for warning in dataset.warnings],
    )


def own_medians(dataset: TraceDataset) -> dict[str, dict[str, float | None]]:
    """By phase and quantity: over the iterations, and over all ranks of the dataset, whether matched or not."""
    summaries = [_summaries(file) for file in dataset.files]
    return {
        phase: {name: _over_ranks(getattr(s[phase], name) for s in summaries if phase in s) for name in QUANTITIES}
        for phase in PHASES
        if any(phase in of_file for of_file in summaries)
    }


def _quantities(dataset: str, reference: str, pairs: Sequence[Pair]) -> list[QuantityMatch]:
    both = [(pair.rank, _summaries(pair.ours), _summaries(pair.theirs)) for pair in pairs]
    found = []
    for phase in PHASES:
        of_phase = [(rank, a[phase], b[phase]) for rank, a, b in both if phase in a and phase in b]
        if not of_phase:
            continue
        for name in QUANTITIES:
            value = _over_ranks(getattr(ours, name) for _, ours, _ in of_phase)
            other = _over_ranks(getattr(theirs, name) for _, _, theirs in of_phase)
            found.append(QuantityMatch(dataset, reference, None, phase, name, value, other))
        found += [
            QuantityMatch(dataset, reference, rank, phase, name, getattr(ours, name), getattr(theirs, name))
            for rank, ours, theirs in of_phase
            for name in QUANTITIES
            if rank is not None
        ]
    return found


def _summaries(file: TraceFile) -> dict[str, PhaseSummary]:
    return {summary.phase: summary for summary in summarise(file.steady_rows)}


def _over_ranks(values: Iterable[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return median_low(known) if isinstance(known[0], int) else median(known)
