"""Bars from zero, one a row: cut into parts that follow each other, or of a single part, to either side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from overlap_sweep.report.charts.palette import colour
from overlap_sweep.report.charts.parts import Axis, Key, Scaled, described, drawn_from, heading, keys
from overlap_sweep.report.charts.rows import Column, Frame, Reference, references

if TYPE_CHECKING:
    import altair as alt


@dataclass(frozen=True)
class Marker:
    """Another value in a row, such as that of another setting."""

    at: float
    label: str = ""
    colour: str = "ink"
    shape: Literal["dot", "tick"] = "dot"


@dataclass(frozen=True)
class Bar:
    name: str
    ends: list[float]
    """Where each part ends; the next one begins there. Empty where nothing is known."""
    cells: list[str]
    """What stands on the right, by column."""
    low: float | None = None
    """With its noise, to `high`."""
    high: float | None = None
    colour: str = ""
    """Instead of the part's, where there is but one."""
    bold: bool = False
    marker: Marker | None = None
    details: dict[str, str] = field(default_factory=dict)
    """What the tooltip says, by title."""


@dataclass(frozen=True)
class Bars:
    title: str
    subtitle: str
    axis: Axis
    parts: list[Key]
    columns: list[Column]
    bars: list[Bar]
    """From top to bottom."""
    references: list[Reference] = field(default_factory=list)


def cut(base: float, time: float, whole: float) -> list[float]:
    """Returns the ends of three parts: the base, what stands above it in the time, what is hidden of the whole."""
    return [min(base, time), time, max(time, whole)]


def describe(bars: Bars) -> str:
    return described(
        f"{bars.title}, {bars.axis.title}" if bars.axis.title else bars.title,
        bars.subtitle,
        Frame(bars.bars, bars.columns).describe(),
    )


def chart(bars: Bars) -> alt.TopLevelMixin:
    import altair as alt

    frame, scaled = Frame(bars.bars, bars.columns), _scaled(bars)
    told, y = frame.tooltip(), frame.y
    rows = [{**frame.fields(i), "low": bar.low, "high": bar.high} for i, bar in enumerate(bars.bars)]
    pieces = [
        {
            **frame.fields(i),
            "start": start,
            "end": end,
            "colour": colour(bar.colour or part.colour),
            "opacity": part.opacity,
        }
        for i, bar in enumerate(bars.bars)
        for part, start, end in zip(bars.parts, [0.0, *bar.ends], bar.ends, strict=False)
        if end != start
    ]
    markers = [(i, bar.marker) for i, bar in enumerate(bars.bars) if bar.marker]

    def x(name: str) -> alt.X:
        return alt.X(f"{name}:Q", title=scaled.title, axis=scaled.drawn(), scale=scaled.scale(clamp=True))

    layers = [
        drawn_from(pieces)
        .mark_bar(height=13)
        .encode(
            x=x("start"),
            x2="end:Q",
            y=y,
            color=alt.Color("colour:N", scale=None),
            opacity=alt.Opacity("opacity:Q", scale=None),
            tooltip=told,
        ),
        *references(bars.references, x, scaled),
        *frame.whiskers(rows, x, {"color": alt.value(colour("ink"))}),
    ]
    own = alt.Color("colour:N", scale=None)
    for shape in ("tick", "dot"):
        shown = drawn_from(
            {
                **frame.fields(i),
                "at": marker.at,
                "colour": colour(marker.colour),
                "label": marker.label,
                # Centred, it would reach into the names of the rows.
                "align": "left" if scaled.share(marker.at) < 0.05 else "center",
            }
            for i, marker in markers
            if marker.shape == shape
        )
        mark = (
            shown.mark_tick(thickness=3, size=15, opacity=1, orient="vertical")
            if shape == "tick"
            else shown.mark_point(filled=True, size=46, opacity=1)
        )
        said = shown.mark_text(dy=-12, fontSize=9.5, align=alt.ExprRef("datum.align"))
        layers += [
            mark.encode(x=x("at"), y=y, color=own, tooltip=told),
            said.encode(x=x("at"), y=y, color=own, text="label:N", tooltip=told),
        ]
    return alt.layer(*layers, *frame.layers(), *keys(bars.parts)).properties(
        width="container", height=frame.height_px, **heading(bars.title, bars.subtitle)
    )


def _scaled(bars: Bars) -> Scaled:
    """Returns the axis from zero to the furthest; with a margin at the ends that are not zero."""
    if bars.axis.domain:
        return Scaled(bars.axis, *bars.axis.domain, logarithmic=False)
    values = [value for bar in bars.bars for value in (*bar.ends, bar.low, bar.high) if value is not None]
    values += [bar.marker.at for bar in bars.bars if bar.marker]
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    both_sides = low < 0
    span = high - low or 1.0
    return Scaled(
        bars.axis,
        low - 0.06 * span if both_sides else 0.0,
        high + (0.06 if both_sides else 0.02) * span,
        logarithmic=False,
    )
