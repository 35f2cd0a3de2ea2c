"""The tidy tables of tensor-parallel stacks: what each point measured, and the best of each grid of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from overlap_sweep.report.frame import Row, column_types, common_cells
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.tp_training.answer import (
    GridAnswer,
    TpTrainingAnalysis,
    TpTrainingRow,
    grid_of,
    ratio_interval,
    ratio_of,
    setting_of,
)

_TEXT = ("impl", "setting", "dtype", "next", "tied", "deviating")
_COUNTS = (
    *("num_layers", "dp_size", "ranks", "seq_length", "batch_size", "gradient_accumulation_steps", "parameters"),
    *("tokens_per_step", "samples_per_step"),
)
_FLAGS = ("losses_agree", "chosen", "best_of_all")


def _types(*names: str) -> dict[str, str]:
    own = {
        **dict.fromkeys(_TEXT, "string"),
        **dict.fromkeys(_COUNTS, "Int64"),
        **dict.fromkeys(_FLAGS, "boolean"),
    }
    return {name: own.get(name, kind) for name, kind in column_types(*names).items()}


_OF_CASE = ("model", "num_layers", "device", "dtype", "seq_length", "batch_size", "gradient_accumulation_steps")
_MEASURED = (
    *("step_us", "noise_us", "q1_us", "q3_us", "repeats", "forward_pct", "backward_pct", "optimizer_pct", "other_pct"),
    *("tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu_pct"),
    *("memory_allocated_gb", "memory_peak_gb", "host_ahead_us"),
    *("comm_us", "hidden_comm_us", "exposed_comm_us", "hidden_comm_fraction", "comm_wait_us"),
    *("loss", "losses_agree", "loss_difference", "parameters", "tokens_per_step", "samples_per_step", "launch_bound"),
)

COLUMNS = _types(
    *("point", "directory", *_OF_CASE, "impl", "setting", "tp_size", "dp_size", "ranks", "status", "error"),
    *_MEASURED,
    "chosen",
)
"""Every column in its order, and its pandas type: one row per point. Times are medians in microseconds, of the steps
after the warm-up.

setting: the implementation with every option that is not at its default. forward_pct and its kin add up to 100.
tokens_per_s is of all ranks. mfu_pct: model FLOP utilisation; empty where the GPU's peak is not known. comm_us and its
kin: communication in a step, from the traces, of the rank that waits least in it; comm_wait_us: how much longer that of
another rank takes, which waits for it. losses_agree: with the implementations that were
given the same data; empty where there are none; loss_difference: the largest, relative. chosen: the fastest on its
ranks.
"""

ANSWER_COLUMNS = _types(
    *(*_OF_CASE, "tp_size", "dp_size", "ranks", "impl", "setting"),
    *_MEASURED,
    *("tied", "next", "over_next", "over_next_low", "over_next_high", "over_slowest", "deviating", "best_of_all"),
)
"""One row per case and grid of ranks: the fastest implementation. tied: what cannot be told from it; next: the fastest
of the others, over_next: how many times as long that takes, with its interval; over_slowest: the same of the slowest.
deviating: what computes something else, and cannot be chosen."""


def tp_training_rows(points: Iterable[Point], analyses: Iterable[TpTrainingAnalysis], root: Path) -> list[Row]:
    """With exactly the keys of COLUMNS; what does not apply is None."""
    measured: dict[Path, Row] = {}
    for analysis in analyses:
        chosen = {id(point) for answer in analysis.answers if answer.best for point in answer.best.points}
        for row in analysis.of_points:
            (point,) = row.points
            measured[point.directory] = {**measured_cells(row), "chosen": id(point) in chosen}
    rows = [
        {**_point_cells(point, root), **measured.get(point.directory, {})} for point in points if point.is_tp_training
    ]
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def answer_rows(analyses: Iterable[TpTrainingAnalysis]) -> list[Row]:
    """With exactly the keys of ANSWER_COLUMNS."""
    rows = [_answer_cells(answer, analysis) for analysis in analyses for answer in analysis.answers]
    return [{column: row.get(column) for column in ANSWER_COLUMNS} for row in rows]


def row_cells(row: TpTrainingRow) -> Row:
    """Who ran on which ranks, and what was measured of it."""
    return {"impl": row.impl, "setting": row.setting, **row.grid._asdict(), "ranks": row.grid.ranks} | measured_cells(
        row
    )


def measured_cells(row: TpTrainingRow) -> Row:
    """Undefined numbers are NaN, unknown ones None."""
    communication = row.communication
    return {
        "step_us": row.time_us,
        "noise_us": row.step.noise_us,
        "q1_us": row.q1_us,
        "q3_us": row.q3_us,
        "repeats": row.step.repeats,
        **{f"{name}_pct": 100 * share for name, share in row.shares._asdict().items()},
        "tokens_per_s": row.tokens_per_s,
        "tokens_per_s_per_gpu": row.tokens_per_s_per_gpu,
        "samples_per_s": row.samples_per_s,
        "tflops_per_gpu": row.tflops_per_gpu,
        "mfu_pct": None if row.mfu is None else 100 * row.mfu,
        "memory_allocated_gb": row.memory_allocated_gb,
        "memory_peak_gb": row.memory_peak_gb,
        "host_ahead_us": row.host_ahead_us,
        "comm_us": communication.total_us if communication else None,
        "hidden_comm_us": communication.hidden_us if communication else None,
        "exposed_comm_us": communication.exposed_us if communication else None,
        "hidden_comm_fraction": communication.hidden_fraction if communication else None,
        "comm_wait_us": communication.waiting_us if communication else None,
        "loss": row.loss,
        "losses_agree": None if row.losses is None else not row.deviates,
        "loss_difference": row.losses.largest.relative if row.losses and row.losses.largest else None,
        "parameters": row.parameters,
        "tokens_per_step": row.tokens_per_step,
        "samples_per_step": row.samples_per_step,
        "launch_bound": row.host_limits,
    }


def _point_cells(point: Point, root: Path) -> Row:
    config, options, grid = point.config, point.config["tp_training"], grid_of(point.config)
    return {
        **common_cells(point, root),
        "num_layers": (config.get("language_model") or {}).get("num_hidden_layers"),
        "dtype": options["dtype"],
        **{name: options[name] for name in ("seq_length", "batch_size", "gradient_accumulation_steps")},
        "impl": config["impl"],
        "setting": setting_of(config),
        **grid._asdict(),
        "ranks": grid.ranks,
    }


def _answer_cells(answer: GridAnswer, analysis: TpTrainingAnalysis) -> Row:
    best = answer.best
    case = {name: value for name, value in analysis.case._asdict().items() if name in _OF_CASE}
    cells: Row = {
        **case,
        **answer.grid._asdict(),
        "ranks": answer.grid.ranks,
        "deviating": ", ".join(row.setting for row in answer.rows if row.deviates) or None,
    }
    if best is None:
        return cells
    slower = answer.slower
    cells |= {
        **row_cells(best),
        "tied": ", ".join(row.setting for row in answer.ties[1:]) or None,
        "best_of_all": best is analysis.best,
    }
    if slower:
        interval = ratio_interval(slower[0], best)
        cells |= {
            "next": slower[0].setting,
            "over_next": ratio_of(slower[0], best),
            "over_next_low": interval.low,
            "over_next_high": interval.high,
            "over_slowest": ratio_of(slower[-1], best),
        }
    return cells
