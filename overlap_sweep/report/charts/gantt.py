"""What ran when: lanes of spans in groups below each other, on one time axis that begins with each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlap_sweep.report.charts.palette import colour
from overlap_sweep.report.charts.parts import described, detail_fields, drawn_from, heading, tooltip

if TYPE_CHECKING:
    import altair as alt

ROW_PX = 17


@dataclass(frozen=True)
class Bar:
    start: float
    end: float
    colour: str
    details: dict[str, str] = field(default_factory=dict)
    """What the tooltip says, by title."""


@dataclass(frozen=True)
class Lane:
    name: str
    bars: list[Bar]


@dataclass(frozen=True)
class Extent:
    """A stretch of the group as a whole, such as a pass."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Group:
    title: str
    lanes: list[Lane]
    """From top to bottom."""
    extents: list[Extent]
    """Above the lanes."""


@dataclass(frozen=True)
class Gantt:
    title: str
    unit: str
    groups: list[Group]
    subtitle: str = ""


def describe(gantt: Gantt) -> str:
    said = (f"{group.title}: {', '.join(extent.text for extent in group.extents)}" for group in gantt.groups)
    return described(f"Timeline of streams, {gantt.title}", gantt.subtitle, said)


def chart(gantt: Gantt) -> alt.TopLevelMixin:
    import altair as alt

    rows, titles, extents, bars = _rows(gantt.groups)
    end = max(one["end"] for one in (*extents, *bars))
    x_axis = alt.Axis(format=",.0f", tickCount=8, domain=False, ticks=False, titleAnchor="end")
    names = alt.Axis(
        labelExpr="split(datum.label, '|')[1]", domain=False, ticks=False, labelLimit=210, labelPadding=6, grid=False
    )
    y = alt.Y("row:N", sort=rows, title=None, axis=names, scale=alt.Scale(domain=rows, paddingInner=0.12))

    def x(name: str) -> alt.X:
        return alt.X(f"{name}:Q", title=gantt.unit, scale=alt.Scale(domain=[0, end], nice=False), axis=x_axis)

    # A border of the page's colour parts neighbours, and would hide what is as thin as it.
    wide = f"datum.end - datum.start > {end / 250}"
    own = alt.Color("colour:N", scale=None)
    spans = (
        drawn_from(bars)
        .mark_bar(height=ROW_PX * 0.82, strokeWidth=0.7)
        .encode(
            stroke=alt.when(wide).then(alt.value(colour("page"))).otherwise(alt.Stroke("colour:N", scale=None)),
            x=x("start"),
            x2="end:Q",
            y=y,
            color=own,
            tooltip=_tooltip(gantt),
        )
    )
    whole = drawn_from(extents)
    told = tooltip({"setting": "", "takes": ""})
    band = whole.mark_bar(height=ROW_PX, color=colour("panel"), stroke=colour("line"), cornerRadius=3)
    said = whole.transform_calculate(middle="(datum.start + datum.end) / 2").mark_text(fontSize=11)
    title = drawn_from(titles).mark_text(align="left", fontSize=12, fontWeight=600, dy=-ROW_PX)
    border = drawn_from({"end": extent["end"]} for extent in extents).mark_rule(color=colour("line"), strokeDash=[3, 3])
    return alt.layer(
        border.encode(x=x("end")),
        band.encode(x=x("start"), x2="end:Q", y=y, tooltip=told),
        said.encode(x=x("middle"), y=y, text="text:N", tooltip=told),
        spans,
        title.encode(x=alt.value(0), y=y, text="title:N"),
    ).properties(
        width="container",
        height=ROW_PX * len(rows),
        **heading(gantt.title, gantt.subtitle),
    )


Rows = list[dict[str, Any]]


def _rows(groups: Sequence[Group]) -> tuple[list[str], Rows, Rows, Rows]:
    """Returns the rows from top to bottom, a gap between groups, and what is drawn in them: titles, extents, bars.

    What a row is called follows its '|'.
    """
    rows: list[str] = []
    titles: Rows = []
    extents: Rows = []
    bars: Rows = []
    for number, group in enumerate(groups):
        head = f"{number}|"
        rows += [*([f"gap{number}|"] if rows else []), head]
        titles.append({"row": head, "title": group.title})
        for extent in group.extents:
            told = detail_fields({"setting": group.title, "takes": extent.text})
            extents.append({"row": head, "start": extent.start, "end": extent.end, "text": extent.text, **told})
        for lane in group.lanes:
            rows.append(f"{head}{lane.name}")
            bars += [
                {
                    "row": rows[-1],
                    "start": bar.start,
                    "end": bar.end,
                    "colour": colour(bar.colour),
                    **detail_fields(bar.details),
                }
                for bar in lane.bars
            ]
    return rows, titles, extents, bars


def _tooltip(gantt: Gantt) -> list[alt.Tooltip]:
    details: Mapping[str, str] = next(
        (bar.details for group in gantt.groups for lane in group.lanes for bar in lane.bars), {}
    )
    return tooltip(details)
