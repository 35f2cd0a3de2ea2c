"""Lines over a quantity, with noise at their points; levels, areas and what else stands beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlap_sweep.report.charts.palette import SERIES, colour
from overlap_sweep.report.charts.parts import (
    Axis,
    Scaled,
    described,
    detail_fields,
    drawn_from,
    fitted,
    heading,
    number_text,
    spread,
    tooltip,
)

if TYPE_CHECKING:
    import altair as alt

HEIGHT_PX = 230
LOW_PX = 115
"""Of a chart without a line: there is little to see in it."""
LABEL_GAP_PX = 14.0
LEGEND_ROW_PX = 16
NOTES_SHARE = 0.1
"""Of the height, left for notes below the points."""
SUBTITLE_WIDTH = 150
"""In characters: as long as a chart is wide that stands alone."""
MOST_TICKS = 20
"""Places that are ticks one by one."""
MOST_SAID = 8
"""Points of a line that the description has one by one."""
LONG_LABEL = 8
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")


@dataclass(frozen=True)
class LinePoint:
    x: float
    y: float
    low: float | None = None
    """With its noise, to `high`."""
    high: float | None = None
    part: int = 0
    """A line does not go from one part to another, as where steps were not recorded."""
    ringed: bool = False
    """What was chosen; `label` stands below it, others' above."""
    label: str = ""
    colour: str = ""
    """Instead of the line's; likewise the shape."""
    shape: str = ""
    details: dict[str, str] = field(default_factory=dict)
    """What the tooltip says, by title."""


@dataclass(frozen=True)
class Line:
    name: str
    points: list[LinePoint]
    colour: str
    shape: str = "circle"
    """Of its points; empty where they are not marked."""
    dash: Sequence[int] = (1, 0)
    width_px: float = 1.8
    connected: bool = True
    label: str | None = None
    """At its end; None: its name."""
    label_y: float | None = None
    """Where the label stands; None: where the line ends."""


@dataclass(frozen=True)
class Level:
    """What does not change along the axis, or what lines are compared with."""

    name: str
    y: float
    colour: str
    low: float | None = None
    high: float | None = None
    dash: Sequence[int] = (1, 0)
    width_px: float = 1.5
    label: str | None = None
    """At the right; None: its name."""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Area:
    """Between the `low` and the `high` of its points."""

    name: str
    points: list[LinePoint]
    colour: str
    opacity: float
    label_y: float


@dataclass(frozen=True)
class Event:
    """What happened at a place of the axis: a triangle at the top."""

    x: float
    label: str


@dataclass(frozen=True)
class Note:
    """Words at the foot of the plot."""

    x: float
    text: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lines:
    title: str
    subtitle: str
    x: Axis
    y: Axis
    lines: list[Line]
    """From the lowest to the topmost."""
    levels: list[Level] = field(default_factory=list)
    areas: list[Area] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    shaded: list[tuple[float, float]] = field(default_factory=list)
    """From where to where on the axis the background is grey."""
    legend: bool = False
    """Whether names stand above the plot, as of lines that lie on each other, and not at their ends."""
    subtitle_width: int = SUBTITLE_WIDTH

    @property
    def height_px(self) -> int:
        """Low without a line, but with room for the labels."""
        low_px = max(LOW_PX, round(LABEL_GAP_PX * (len(self.levels) - 1)))
        return HEIGHT_PX if any(line.points for line in self.lines) else low_px


