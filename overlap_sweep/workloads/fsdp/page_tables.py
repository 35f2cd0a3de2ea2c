"""Training runs as tables of the page: what was compared, and every point as it was measured."""

from __future__ import annotations

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.report.frame import Row
from overlap_sweep.report.numbers import as_loss, as_ms
from overlap_sweep.report.page.tables import BEYOND, Cell, PageTable, first_line, number
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis, TrainingRow
from overlap_sweep.workloads.fsdp.section import note
from overlap_sweep.workloads.fsdp.step_hidden import Hidden

_TIMES = ("step ms", "noise ms", "none ms", "floor ms", "exposed ms")
_RATES = ("hidden", "speedup", "samples/s", "tokens/s")
_REST = ("host ms", "memory GB", "loss")


def settings_table(analysis: TrainingAnalysis) -> PageTable:
    """Of one case: a row for each setting, from fast to slow."""
    rows = [_setting(row, analysis) for row in analysis.rows]
    columns = ["setting", *_TIMES, *_RATES, *_REST, "note"]
    return PageTable(columns, rows, frozenset({*_TIMES, *_RATES, *_REST}), frozenset(_RATES))


def training_table(analysis: Analysis) -> PageTable:
    """All points of training runs, also those that could not be measured."""
    rows = [
        [
            Cell(row["model"] or ""),
            Cell(str(row["ranks"]), row["ranks"], "number"),
            number(row["batch_size"], str),
            Cell(row["precision"] or ""),
            Cell(row["setting"], kind="setting"),
            _status(row),
            *(number(row[name], as_ms) for name in ("step_us", "noise_us", "none_us", "floor_us", "exposed_us")),
            *_rates(_hidden(row), row["speedup"], row["samples_per_s"], row["tokens_per_s"]),
            *_rest(row["host_us"], row["peak_memory_gb"], row["loss"]),
            Cell("best", kind="chosen") if row["chosen"] else Cell(first_line(row["error"]), kind="reason"),
            Cell(row["directory"]),
        ]
        for row in analysis.training_rows
    ]
    columns = ["model", "ranks", "batch", "precision", "setting", "status", *_TIMES, *_RATES, *_REST, "note", "point"]
    return PageTable(columns, rows, frozenset({"ranks", "batch", *_TIMES, *_RATES, *_REST}), frozenset(_RATES))


def _setting(row: TrainingRow, analysis: TrainingAnalysis) -> list[Cell]:
    times_us = (row.time_us, row.step.noise_us, row.none_us, row.floor_us, row.exposed_us)
    return [
        Cell(row.setting, kind="setting"),
        *(number(time_us, as_ms) for time_us in times_us),
        *_rates(row.hidden if row.communicates else None, row.speedup, row.samples_per_s, row.tokens_per_s),
        *_rest(row.host_us, row.peak_memory_gb, row.loss),
        Cell(note(row, analysis), kind="chosen" if row is analysis.best else "reason"),
    ]


def _hidden(row: Row) -> Hidden | None:
    fraction, noise = row["hidden_fraction"], row["hidden_noise"]
    return None if fraction is None or noise is None else Hidden(fraction, noise)


def _rates(
    hidden: Hidden | None, speedup: float | None, samples_per_s: float | None, tokens_per_s: float | None
) -> list[Cell]:
    return [
        Cell(hidden.in_words, round(hidden.fraction, 6), "number") if hidden else Cell("", -BEYOND, "number"),
        number(speedup, lambda value: f"{value:.3f}", -BEYOND),
        number(samples_per_s, lambda value: f"{value:,.0f}", -BEYOND),
        number(tokens_per_s, lambda value: f"{value:,.0f}", -BEYOND),
    ]


def _rest(host_us: float | None, peak_memory_gb: float | None, loss: float | None) -> list[Cell]:
    return [
        number(host_us, as_ms),
        number(peak_memory_gb, lambda value: f"{value:.1f}"),
        number(loss, as_loss),
    ]


def _status(row: Row) -> Cell:
    if row["launch_bound"]:
        return Cell(f"{row['status']}, launch-bound", kind="doubtful")
    return Cell(row["status"], kind=row["status"])
