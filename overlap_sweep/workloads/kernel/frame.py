"""The tidy tables of kernels: what each point measured, and what to use at which m."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.overlap.kernel_shape import BASELINES, COMM_ONLY, GEMM_ONLY, SEQUENTIAL, KernelShape
from overlap_sweep.report.frame import Row, column_types, common_cells
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.points import Point
from overlap_sweep.workloads.kernel.answer import (
    ImplementationRow,
    KernelAnalysis,
    ShapeAnalysis,
    link_gb_per_s,
    name_in_tables,
    tflops,
)
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes

LEFT_OUT = "left_out"
"""In place of the point's status: this one of its implementations was not timed."""

_TEXT = ("kernel", "implementation", "other_knobs", "reason")
_OWN_TYPES = {
    **dict.fromkeys(_TEXT, "string"),
    **dict.fromkeys(("m", "n", "k"), "Int64"),
    **dict.fromkeys(("independent", "chosen"), "boolean"),
}


def _types(*names: str) -> dict[str, str]:
    return {name: _OWN_TYPES.get(name, kind) for name, kind in column_types(*names).items()}


COLUMNS = _types(
    *("point", "directory", "model", "operator", "kernel", "m", "n", "k", "tp_size", "precision", "device", "backend"),
    *("implementation", "method", *space.KNOBS, "other_knobs", "status", "error"),
    *("time_us", "q1_us", "q3_us", "repeats", "sequential_us", "gemm_only_us", "comm_only_us", "bound_us"),
    *("tflops", "link_gb_per_s", "hidden_fraction", "speedup", "over_bound"),
    *("relative_error", "independent", "launch_bound", "chosen"),
)
"""Every column in its order, and its pandas type: one row per point and implementation, baselines included. Times are
medians in microseconds, as measured in that point.

tflops and link_gb_per_s are of one GPU. bound_us is the longer of gemm_only_us and comm_only_us; over_bound is time_us
over it, minus 1. chosen: this is the answer for its shape, over the points of all backends. status is `left_out` where
the point is ok and this one was not timed; error says why.
"""

ANSWER_COLUMNS = _types(
    *("kernel", "m", "n", "k", "tp_size", "precision", "device", "backend"),
    *("implementation", "method", *space.KNOBS, "other_knobs"),
    *("time_us", "noise_us", "sequential_us", "gemm_only_us", "comm_only_us", "bound_us"),
    *("tflops", "link_gb_per_s", "hidden_fraction", "speedup", "over_bound", "relative_error", "reason"),
)
"""One row per kernel, shape and precision: which implementation to use there. `sequential`: don't overlap. Empty where
it was launch-bound, so that nothing is known."""


def kernel_rows(points: Iterable[Point], analyses: Iterable[KernelAnalysis], root: Path) -> list[Row]:
    """With exactly the keys of COLUMNS; what does not apply is None."""
    answers = {
        point.directory: shape.chosen
        for analysis in analyses
        for shape in analysis.shapes
        for point in shape.points
        if shape.chosen
    }
    rows = []
    for point in points:
        if point.is_kernel:
            common = _point_cells(point, root)
            chosen = answers.get(point.directory)
            rows += [common | cells for cells in _of_point(point, chosen)] if point.status == "ok" else [common]
    return [{column: row.get(column) for column in COLUMNS} for row in rows]


def answer_rows(analyses: Iterable[KernelAnalysis]) -> list[Row]:
    """With exactly the keys of ANSWER_COLUMNS."""
    rows = [_answer(analysis, shape) for analysis in analyses for shape in analysis.shapes]
    return [{column: row.get(column) for column in ANSWER_COLUMNS} for row in rows]


def comparable_cells(row: ImplementationRow) -> Row:
    """What is known of an implementation beside the others of its shape; undefined numbers are NaN."""
    return {
        "backend": row.backend,
        "implementation": row.name,
        "time_us": row.time_us,
        "noise_us": row.estimate.noise_us,
        "tflops": row.tflops,
        "link_gb_per_s": row.link_gb_per_s,
        "hidden_fraction": row.hidden_fraction,
        "speedup": row.speedup,
        "over_bound": row.over_bound,
        "relative_error": row.relative_error,
        "independent": row.independent,
        "launch_bound": row.launch_bound,
    }


