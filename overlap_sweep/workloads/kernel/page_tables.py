"""Kernels as tables of the page: what was compared at each m, and every point as it was measured."""

from __future__ import annotations

from typing import Any

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.report.frame import Row
from overlap_sweep.report.numbers import as_percent, as_rate, as_us
from overlap_sweep.report.page.tables import BEYOND, Cell, PageTable, first_line, number
from overlap_sweep.workloads.kernel.answer import ImplementationRow, KernelAnalysis, ShapeAnalysis
from overlap_sweep.workloads.kernel.frame import LEFT_OUT
from overlap_sweep.workloads.kernel.section import as_error, note

RATES = ("TFLOP/s", "GB/s", "hidden", "speedup", "vs bound")
HIGH_FIRST = frozenset({"TFLOP/s", "GB/s", "hidden", "speedup"})


def compared_table(analysis: KernelAnalysis) -> PageTable:
    """Of one case: a row for each implementation at each m, times comparable within an m."""
    columns = ["m", "implementation", "backend", "time us", "noise us", *RATES, "error", "note"]
    rows = [_compared(row, shape) for shape in analysis.shapes for row in shape.rows]
    return PageTable(columns, rows, frozenset({"m", "time us", "noise us", *RATES, "error"}), HIGH_FIRST)


def kernels_table(analysis: Analysis) -> PageTable:
    """All points of kernels by m, one row for each implementation, also of what could not be measured. What is the same
    everywhere is no column."""
    several = [name for name in _SIZES if len({row[name] for row in analysis.kernel_rows}) > 1]
    columns = [*(_SIZES[name] for name in several), "m", "backend", "implementation", "status", "time us", *RATES]
    rows = [
        [
            *(_size(row, name) for name in several),
            _size(row, "m"),
            Cell(row["backend"]),
            Cell(row["implementation"] or "", kind="setting"),
            _status(row["status"], bool(row["launch_bound"])),
            number(row["time_us"], as_us),
            *_rates(*(row[name] for name in _RATE_FIELDS)),
            Cell("use this", kind="chosen") if row["chosen"] else Cell(first_line(row["error"]), kind="reason"),
            Cell(row["directory"]),
        ]
        for row in sorted(analysis.kernel_rows, key=_place)
    ]
    numeric = frozenset({"m", "n", "k", "TP", "time us", *RATES})
    return PageTable([*columns, "note", "point"], rows, numeric, HIGH_FIRST)


_SIZES = {"kernel": "kernel", "n": "n", "k": "k", "tp_size": "TP", "precision": "precision"}
"""By column of the tidy table what they are called."""


def _place(row: Row) -> tuple[Any, ...]:
    """A missing point may know nothing of its sizes."""
    return *(str(row[name] or "") for name in ("kernel", "precision")), *(row[name] or 0 for name in _NUMBERS)


_NUMBERS = ("n", "k", "tp_size", "m")


def _size(row: Row, name: str) -> Cell:
    value = row[name]
    if name not in _NUMBERS:
        return Cell(value or "")
    return Cell("", BEYOND, "number") if value is None else Cell(str(value), value, "number")


_RATE_FIELDS = ("tflops", "link_gb_per_s", "hidden_fraction", "speedup", "over_bound")


def _compared(row: ImplementationRow, shape: ShapeAnalysis) -> list[Cell]:
    return [
        Cell(str(shape.m), shape.m, "number"),
        Cell(row.name, kind="setting"),
        Cell(row.backend or ""),
        number(row.time_us, as_us),
        number(row.estimate.noise_us, as_us),
        *_rates(*(getattr(row, name) for name in _RATE_FIELDS)),
        number(row.relative_error, as_error),
        Cell(note(row, shape), kind="chosen" if row is shape.chosen else "reason"),
    ]


def _rates(
    tflops: float | None,
    link_gb_per_s: float | None,
    hidden_fraction: float | None,
    speedup: float | None,
    over_bound: float | None,
) -> list[Cell]:
    return [
        number(tflops, as_rate, -BEYOND),
        number(link_gb_per_s, as_rate, -BEYOND),
        number(hidden_fraction, as_percent, -BEYOND),
        number(speedup, lambda value: f"{value:.3f}", -BEYOND),
        number(over_bound, lambda value: f"{value:+.1%}"),
    ]


def _status(status: str, launch_bound: bool) -> Cell:
    if launch_bound:
        return Cell(f"{status}, launch-bound", kind="doubtful")
    return Cell("left out", kind="skipped") if status == LEFT_OUT else Cell(status, kind=status)
