"""Dots, any number in a row: values with their noise beside what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from overlap_sweep.report.charts.palette import colour
from overlap_sweep.report.charts.parts import Align, Axis, Key, described, drawn_from, fitted, heading, keys
from overlap_sweep.report.charts.rows import Column, Frame, Reference, references

if TYPE_CHECKING:
    import altair as alt


@dataclass(frozen=True)
class Dot:
    at: float
    low: float | None = None
    """With its noise, to `high`."""
    high: float | None = None
    colour: str = "accent"
    shape: Literal["dot", "ring", "tick"] = "dot"


@dataclass(frozen=True)
class DotRow:
    name: str
    dots: list[Dot]
    """None where the row is a heading."""
    cells: list[str] = field(default_factory=list)
    """What stands on the right, by column."""
    bold: bool = False
    note: str = ""
    """Beside the last dot, where there is room."""
    details: dict[str, str] = field(default_factory=dict)
    """What the tooltip says, by title."""


@dataclass(frozen=True)
class Dots:
    title: str
    subtitle: str
    axis: Axis
    columns: list[Column]
    rows: list[DotRow]
    references: list[Reference] = field(default_factory=list)
    legend: list[Key] = field(default_factory=list)
    connected: bool = False
    """Whether a bar joins the dots of a row, in the colour of the last."""


def describe(dots: Dots) -> str:
    return described(
        f"{dots.title}, {dots.axis.title}" if dots.axis.title else dots.title,
        dots.subtitle,
        Frame(dots.rows, dots.columns).describe(),
    )


def chart(dots: Dots) -> alt.TopLevelMixin:
    import altair as alt

    values = [value for row in dots.rows for dot in row.dots for value in (dot.at, dot.low, dot.high)]
    scaled = fitted(dots.axis, [*values, *(reference.at for reference in dots.references)], margin=0.05)
    frame = Frame(dots.rows, dots.columns)
    told, y, own = frame.tooltip(), frame.y, alt.Color("colour:N", scale=None)
    drawn: list[dict[str, Any]] = [
        {
            **frame.fields(i),
            "at": dot.at,
            "low": dot.low,
            "high": dot.high,
            "colour": colour(dot.colour),
            "shape": dot.shape,
        }
        for i, row in enumerate(dots.rows)
        for dot in row.dots
    ]

    def x(name: str = "at") -> alt.X:
        return alt.X(f"{name}:Q", title=scaled.title, axis=scaled.drawn(), scale=scaled.scale())

    def of_shape(shape: str) -> alt.Chart:
        return drawn_from(row for row in drawn if row["shape"] == shape)

    layers = [*references(dots.references, x, scaled)]
    if dots.connected:
        joined = [
            {**frame.fields(i), "low": first.at, "high": last.at, "colour": colour(last.colour)}
            for i, row in enumerate(dots.rows)
            if row.dots
            for first, last in [(row.dots[0], row.dots[-1])]
        ]
        bar = drawn_from(joined).mark_rule(strokeWidth=3, opacity=0.55)
        layers.append(bar.encode(x=x("low"), x2="high:Q", y=y, color=own))
    layers += [
        *frame.whiskers(drawn, x, {"color": own}),
        of_shape("ring").mark_point(size=60, strokeWidth=1.8, opacity=1).encode(x=x(), y=y, color=own, tooltip=told),
        of_shape("dot").mark_point(filled=True, size=60, opacity=0.85).encode(x=x(), y=y, color=own, tooltip=told),
        of_shape("tick")
        .mark_tick(thickness=2, size=16, opacity=1, orient="vertical")
        .encode(x=x(), y=y, color=own, tooltip=told),
    ]
    sides: tuple[tuple[bool, Align, int, str], ...] = ((False, "left", 7, "high"), (True, "right", -7, "low"))
    for far, align, dx, end in sides:
        noted = [
            {**frame.fields(i), "beside": getattr(dot, end) or dot.at, "note": row.note}
            for i, row in enumerate(dots.rows)
            if row.note and row.dots
            for dot in row.dots[-1:]
            if (scaled.share(dot.at) > 0.5) == far
        ]
        mark = drawn_from(noted).mark_text(align=align, dx=dx, fontSize=10, color=colour("muted"))
        layers.append(mark.encode(x=x("beside"), y=y, text="note:N", tooltip=told))
    return alt.layer(*layers, *frame.layers(), *keys(dots.legend)).properties(
        width="container", height=frame.height_px, **heading(dots.title, dots.subtitle)
    )