def knob_cells(setting: Mapping[str, Any]) -> Row:
    """The method and the knobs that have columns, and the others in words."""
    known = {name: value for name, value in setting.items() if name in ("method", *space.KNOBS)}
    others = [f"{name}={value}" for name, value in setting.items() if name not in known]
    return {**known, "other_knobs": ", ".join(others) or None}


def shape_cells(shape: ShapeAnalysis) -> Row:
    """The times that all of a shape are compared with, in microseconds."""
    times = {f"{name}_us": row.time_us for name, row in shape.baselines.items()}
    return {"m": shape.m, **times, "bound_us": shape.bound_us}


def _answer(analysis: KernelAnalysis, shape: ShapeAnalysis) -> Row:
    chosen = shape.chosen
    return {
        **analysis.case._asdict(),
        **shape_cells(shape),
        **({**comparable_cells(chosen), **knob_cells(chosen.setting)} if chosen else {}),
        "reason": shape.reason,
    }


def _point_cells(point: Point, root: Path) -> Row:
    config = point.config
    sizes = {name: config.get(name) for name in ("kernel", "m", "n", "k", "operator")}
    return {**common_cells(point, root), **sizes}


def _of_point(point: Point, chosen: ImplementationRow | None) -> list[Row]:
    measured, left_out = point.measured_as(KernelTimes).implementations, point.measured_as(KernelTimes).left_out
    shape, precision = KernelShape.of(point.config), point.config["precision"]
    beside = {f"{name}_us": measured[name].time.median_us for name in BASELINES}
    rows = [
        {**beside, **_measured(name, times, measured, shape, precision), "chosen": _is_chosen(name, point, chosen)}
        for name, times in measured.items()
    ]
    asked = point.config.get("implementations") or {}
    return [{**row, "implementation": name_in_tables(row["implementation"], point.config)} for row in rows] + [
        {
            "implementation": name_in_tables(name, point.config),
            **(knob_cells(asked[name]) if name in asked else {}),
            "status": LEFT_OUT,
            "error": reason,
            "relative_error": _wrong(name, point),
        }
        for name, reason in left_out.items()
        if name not in measured
    ]


def _is_chosen(name: str, point: Point, chosen: ImplementationRow | None) -> bool:
    if chosen is None or chosen.backend not in (None, point.config["backend"]):
        return False
    return chosen.name == name_in_tables(name, point.config)


def _wrong(name: str, point: Point) -> float | None:
    assert point.result
    errors = point.result.relative_error
    return (math.inf if errors[name] is None else errors[name]) if name in errors else None


def _measured(
    name: str, times: ImplementationTimes, beside: Mapping[str, ImplementationTimes], shape: KernelShape, precision: str
) -> Row:
    time_us = times.time.median_us
    sequential_us, gemm_us, comm_us = (beside[one].time.median_us for one in (SEQUENTIAL, GEMM_ONLY, COMM_ONLY))
    bound_us = max(gemm_us, comm_us)
    compared = {
        "hidden_fraction": hidden_fraction(time_us, sequential_us, gemm_us),
        "speedup": sequential_us / time_us,
        "over_bound": time_us / bound_us - 1,
    }
    return {
        "implementation": name,
        **knob_cells(times.setting),
        "time_us": time_us,
        "q1_us": times.time.q1_us,
        "q3_us": times.time.q3_us,
        "repeats": len(times.time.samples_us),
        "bound_us": bound_us,
        "tflops": None if name == COMM_ONLY else tflops(shape, time_us),
        "link_gb_per_s": None if name == GEMM_ONLY else link_gb_per_s(shape, precision, time_us),
        **(compared if name not in (GEMM_ONLY, COMM_ONLY) else {}),
        "relative_error": times.relative_error,
        "independent": times.independent,
        "launch_bound": times.launch_bound,
    }