def looks_of(names: Sequence[str], wanted: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Returns colour and shape by name: its own of what is in several charts, unless two of one chart would look the
    same. Then the later one takes the next colour that is free there, or a shape that its colour has not yet."""
    taken: dict[str, tuple[str, str]] = {}
    for name in sorted(names, key=lambda name: wanted[name]):
        at = wanted[name]
        looks = [(SERIES[(at + i) % len(SERIES)], SHAPES[(at + i) % len(SHAPES)]) for i in range(len(SERIES))]
        looks += [(series, shape) for series in SERIES for shape in SHAPES]
        colours = {series for series, _ in taken.values()}
        free = [look for look in looks if look not in taken.values()]
        taken[name] = next((look for look in free if look[0] not in colours), (free or looks)[0])
    return taken


def describe(lines: Lines) -> str:
    def value(point: LinePoint) -> str:
        at = number_text(point.x, lines.x.format)
        words = point.label or ("chosen" if point.ringed else "")
        return f"{number_text(point.y, lines.y.format)} at {at}{f' ({words})' if words else ''}"

    said = []
    for line in lines.lines:
        shown = line.points if len(line.points) <= MOST_SAID else [line.points[0], line.points[-1]]
        if shown:
            said.append(f"{line.name} {', '.join(map(value, shown))}")
    said += [f"{level.label or level.name} {number_text(level.y, lines.y.format)}" for level in lines.levels]
    said += [f"{event.label} stands out" for event in lines.events]
    return described(f"{lines.title}, {lines.y.title} over {lines.x.title}", lines.subtitle, said)


def chart(lines: Lines) -> alt.TopLevelMixin:
    import altair as alt

    across, up = _scaled_x(lines), _scaled_y(lines)
    count = 5 if lines.height_px == HEIGHT_PX else 3
    places = sorted({point.x for point in _points(lines)})
    ticks = {"values": places} if len(places) <= MOST_TICKS else {"tickMinStep": 1}

    def x(name: str = "x") -> alt.X:
        axis = alt.Axis(format=lines.x.format or "d", grid=False, labelOverlap="greedy", tickSize=4, **ticks)
        return alt.X(f"{name}:Q", title=lines.x.title, scale=across.scale(), axis=axis)

    def y(name: str = "y") -> alt.Y:
        return alt.Y(f"{name}:Q", title=up.title, scale=up.scale(), axis=up.drawn(count, minExtent=38))

    whole = {"x": alt.value(0), "x2": alt.value("width")}
    own = alt.Color("colour:N", scale=None)
    layers: list[alt.Chart] = []
    if lines.shaded:
        grey = drawn_from({"from": begin, "to": end} for begin, end in lines.shaded)
        layers.append(
            grey.mark_rect(color=colour("faint"), clip=True).encode(
                x=x("from"), x2="to:Q", y=alt.value(0), y2=alt.value("height")
            )
        )
    for area in lines.areas:
        drawn = drawn_from({"x": at.x, "low": at.low, "high": at.high, "part": at.part} for at in area.points)
        mark = drawn.mark_area(color=colour(area.colour), opacity=area.opacity, clip=True)
        layers.append(mark.encode(x=x(), y=y("low"), y2="high:Q", detail="part:N"))
    for level in lines.levels:
        drawn, told = drawn_from([{**_fields(level), "low": level.low, "high": level.high}]), tooltip(level.details)
        if level.low is not None and level.high != level.low:
            band = drawn.mark_rect(opacity=0.15, color=colour(level.colour))
            layers.append(band.encode(y=y("low"), y2="high:Q", **whole))
        rule = drawn.mark_rule(color=colour(level.colour), strokeDash=list(level.dash), strokeWidth=level.width_px)
        layers.append(rule.encode(y=y(), tooltip=told, **whole))
    layers += _drawn_lines(lines, x, y)
    layers += _events(lines.events, x)
    if lines.notes:
        noted = drawn_from({**_fields(note), "text": note.text} for note in lines.notes)
        layers.append(
            noted.mark_text(dy=-7, fontSize=10, color=colour("muted")).encode(
                x=x(), y=alt.value("height"), text="text:N", tooltip=tooltip(lines.notes[0].details)
            )
        )
    if lines.legend:
        layers += _legend(lines.lines)
    elif labels := _labels(lines, across, up):
        named = drawn_from(labels)
        leaders = drawn_from(label for label in labels if label["x"] is not None)
        layers += [
            leaders.mark_rule(strokeWidth=0.8, strokeDash=[1, 2]).encode(
                x=x(), x2="edge:Q", y=y(), y2="label_y:Q", color=own
            ),
            named.mark_text(align="left", dx=3).encode(x=x("edge"), y=y("label_y"), text="text:N", color=own),
        ]
    subtitle = textwrap.wrap(lines.subtitle, lines.subtitle_width, max_lines=2, placeholder=" ...")
    return alt.layer(*layers).properties(width="container", height=lines.height_px, **heading(lines.title, subtitle))


def _fields(one: LinePoint | Level | Note) -> dict[str, Any]:
    """Returns where it is, and what its tooltip says."""
    names = ("x", "y") if isinstance(one, LinePoint) else ("y",) if isinstance(one, Level) else ("x",)
    return {name: getattr(one, name) for name in names} | detail_fields(one.details)


def _drawn_lines(lines: Lines, x: Any, y: Any) -> list[alt.Chart]:
    """Returns lines, noise, points, rings and labels, above each other in this order."""
    import altair as alt

    own = alt.Color("colour:N", scale=None)
    layers = []
    for line in lines.lines:
        if line.connected and line.points:
            drawn = drawn_from({"x": point.x, "y": point.y, "part": point.part} for point in line.points)
            mark = drawn.mark_line(
                clip=True, color=colour(line.colour), strokeDash=list(line.dash), strokeWidth=line.width_px
            )
            layers.append(mark.encode(x=x(), y=y(), detail="part:N"))
    points = [(point, line, colour(point.colour or line.colour)) for line in lines.lines for point in line.points]
    noisy = [
        {"x": point.x, "low": point.low, "high": point.high, "colour": shade}
        for point, _, shade in points
        if point.low is not None
    ]
    marked = [
        {**_fields(point), "colour": shade, "shape": point.shape or line.shape}
        for point, line, shade in points
        if point.shape or line.shape
    ]
    unmarked = [_fields(point) for point, line, _ in points if point.details and not (point.shape or line.shape)]
    ringed = [{**_fields(point), "label": point.label} for point, _, _ in points if point.ringed]
    across = _scaled_x(lines)
    labelled = [
        {**_fields(point), "label": point.label, "colour": shade, "align": _align(point.label, across.share(point.x))}
        for point, _, shade in points
        if point.label and not point.ringed
    ]
    told = tooltip(points[0][0].details) if points else []
    if noisy:
        layers.append(drawn_from(noisy).mark_rule(strokeWidth=1.5).encode(x=x(), y=y("low"), y2="high:Q", color=own))
    if marked:
        mark = drawn_from(marked).mark_point(filled=True, size=42, opacity=1, clip=True)
        layers.append(mark.encode(x=x(), y=y(), color=own, shape=alt.Shape("shape:N", scale=None), tooltip=told))
    if unmarked:
        mark = drawn_from(unmarked).mark_point(filled=True, size=60, opacity=0)
        layers.append(mark.encode(x=x(), y=y(), tooltip=told))
    if ringed:
        ring = drawn_from(ringed).mark_point(size=190, color=colour("ink"), strokeWidth=2, opacity=1)
        at_the_axis = any(across.share(row["x"]) < 0.06 for row in ringed)
        text = drawn_from(ringed).mark_text(dy=19, dx=18 if at_the_axis else 0, fontWeight=600)
        layers += [ring.encode(x=x(), y=y(), tooltip=told), text.encode(x=x(), y=y(), text="label:N")]
    if labelled:
        text = drawn_from(labelled).mark_text(dy=-14, fontWeight=600, align=alt.ExprRef("datum.align"))
        layers.append(text.encode(x=x(), y=y(), text="label:N", color=own, tooltip=told))
    return layers


def _align(label: str, share: float) -> str:
    """Returns on which side of its point a label is: a long one not beyond the plot."""
    if len(label) <= LONG_LABEL or 0.15 < share < 0.85:
        return "center"
    return "left" if share < 0.5 else "right"


def _events(events: Sequence[Event], x: Any) -> list[alt.Chart]:
    """Returns a triangle at the top and a line down for each."""
    import altair as alt

    if not events:
        return []
    at_top = alt.value(9)
    drawn = drawn_from({"x": one.x, "label": one.label} for one in events)
    rule = drawn.mark_rule(color=colour("bad"), strokeDash=[2, 3], strokeWidth=1, opacity=0.8)
    mark = drawn.mark_point(shape="triangle-down", size=64, filled=True, color=colour("bad"), opacity=1)
    label = drawn.mark_text(align="left", dx=7, color=colour("bad"), fontSize=10)
    return [
        rule.encode(x=x(), y=at_top, y2=alt.value("height")),
        mark.encode(x=x(), y=at_top),
        label.encode(x=x(), y=at_top, text="label:N"),
    ]


def _legend(lines: Sequence[Line]) -> list[alt.Chart]:
    """Returns names above the plot, one below the other, as narrow as the page may be."""
    import altair as alt

    drawn = []
    for i, line in enumerate(lines):
        at = alt.value(-LEGEND_ROW_PX * (len(lines) - i))
        rule = drawn_from([{}]).mark_rule(
            color=colour(line.colour), strokeWidth=line.width_px, strokeDash=list(line.dash)
        )
        text = drawn_from([{}]).mark_text(align="left", color=colour("muted"))
        drawn.append(rule.encode(x=alt.value(0), x2=alt.value(26), y=at))
        drawn.append(text.encode(x=alt.value(33), y=at, text=alt.value(line.name)))
    return drawn


def _labels(lines: Lines, across: Scaled, up: Scaled) -> list[dict[str, Any]]:
    """Returns names at the right edge, where nothing else is, so far apart that none lies on another."""
    ends: list[tuple[str, float, float | None, float, str]] = []
    for line in lines.lines:
        text = line.name if line.label is None else line.label
        if line.points and text:
            last = max(line.points, key=lambda point: point.x)
            place = (None, line.label_y) if line.label_y is not None else (last.x, last.y)
            ends.append((text, last.y, *place, line.colour))
    ends += [(area.name, area.label_y, None, area.label_y, area.colour) for area in lines.areas]
    for level in lines.levels:
        ends.append((level.label or level.name, level.y, across.high, level.y, level.colour))
    places = spread(
        [up.share(at) * lines.height_px for _, _, _, at, _ in ends], LABEL_GAP_PX, 0.0, float(lines.height_px)
    )
    return [
        {
            "text": text,
            "x": end_x,
            "y": end_y,
            "label_y": up.at(place_px / lines.height_px),
            "edge": across.at(1.03),
            "colour": colour(own),
        }
        for (text, end_y, end_x, _, own), place_px in zip(ends, places, strict=True)
    ]


def _points(lines: Lines) -> list[LinePoint]:
    curves: list[Line | Area] = [*lines.lines, *lines.areas]
    return [point for curve in curves for point in curve.points]


def _places(lines: Lines) -> list[float]:
    return [point.x for point in _points(lines)] + [end for ends in lines.shaded for end in ends]


def _scaled_x(lines: Lines) -> Scaled:
    """Returns the axis from a little before the first to a little after the last point."""
    places = _places(lines) or [1.0]
    first, last = min(places), max(places)
    if lines.x.logarithmic:
        factor = (last / first) ** 0.04 if last > first else 1.12
        return Scaled(lines.x, first / factor, last * factor, logarithmic=True)
    margin = 0.04 * (last - first) if last > first else 0.5
    return Scaled(lines.x, first - margin, last + margin, logarithmic=False)


def _scaled_y(lines: Lines) -> Scaled:
    values = [value for point in _points(lines) for value in (point.y, point.low, point.high)]
    values += [value for level in lines.levels for value in (level.y, level.low, level.high)]
    up = fitted(lines.y, values)
    return Scaled(up.axis, up.at(-NOTES_SHARE), up.high, up.logarithmic) if lines.notes else up
