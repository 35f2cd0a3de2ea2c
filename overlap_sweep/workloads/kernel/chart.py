"""A kernel over m, or at a single m: how far implementations are from what no overlap can beat.

Drawn is the time over the bound, the longer of the GEMM alone and the communication alone. Times, and TFLOP/s too,
change so much with m that the lines of implementations would lie on each other; what tells them apart, and what is left
to gain, is their distance to the bound, and that compares across m. TFLOP/s are in the tooltips and in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from overlap_sweep.overlap.kernel_shape import GEMM_ONLY, SEQUENTIAL
from overlap_sweep.report import charts
from overlap_sweep.report.charts.palette import looks_of
from overlap_sweep.report.numbers import as_percent, as_rate, as_us
from overlap_sweep.workloads.kernel.answer import (
    SIMPLEST_FIRST,
    ImplementationRow,
    KernelAnalysis,
    ShapeAnalysis,
    answers_in_words,
    as_over,
)

DASHED = (5, 3)
AXIS = charts.Axis("time / bound", format=".3~g")


def kernel_chart(analysis: KernelAnalysis) -> charts.Lines | charts.Dots:
    """Returns the best of each backend over m; of a single m every implementation."""
    return kernel_dots(analysis) if len(analysis.shapes) == 1 else kernel_lines(analysis)


def kernel_lines(analysis: KernelAnalysis) -> charts.Lines:
    """Returns a line for the best of each backend that can be used, and one for `sequential`."""
    points: dict[str, list[charts.LinePoint]] = {}
    for shape in analysis.shapes:
        for name, row in _best(shape).items():
            ratio, low, high = _ratios(row, shape)
            point = charts.LinePoint(shape.m, ratio, low, high, ringed=row.chosen, details=_details(row, shape))
            points.setdefault(name, []).append(point)
    # Each backend has its own colour in all charts.
    backends = sorted(points.keys() - {SEQUENTIAL})
    known = [*SIMPLEST_FIRST, *(name for name in backends if name not in SIMPLEST_FIRST)]
    looks = looks_of(backends, {name: i for i, name in enumerate(known)}) | {SEQUENTIAL: ("muted", "stroke")}
    return charts.Lines(
        title=_heading(analysis),
        subtitle=answers_in_words(analysis),
        x=charts.Axis("m, and above it what the bound is from there on", logarithmic=True),
        y=AXIS,
        lines=[
            charts.Line(name, points[name], *looks[name], dash=DASHED if name == SEQUENTIAL else (1, 0))
            for name in sorted(points, key=lambda name: name != SEQUENTIAL)
        ],
        levels=[charts.Level("the bound", 1.0, "ink", width_px=1)],
        notes=_bindings(analysis.shapes),
    )


def kernel_dots(analysis: KernelAnalysis) -> charts.Dots:
    """Returns every implementation at the only m, from fast to slow."""
    (shape,) = analysis.shapes
    rows = sorted([shape.sequential, *shape.implementations], key=lambda row: row.time_us)
    return charts.Dots(
        title=_heading(analysis),
        subtitle=answers_in_words(analysis),
        axis=AXIS,
        columns=[charts.Column("time, noise", "left"), charts.Column("TFLOP/s"), charts.Column("speedup")],
        rows=[_dot_row(row, shape) for row in rows],
        references=[charts.Reference(1.0, f"the bound ({_binding(shape)})")],
        legend=[
            charts.Key("the answer", "good", shape="dot"),
            charts.Key("can be used", "accent", shape="dot"),
            charts.Key("cannot", "muted", shape="ring"),
            charts.Key("no overlap", "muted", shape="dot"),
        ],
    )


def _heading(analysis: KernelAnalysis) -> str:
    subjects = f", {', '.join(analysis.subjects)}" if analysis.subjects else ""
    return f"{analysis.case.brief}{subjects}"


def _binding(shape: ShapeAnalysis) -> str:
    return "GEMM" if shape.binding.name == GEMM_ONLY else "comm."


def _ratios(row: ImplementationRow, shape: ShapeAnalysis) -> tuple[float, float, float]:
    """Returns time over bound, and with its noise from where to where."""
    low_us = max(0.5 * row.time_us, row.time_us - row.estimate.noise_us)
    high_us = row.time_us + row.estimate.noise_us
    return row.time_us / shape.bound_us, low_us / shape.bound_us, high_us / shape.bound_us


def _details(row: ImplementationRow, shape: ShapeAnalysis) -> dict[str, str]:
    return {
        "implementation": row.label,
        "at": f"m={shape.m}",
        "time": _time_text(row),
        "the bound": f"{as_us(shape.bound_us)} us, {_binding(shape)}",
        "against it": as_over(row.over_bound),
        "TFLOP/s per rank": as_rate(row.tflops),
        "speedup": f"{row.speedup:.2f}x",
        "hidden": as_percent(row.hidden_fraction),
    }


def _time_text(row: ImplementationRow) -> str:
    return f"{as_us(row.time_us)} us, noise {as_us(row.estimate.noise_us)}"


def _best(shape: ShapeAnalysis) -> dict[str, ImplementationRow]:
    """Returns by backend what is drawn of it, and `sequential`."""
    best: dict[str, ImplementationRow] = {}
    for row in sorted(shape.contenders, key=lambda row: row.time_us):
        best.setdefault(str(row.backend), row)
    if shape.chosen and shape.chosen.backend:
        # Within the noise there may be a faster one that is less simple.
        best[shape.chosen.backend] = shape.chosen
    return {SEQUENTIAL: shape.sequential, **best} if shape.sequential.comparable else best


def _bindings(shapes: Sequence[ShapeAnalysis]) -> list[charts.Note]:
    """Returns what the bound is where that changes: at every m the words would lie on each other."""
    return [
        charts.Note(first.m, what, {"the bound is the": what, "which takes": f"{as_us(first.bound_us)} us"})
        for what, same in groupby(shapes, key=_binding)
        for first in [next(same)]
    ]


def _dot_row(row: ImplementationRow, shape: ShapeAnalysis) -> charts.DotRow:
    usable = row.name == SEQUENTIAL or row in shape.contenders
    look: dict[str, Any] = {
        "colour": "good" if row.chosen else "muted" if row.name == SEQUENTIAL or not usable else "accent",
        "shape": "dot" if usable else "ring",
    }
    return charts.DotRow(
        name=row.label,
        dots=[charts.Dot(*_ratios(row, shape), **look)],
        cells=[_time_text(row), as_rate(row.tflops), f"{row.speedup:.2f}x"],
        bold=row.chosen,
        note=row.note,
        details=_details(row, shape),
    )
