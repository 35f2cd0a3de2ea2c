"""Times as bars, each cut into what is computed, what communication or copies add, and what overlap hides of them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlap_sweep.report.page.chart_parts import drawn_from, header, tooltip
from overlap_sweep.report.page.palette import colour

if TYPE_CHECKING:
    import altair as alt

LINE_PX = 14
ROW_GAP_PX = 12
NAME_CHARACTERS = 48
MOST_LINES = 4
LEGEND_PX = 6
"""Width of a letter, about."""
LEGEND_Y_PX = -28


@dataclass(frozen=True)
class Part:
    """What a piece of every bar is."""

    name: str
    colour: str
    opacity: float


@dataclass(frozen=True)
class TimeBar:
    """One row."""

    name: str
    """In lines; different for each row."""
    ends: list[float]
    """Where each part ends; the next one begins there."""
    low: float
    high: float
    """Of the time itself, with its noise."""
    at: float
    """The time itself."""
    cells: list[str]
    """What stands on the right, by column."""
    chosen: bool
    told: dict[str, str]
    """What the tooltip says, by title."""


@dataclass(frozen=True)
class BarsPanel:
    title: str
    subtitle: str
    axis: str
    parts: list[Part]
    columns: list[str]
    widths_px: list[int]
    """Of the columns."""
    bars: list[TimeBar]


def cut(base: float, time: float, whole: float) -> list[float]:
    """The ends of three parts: the base, what stands above it in the time, and what is hidden of the whole."""
    return [min(base, time), time, max(time, whole)]


def lines_of(names: Sequence[str]) -> list[str]:
    """Names broken into lines, none like another."""
    broken = [
        "\n".join(textwrap.wrap(name, NAME_CHARACTERS, max_lines=MOST_LINES, placeholder=" ...")) for name in names
    ]
    return [f"{name} ({i})" if broken.count(name) > 1 else name for i, name in enumerate(broken, start=1)]


def describe(panel: BarsPanel) -> str:
    said = (f"{' '.join(bar.name.split())}: {', '.join(cell for cell in bar.cells if cell)}" for bar in panel.bars)
    return f"{panel.title}: {panel.subtitle}. {'; '.join(said)}."


def chart(panel: BarsPanel) -> alt.TopLevelMixin:
    import altair as alt

    lines = max(bar.name.count("\n") + 1 for bar in panel.bars)
    rows: list[dict[str, Any]] = [
        {
            "name": bar.name,
            "low": bar.low,
            "high": bar.high,
            "weight": 700 if bar.chosen else 400,
            "up_px": -LINE_PX * bar.name.count("\n") / 2,
            **{f"cell{i}": cell for i, cell in enumerate(bar.cells)},
            **{f"told{i}": text for i, text in enumerate(bar.told.values())},
        }
        for bar in panel.bars
    ]
    told = tooltip({f"told{i}": title for i, title in enumerate(panel.bars[0].told)})
    pieces = [
        {**row, "start": start, "end": end, "colour": colour(part.colour), "opacity": part.opacity}
        for bar, row in zip(panel.bars, rows, strict=True)
        for part, start, end in zip(panel.parts, [0.0, *bar.ends], bar.ends, strict=False)
        if end > start
    ]
    base, cut_up = drawn_from(rows), drawn_from(pieces)
    furthest = max(max(bar.ends[-1], bar.high) for bar in panel.bars)
    scale = alt.Scale(domain=[0, furthest * 1.02], nice=False)
    # An axis would not centre names of several lines.
    y = alt.Y("name:N", sort=[bar.name for bar in panel.bars], title=None, axis=None)
    names = base.mark_text(
        align="right",
        baseline="middle",
        dx=-8,
        dy=alt.ExprRef("datum.up_px"),
        fontSize=12,
        lineBreak="\n",
        lineHeight=LINE_PX,
        fontWeight=alt.ExprRef("datum.weight"),
    )

    def x(field: str) -> alt.X:
        x_axis = alt.Axis(tickCount=6, domain=False, ticks=False, format="~s" if furthest >= 10_000 else ".3~g")
        return alt.X(f"{field}:Q", title=panel.axis, axis=x_axis, scale=scale)

    def column(i: int, right_px: int) -> list[alt.Chart]:
        mark = base.mark_text(align="right", dx=right_px, fontSize=12, fontWeight=alt.ExprRef("datum.weight"))
        text = mark.encode(x=alt.value("width"), y=y, text=f"cell{i}:N", tooltip=told)
        return [header(panel.columns[i], alt.value("width"), right_px, "right"), text]

    layers = [
        cut_up.mark_bar(height=13).encode(
            x=x("start"),
            x2="end:Q",
            y=y,
            color=alt.Color("colour:N", scale=None),
            opacity=alt.Opacity("opacity:Q", scale=None),
            tooltip=told,
        ),
        base.mark_rule(color=colour("ink"), strokeWidth=1.5).encode(x=x("low"), x2="high:Q", y=y, tooltip=told),
        *(
            base.mark_tick(color=colour("ink"), thickness=1.5, size=8, orient="vertical").encode(x=x(end), y=y)
            for end in ("low", "high")
        ),
        names.encode(x=alt.value(0), y=y, text="name:N", tooltip=told),
        *_legend(panel.parts),
    ]
    right_px = 0
    for i, width_px in enumerate(panel.widths_px):
        right_px += width_px
        layers += column(i, right_px)
    title = alt.TitleParams(panel.title, subtitle=panel.subtitle, offset=14)
    height = (LINE_PX * lines + ROW_GAP_PX) * len(panel.bars)
    return alt.layer(*layers).properties(width="container", height=height, title=title)


def _legend(parts: Sequence[Part]) -> list[alt.Chart]:
    """Above the bars and the columns' names, from the left."""
    import altair as alt

    drawn, at_px = [], 0
    for part in parts:
        square = drawn_from([{}]).mark_square(size=90, color=colour(part.colour), opacity=part.opacity)
        text = drawn_from([{}]).mark_text(align="left", color=colour("muted"))
        drawn.append(square.encode(x=alt.value(at_px + 5), y=alt.value(LEGEND_Y_PX)))
        drawn.append(text.encode(x=alt.value(at_px + 14), y=alt.value(LEGEND_Y_PX), text=alt.value(part.name)))
        at_px += 34 + LEGEND_PX * len(part.name)
    return drawn
