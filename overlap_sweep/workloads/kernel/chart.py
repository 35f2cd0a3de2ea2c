"""A kernel over m: how far the best implementation of each backend is from what no overlap can beat.

Drawn is the time over the bound, the longer of the GEMM alone and the communication alone. Times, and TFLOP/s too,
change so much with m that the lines of implementations would lie on each other; what tells them apart, and what is left
to gain, is their distance to the bound, and that compares across m. TFLOP/s are in the tooltips and in the table.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from overlap_sweep.overlap.kernel_shape import GEMM_ONLY, SEQUENTIAL
from overlap_sweep.report.numbers import as_percent, as_rate, as_us
from overlap_sweep.report.page.chart_parts import drawn_from, tooltip
from overlap_sweep.report.page.figures import Figure, figure
from overlap_sweep.report.page.label_places import LABEL_GAP_PX, spread
from overlap_sweep.report.page.log_ticks import LOGARITHMIC_FROM, log_ticks
from overlap_sweep.report.page.palette import colour, looks_of
from overlap_sweep.workloads.kernel.answer import (
    SIMPLEST_FIRST,
    ImplementationRow,
    KernelAnalysis,
    ShapeAnalysis,
    answers_in_words,
    as_over,
)

if TYPE_CHECKING:
    import altair as alt

HEIGHT_PX = 230
SUBTITLE_WIDTH = 150
"""Characters: with its title the chart stands alone, and is wide."""
BELOW = 0.16
"""The share of the height that is left for what stands below the marks."""
TOLD = {
    "implementation": "implementation",
    "at": "at",
    "time_text": "time",
    "bound_text": "the bound",
    "over_text": "against it",
    "tflops_text": "TFLOP/s per rank",
    "speedup_text": "speedup",
    "hidden_text": "hidden",
}


@dataclass(frozen=True)
class Drawn:
    """An implementation, or `sequential`, at one m, as both charts draw it. Ratios are time over the bound."""

    ratio: float
    low: float
    high: float
    """With the noise of the time."""
    chosen: bool
    implementation: str
    at: str
    time_text: str
    bound_text: str
    over_text: str
    tflops_text: str
    speedup_text: str
    hidden_text: str


@dataclass(frozen=True)
class KernelMark(Drawn):
    """The best that can be used of one backend, or `sequential`."""

    line: str
    m: int


@dataclass(frozen=True)
class BindingAt:
    """What the bound is made of from one m on, up to the next."""

    m: int
    what: str
    bound_text: str


@dataclass(frozen=True)
class LineLabel:
    text: str
    end_m: float
    end_ratio: float
    """Where what it names ends."""
    label_ratio: float
    """Where it stands."""
    colour: str


@dataclass(frozen=True)
class KernelPanel:
    """Over at least two m."""

    title: str
    subtitle: str
    marks: list[KernelMark]
    bindings: list[BindingAt]
    labels: list[LineLabel]
    colours: dict[str, str]
    """By line."""
    shapes: dict[str, str]
    ms: list[int]
    range: tuple[float, float]
    logarithmic: bool


def kernel_figure(analysis: KernelAnalysis, name: str) -> Figure:
    """Returns a picture over m, or of the only one, under that name."""
    from overlap_sweep.workloads.kernel import dots

    if len(analysis.shapes) == 1:
        panel = dots.dots_panel(analysis)
        return figure(name, dots.describe(panel), panel, dots.chart)
    over_m = kernel_panel(analysis)
    return figure(name, describe(over_m), over_m, chart)


def kernel_panel(analysis: KernelAnalysis) -> KernelPanel:
    """Of several m; of a single one see kernel_bars."""
    marks = [mark for shape in analysis.shapes for mark in _marks(shape)]
    # Each backend has its own colour in all charts.
    backends = sorted({mark.line for mark in marks} - {SEQUENTIAL})
    known = [*SIMPLEST_FIRST, *(name for name in backends if name not in SIMPLEST_FIRST)]
    looks = looks_of(backends, {name: i for i, name in enumerate(known)})
    ends, logarithmic = _range(marks)
    ms = [shape.m for shape in analysis.shapes]
    colours = {name: series for name, (series, _) in looks.items()} | {SEQUENTIAL: "muted"}
    return KernelPanel(
        title=heading(analysis),
        subtitle=answers_in_words(analysis),
        marks=marks,
        bindings=_bindings(analysis.shapes),
        labels=_labels(marks, colours, ends, logarithmic, _edge(ms)),
        colours=colours,
        shapes={name: shape for name, (_, shape) in looks.items()} | {SEQUENTIAL: "stroke"},
        ms=ms,
        range=ends,
        logarithmic=logarithmic,
    )


def heading(analysis: KernelAnalysis) -> str:
    subjects = f", {', '.join(analysis.subjects)}" if analysis.subjects else ""
    return f"{analysis.case.brief}{subjects}"


def binding_in_words(shape: ShapeAnalysis) -> str:
    return "GEMM" if shape.binding.name == GEMM_ONLY else "comm."


def describe(panel: KernelPanel) -> str:
    said = (f"{mark.line} at {mark.at} {mark.over_text} the bound" for mark in panel.marks)
    return f"Time over the bound, {panel.title}: {panel.subtitle}. {'; '.join(said)}."


def drawn(row: ImplementationRow, shape: ShapeAnalysis) -> dict[str, Any]:
    """The fields of `Drawn`."""
    noise_us = row.estimate.noise_us
    return {
        "ratio": row.time_us / shape.bound_us,
        "low": max(0.5 * row.time_us, row.time_us - noise_us) / shape.bound_us,
        "high": (row.time_us + noise_us) / shape.bound_us,
        "chosen": row.chosen,
        "implementation": row.label,
        "at": f"m={shape.m}",
        "time_text": f"{as_us(row.time_us)} us, noise {as_us(noise_us)}",
        "bound_text": f"{as_us(shape.bound_us)} us, {binding_in_words(shape)}",
        "over_text": as_over(row.over_bound),
        "tflops_text": as_rate(row.tflops),
        "speedup_text": f"{row.speedup:.2f}x",
        "hidden_text": as_percent(row.hidden_fraction),
    }


def _marks(shape: ShapeAnalysis) -> list[KernelMark]:
    best: dict[str, ImplementationRow] = {}
    for row in sorted(shape.contenders, key=lambda row: row.time_us):
        best.setdefault(str(row.backend), row)
    if shape.chosen and shape.chosen.backend:
        # Within the noise there may be a faster one that is less simple.
        best[shape.chosen.backend] = shape.chosen
    lines = {SEQUENTIAL: shape.sequential, **best} if shape.sequential.comparable else best
    return [KernelMark(line=line, m=shape.m, **drawn(row, shape)) for line, row in lines.items()]


def _bindings(shapes: Sequence[ShapeAnalysis]) -> list[BindingAt]:
    """Only where it changes: at every m the words would lie on each other."""
    return [
        BindingAt(first.m, what, f"{as_us(first.bound_us)} us")
        for what, same in groupby(shapes, key=binding_in_words)
        for first in [next(same)]
    ]


def _range(marks: Sequence[KernelMark]) -> tuple[tuple[float, float], bool]:
    low, high = min([1.0, *(mark.low for mark in marks)]), max([1.05, *(mark.high for mark in marks)])
    if high > LOGARITHMIC_FROM * low:
        return (low * (low / high) ** BELOW, high * 1.12), True
    return (low - BELOW * (high - low), high + 0.06 * (high - low)), False


def _labels(
    marks: Iterable[KernelMark],
    colours: Mapping[str, str],
    ends: tuple[float, float],
    logarithmic: bool,
    edge: float,
) -> list[LineLabel]:
    """At the right edge, where nothing else is."""
    last = {mark.line: mark for mark in sorted(marks, key=lambda mark: mark.m)}
    named = [(line, float(mark.m), mark.ratio, colours[line]) for line, mark in last.items()]
    named.append(("the bound", edge, 1.0, "ink"))
    low, high = (math.log(end) if logarithmic else end for end in ends)
    wanted = [math.log(ratio) if logarithmic else ratio for _, _, ratio, _ in named]
    places = spread([(at - low) / (high - low) * HEIGHT_PX for at in wanted], LABEL_GAP_PX, 0.0, HEIGHT_PX)
    labels = []
    for (text, end_m, ratio, of_line), place_px in zip(named, places, strict=True):
        at = low + place_px / HEIGHT_PX * (high - low)
        labels.append(LineLabel(text, end_m, ratio, math.exp(at) if logarithmic else at, of_line))
    return labels


def _edge(ms: Sequence[int]) -> float:
    return float(ms[-1] * (ms[-1] / ms[0]) ** 0.04)


def chart(panel: KernelPanel) -> alt.TopLevelMixin:
    import altair as alt

    low, high = panel.range
    edge = _edge(panel.ms)
    first = panel.ms[0] * panel.ms[-1] / edge
    x_scale = alt.Scale(type="log", base=2, domain=[first, edge], nice=False)
    x_axis = alt.Axis(values=panel.ms, format="d", grid=False, labelOverlap="greedy", tickSize=4)
    y_scale = alt.Scale(type="log" if panel.logarithmic else "linear", domain=[low, high], nice=False)
    y_axis = alt.Axis(
        values=log_ticks(low, high) if panel.logarithmic else alt.Undefined,
        tickCount=5,
        format=".3~g",
        domain=False,
        ticks=False,
        minExtent=38,
    )
    names = list(panel.colours)
    in_colour = alt.Scale(domain=names, range=[colour(name) for name in panel.colours.values()])
    of_line = alt.Color("line:N", scale=in_colour)
    shape = alt.Shape("line:N", scale=alt.Scale(domain=names, range=list(panel.shapes.values())))
    dashed = alt.condition(f"datum.line == '{SEQUENTIAL}'", alt.value([5, 3]), alt.value([1, 0]))

    def x(field: str = "m") -> alt.X:
        return alt.X(f"{field}:Q", title="m, and above it what the bound is from there on", scale=x_scale, axis=x_axis)

    def y(field: str = "ratio") -> alt.Y:
        title = "time / bound, logarithmic" if panel.logarithmic else "time / bound"
        return alt.Y(f"{field}:Q", title=title, scale=y_scale, axis=y_axis)

    marks, chosen = drawn_from(panel.marks), drawn_from(mark for mark in panel.marks if mark.chosen)
    at_bound = drawn_from([{"ratio": 1.0}])
    bindings = drawn_from(panel.bindings)
    of_bound = tooltip({"what": "the bound is the", "bound_text": "which takes"})
    labels = drawn_from({**asdict(label), "colour": colour(label.colour), "edge": edge} for label in panel.labels)
    own = alt.Color("colour:N", scale=None)
    told = tooltip(TOLD)
    layers = [
        at_bound.mark_rule(color=colour("ink")).encode(y=y(), x=alt.value(0), x2=alt.value("width")),
        bindings.mark_text(dy=-7, fontSize=10, color=colour("muted")).encode(
            x=x(), y=alt.value("height"), text="what:N", tooltip=of_bound
        ),
        marks.mark_line(strokeWidth=1.8).encode(x=x(), y=y(), color=of_line, strokeDash=dashed),
        marks.mark_rule(strokeWidth=1.5).encode(x=x(), y=y("low"), y2="high:Q", color=of_line),
        marks.mark_point(filled=True, size=42, opacity=1).encode(
            x=x(), y=y(), color=of_line, shape=shape, tooltip=told
        ),
        chosen.mark_point(size=190, color=colour("ink"), strokeWidth=2, opacity=1).encode(x=x(), y=y(), tooltip=told),
        labels.mark_rule(strokeWidth=0.8, strokeDash=[1, 2]).encode(
            x=x("end_m"), x2="edge:Q", y=y("end_ratio"), y2="label_ratio:Q", color=own
        ),
        labels.mark_text(align="left", dx=5).encode(x=x("edge"), y=y("label_ratio"), text="text:N", color=own),
    ]
    subtitle = textwrap.wrap(panel.subtitle, SUBTITLE_WIDTH, max_lines=2, placeholder=" ...")
    title = alt.TitleParams(panel.title, subtitle=subtitle)
    return alt.layer(*layers).properties(width="container", height=HEIGHT_PX, title=title)
