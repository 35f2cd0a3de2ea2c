"""Sweeps' comparisons for JSON: each dataset's sums, how they relate, and what else changed."""

from __future__ import annotations

from typing import Any

from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.compare.ratios import ratio
from overlap_sweep.compare.sweeps import SweepComparison
from overlap_sweep.compare.totals import Aggregate, Totals


def summary(comparison: SweepComparison) -> dict[str, Any]:
    """NaN where something is undefined."""
    base = next(totals for totals in comparison.totals if totals.label == comparison.reference)
    return {
        "kind": "sweeps",
        "reference": comparison.reference,
        "datasets": {
            dataset.label: _dataset(dataset, totals, base)
            for dataset, totals in zip(comparison.datasets, comparison.totals, strict=True)
        },
        "compared": comparison.compared,
        "aggregates": [_aggregate(aggregate) for aggregate in comparison.aggregates],
        "deviations": comparison.deviations,
        "environment": {difference.name: difference.values for difference in comparison.environment},
        "configuration": {difference.name: difference.values for difference in comparison.configuration},
        "unmatched": [
            {"only_in": found.only_in, "missing_in": found.missing_in, "points": found.names}
            for found in comparison.unmatched
        ],
    }


def _dataset(dataset: Dataset, totals: Totals, base: Totals) -> dict[str, Any]:
    return {
        "path": str(dataset.path),
        "points": len(dataset.points),
        **dataset.counts(),
        "common_passes": totals.passes,
        "best_us": totals.best_us,
        "none_us": totals.none_us,
        "floor_us": totals.floor_us,
        "speedup": totals.speedup,
        "hidden_fraction": totals.hidden_fraction,
        "ratios": {
            "best": ratio(totals.best_us, base.best_us),
            "none": ratio(totals.none_us, base.none_us),
            "floor": ratio(totals.floor_us, base.floor_us),
        },
        "proofs": [f"TP={outcome.tp_size}: {outcome.verdict}" for outcome in dataset.outcomes],
    }


def _aggregate(aggregate: Aggregate) -> dict[str, Any]:
    return {
        "dataset": aggregate.dataset,
        "case": aggregate.case,
        "tp_size": aggregate.tp_size,
        "operator": aggregate.operator,
        "pass": aggregate.pass_name,
        "points": aggregate.points,
        **aggregate.counts,
        "ratio": aggregate.ratio,
        "best_ratio": aggregate.best_ratio,
        "none_ratio": aggregate.none_ratio,
        "floor_ratio": aggregate.floor_ratio,
    }
