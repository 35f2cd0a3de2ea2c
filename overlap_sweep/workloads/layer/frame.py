"""The tidy table of layers: one row per layer point and variant, every column always there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from overlap_sweep.report.frame import Row, column_types, common_cells
from overlap_sweep.results.estimate import CONFIDENCE
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.layer.answer import LayerAnalysis, VariantRow
from overlap_sweep.workloads.layer.result import attention_backend

COLUMNS = column_types(
    *("point", "directory", "model", "backend", "device", "precision", "tokens"),
    *("kind", "tp_size", "num_replicas", "training", "attention_backend", "status", "error"),
    *("variant", "fwd_us", "bwd_us", "step_us", "all_us", "rounds"),
    *("reference", "ratio", "ratio_low", "ratio_high", "coverage", "differs"),
    *("hidden_fraction", "launch_bound", "relative_error"),
)
"""Every column in its order, and its pandas type. Times are medians in microseconds.

ratio is the median over the rounds of all_us over the reference's of the same round, below 1 is faster; ratio_low and
ratio_high are its confidence interval, coverage the confidence; differs: the interval excludes 1.
"""


def layer_rows(points: Iterable[Point], analyses: Iterable[LayerAnalysis], root: Path) -> list[Row]:
    """One dictionary per layer point and variant; of a point that is not ok a single one, without a variant."""
    analysis_of = {analysis.point.directory: analysis for analysis in analyses}
    rows = []
    for point in points:
        if point.is_layer:
            common = point_cells(point, root)
            analysis = analysis_of.get(point.directory)
            rows += [common | variant_cells(row, analysis) for row in analysis.rows] if analysis else [common]
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def point_cells(point: Point, root: Path) -> Row:
    """The columns that are the same for all variants."""
    layer = point.config["layer"]
    return {
        **common_cells(point, root),
        "kind": layer["kind"],
        "num_replicas": layer["num_replicas"],
        "training": layer["training"],
        "attention_backend": attention_backend(point.result),
    }


def variant_cells(row: VariantRow, analysis: LayerAnalysis) -> Row:
    """The other columns."""
    return {
        "variant": row.name,
        "fwd_us": row.fwd_us,
        "bwd_us": row.bwd_us,
        "step_us": row.step_us,
        "all_us": row.all_us,
        "rounds": analysis.rounds,
        "reference": analysis.reference,
        "ratio": row.ratio,
        "ratio_low": row.interval.low,
        "ratio_high": row.interval.high,
        "coverage": CONFIDENCE,
        "differs": row.differs,
        "hidden_fraction": row.hidden_fraction,
        "launch_bound": row.launch_bound,
        "relative_error": row.relative_error,
    }
