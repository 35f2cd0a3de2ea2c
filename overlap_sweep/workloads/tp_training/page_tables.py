"""Tensor-parallel stacks as tables of the page: what was compared, and every point as it was measured."""

from __future__ import annotations

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.report.frame import Row
from overlap_sweep.report.numbers import as_loss, as_ms, as_percent
from overlap_sweep.report.page.tables import BEYOND, Cell, PageTable, first_line, number
from overlap_sweep.workloads.tp_training.answer import TpTrainingAnalysis
from overlap_sweep.workloads.tp_training.frame import row_cells
from overlap_sweep.workloads.tp_training.section import note

_TIMES = ("step ms", "noise ms")
_PARTS = ("fwd %", "bwd %", "opt %", "other %")
_RATES = ("tokens/s", "tokens/s/GPU", "samples/s", "TFLOP/s/GPU", "MFU %")
_MEMORY = ("alloc GB", "peak GB")
_COMMUNICATION = ("comm ms", "exposed ms", "hidden")
_NUMERIC = frozenset({"TP", "DP", *_TIMES, *_PARTS, *_RATES, *_MEMORY, *_COMMUNICATION, "loss"})
_HIGH_FIRST = frozenset({*_RATES, "hidden"})
_MEASURED = (*_TIMES, *_PARTS, *_RATES, *_MEMORY, *_COMMUNICATION, "loss")


def stacks_table(analysis: TpTrainingAnalysis) -> PageTable:
    """Of one case: a row for each setting, by grid of ranks, from fast to slow."""
    rows = [
        [
            *_who(row_cells(row)),
            *_measured(row_cells(row)),
            Cell(note(row, analysis), kind="chosen" if row.may_win and "fastest" in note(row, analysis) else "reason"),
        ]
        for row in analysis.rows
    ]
    return PageTable(["TP", "DP", "setting", *_MEASURED, "note"], rows, _NUMERIC, _HIGH_FIRST)


def stack_points_table(analysis: Analysis) -> PageTable:
    """All points, also those that could not be measured."""
    rows = [
        [
            Cell(row["model"] or ""),
            Cell(row["dtype"] or ""),
            *_who(row),
            _status(row),
            *_measured(row),
            Cell("fastest", kind="chosen") if row["chosen"] else Cell(first_line(row["error"]), kind="reason"),
            Cell(row["directory"]),
        ]
        for row in analysis.tp_training_rows
    ]
    columns = ["model", "dtype", "TP", "DP", "setting", "status", *_MEASURED, "note", "point"]
    return PageTable(columns, rows, _NUMERIC, _HIGH_FIRST)


def _who(row: Row) -> list[Cell]:
    sizes = [Cell(str(row[name]), row[name], "number") for name in ("tp_size", "dp_size")]
    return [*sizes, Cell(row["setting"], kind="setting")]


def _measured(row: Row) -> list[Cell]:
    return [
        *(number(row[name], as_ms) for name in ("step_us", "noise_us")),
        *(number(row[f"{name}_pct"], _as_tenths) for name in ("forward", "backward", "optimizer", "other")),
        *(number(row[name], _as_whole, -BEYOND) for name in ("tokens_per_s", "tokens_per_s_per_gpu")),
        *(number(row[name], _as_digits, -BEYOND) for name in ("samples_per_s", "tflops_per_gpu")),
        number(row["mfu_pct"], _as_tenths, -BEYOND),
        *(number(row[name], _as_tenths) for name in ("memory_allocated_gb", "memory_peak_gb")),
        *(number(row[name], as_ms) for name in ("comm_us", "exposed_comm_us")),
        number(row["hidden_comm_fraction"], as_percent, -BEYOND),
        number(row["loss"], as_loss),
    ]


def _as_whole(value: float) -> str:
    return f"{value:,.0f}"


def _as_digits(value: float) -> str:
    return f"{value:,.3g}"


def _as_tenths(value: float) -> str:
    return f"{value:.1f}"


def _status(row: Row) -> Cell:
    if row["launch_bound"]:
        return Cell(f"{row['status']}, launch-bound", kind="doubtful")
    if row["losses_agree"] is False:
        return Cell(f"{row['status']}, deviates", kind="doubtful")
    return Cell(row["status"], kind=row["status"])
