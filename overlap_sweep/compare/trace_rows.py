"""Traces' comparisons as tables and for JSON."""

from __future__ import annotations

from typing import Any

from overlap_sweep.compare.traces import TraceComparison, own_medians
from overlap_sweep.report.frame import Row, column_types
from overlap_sweep.trace.overlap import Grouping

_WHO = ("dataset", "reference")

QUANTITY_COLUMNS = {
    **column_types(*_WHO, "rank", "phase", "quantity", "value", "reference_value", "difference", "ratio"),
    **dict.fromkeys((*_WHO, "quantity"), "string"),
    "rank": "Int64",
}
"""One row per quantity, phase and dataset, of each rank or over the ranks. Times are microseconds."""

PART_COLUMNS = {
    **column_types(*_WHO, "phase", "by", "kind", "library", "name", "busy_us", "reference_busy_us", "difference_us"),
    **column_types("ratio", "change", "total_us", "reference_total_us", "num_events", "reference_num_events"),
    **dict.fromkeys((*_WHO, "by", "kind", "library", "name", "change"), "string"),
}
"""One row per class of kernels, kernel or stream, phase and dataset."""


def quantity_rows(comparison: TraceComparison, by_rank: bool = False) -> list[Row]:
    """With exactly the keys of QUANTITY_COLUMNS: of each rank that is known, or over the ranks."""
    return [
        {name: getattr(match, name) for name in QUANTITY_COLUMNS}
        for match in comparison.quantities
        if (match.rank is not None) == by_rank
    ]


def part_rows(comparison: TraceComparison, by: Grouping) -> list[Row]:
    """With exactly the keys of PART_COLUMNS."""
    return [{name: getattr(part, name) for name in PART_COLUMNS} for part in comparison.parts if part.by == by]


def trace_summary(comparison: TraceComparison) -> dict[str, Any]:
    """Each dataset's medians by phase, and how they relate. NaN where something is undefined."""
    datasets: dict[str, Any] = {
        dataset.label: {
            "path": str(dataset.path),
            "files": [str(file.path) for file in dataset.files],
            "ranks": [file.rank for file in dataset.files],
            "iterations": max(len({row.iteration for row in file.steady_rows}) for file in dataset.files),
            "startup_iterations": max(len(file.startup) for file in dataset.files),
            "phases": own_medians(dataset),
            "ratios": {},
        }
        for dataset in comparison.datasets
    }
    for match in comparison.quantities:
        if match.rank is None:
            datasets[match.dataset]["ratios"].setdefault(match.phase, {})[match.quantity] = match.ratio
    return {
        "kind": "traces",
        "reference": comparison.reference,
        "datasets": datasets,
        "classes": [
            {**{name: getattr(part, name) for name in PART_COLUMNS}, "iterations_apart": part.apart}
            for part in comparison.parts
            if part.by == "class"
        ],
        "unmatched": comparison.unmatched,
    }
