"""Draws lines over a quantity, with noise at their points, and what stands beside them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from overlap_sweep.report.charts import Area, Event, Level, Line, LinePoint, Lines
from overlap_sweep.report.charts.palette import colour
from overlap_sweep.report.charts.vega import (
    OWN_COLOUR,
    Json,
    Scaled,
    chart,
    constant,
    described,
    detail_fields,
    fitted,
    layer,
    place,
    tooltip,
)

HEIGHT_PX = 230
LOW_PX = 115
"""Of a chart without a line: there is little to see in it."""
LABEL_GAP_PX = 14.0
LEGEND_ROW_PX = 16
NOTES_SHARE = 0.1
"""Of the height, left for notes below the points."""
MOST_TICKS = 20
"""Places that are ticks one by one."""
MOST_SAID = 8
"""Points of a line that the description has one by one."""
LONG_LABEL = 8


def describe_lines(lines: Lines) -> str:
    """Returns what lines show, in words."""

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


def number_text(value: float, form: str = "") -> str:
    """Returns a value as it is said; `form` is its axis's."""
    if form.endswith("%"):
        return f"{value:{'+' if form.startswith('+') else ''}.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw_lines(lines: Lines) -> Json:
    """Returns the chart's specification."""
    across, up, height_px = _scaled_x(lines), _scaled_y(lines), _height_px(lines)
    count = 5 if height_px == HEIGHT_PX else 3
    places = sorted({point.x for point in _points(lines)})
    ticks: Json = {"values": places} if len(places) <= MOST_TICKS else {"tickMinStep": 1}
    axis = {"format": lines.x.format or "d", "grid": False, "labelOverlap": "greedy", "tickSize": 4, **ticks}

    def x(name: str = "x") -> Json:
        return place(name, lines.x.title, across.scale(), axis)

    def y(name: str = "y") -> Json:
        return up.place(name, count=count, minExtent=38)

    whole = {"x": constant(0), "x2": constant("width")}
    layers = []
    if lines.shaded:
        grey = [{"from": begin, "to": end} for begin, end in lines.shaded]
        style: Json = {"color": colour("faint"), "clip": True}
        layers.append(layer("rect", grey, style, x=x("from"), x2="to", y=constant(0), y2=constant("height")))
    for area in lines.areas:
        between = [{"x": at.x, "low": at.low, "high": at.high, "part": at.part} for at in area.points]
        style = {"color": colour(area.colour), "opacity": area.opacity, "clip": True}
        layers.append(layer("area", between, style, x=x(), y=y("low"), y2="high", detail="part"))
    for level in lines.levels:
        rows = [{"y": level.y, **detail_fields(level.details), "low": level.low, "high": level.high}]
        if level.low is not None and level.high != level.low:
            style = {"opacity": 0.15, "color": colour(level.colour)}
            layers.append(layer("rect", rows, style, y=y("low"), y2="high", **whole))
        layers.append(layer("rule", rows, _stroke(level), y=y(), tooltip=tooltip(level.details), **whole))
    layers += _drawn_lines(lines, x, y, across)
    layers += _events(lines.events, x)
    if lines.notes:
        noted = [{"x": note.x, **detail_fields(note.details), "text": note.text} for note in lines.notes]
        style = {"dy": -7, "fontSize": 10, "color": colour("muted")}
        told = tooltip(lines.notes[0].details)
        layers.append(layer("text", noted, style, x=x(), y=constant("height"), text="text", tooltip=told))
    if lines.legend:
        layers += _legend(lines.lines)
    elif labels := _labels(lines, across, up, height_px):
        leaders = [label for label in labels if label["x"] is not None]
        style, beside = {"strokeWidth": 0.8, "strokeDash": [1, 2]}, {"align": "left", "dx": 3}
        layers += [
            layer("rule", leaders, style, x=x(), x2="edge", y=y(), y2="label_y", color=OWN_COLOUR),
            layer("text", labels, beside, x=x("edge"), y=y("label_y"), text="text", color=OWN_COLOUR),
        ]
    subtitle = textwrap.wrap(lines.subtitle, lines.subtitle_width, max_lines=2, placeholder=" ...")
    return chart(layers, height_px, lines.title, subtitle)


def _stroke(line: Line | Level) -> Json:
    return {"color": colour(line.colour), "strokeDash": list(line.dash), "strokeWidth": line.width_px}


def _drawn_lines(lines: Lines, x: Any, y: Any, across: Scaled) -> list[Json]:
    """Returns lines, noise, points, rings and labels, above each other in this order."""
    layers = []
    for line in lines.lines:
        if line.connected and line.points:
            rows = [{"x": point.x, "y": point.y, "part": point.part} for point in line.points]
            layers.append(layer("line", rows, {"clip": True, **_stroke(line)}, x=x(), y=y(), detail="part"))
    noisy, marked, unmarked, ringed, labelled = [], [], [], [], []
    for line in lines.lines:
        for point in line.points:
            fields = {"x": point.x, "y": point.y, **detail_fields(point.details)}
            own = {"colour": colour(point.colour or line.colour)}
            shape = point.shape or line.shape
            if point.low is not None:
                noisy.append({"x": point.x, "low": point.low, "high": point.high, **own})
            if shape:
                marked.append({**fields, **own, "shape": shape})
            elif point.details:
                unmarked.append(fields)
            if point.ringed:
                ringed.append({**fields, "label": point.label})
            elif point.label:
                align = _align(point.label, across.share(point.x))
                labelled.append({**fields, "label": point.label, **own, "align": align})
    told = tooltip(next((point.details for line in lines.lines for point in line.points), {}))
    if noisy:
        layers.append(layer("rule", noisy, {"strokeWidth": 1.5}, x=x(), y=y("low"), y2="high", color=OWN_COLOUR))
    if marked:
        style: Json = {"filled": True, "size": 42, "opacity": 1, "clip": True}
        shapes = {"field": "shape", "scale": None, "type": "nominal"}
        layers.append(layer("point", marked, style, x=x(), y=y(), color=OWN_COLOUR, shape=shapes, tooltip=told))
    if unmarked:
        layers.append(layer("point", unmarked, {"filled": True, "size": 60, "opacity": 0}, x=x(), y=y(), tooltip=told))
    if ringed:
        ring = {"size": 190, "color": colour("ink"), "strokeWidth": 2, "opacity": 1}
        at_the_axis = any(across.share(row["x"]) < 0.06 for row in ringed)
        words = {"dy": 19, "dx": 18 if at_the_axis else 0, "fontWeight": 600}
        layers.append(layer("point", ringed, ring, x=x(), y=y(), tooltip=told))
        layers.append(layer("text", ringed, words, x=x(), y=y(), text="label"))
    if labelled:
        style = {"dy": -14, "fontWeight": 600, "align": {"expr": "datum.align"}}
        layers.append(layer("text", labelled, style, x=x(), y=y(), text="label", color=OWN_COLOUR, tooltip=told))
    return layers


def _align(label: str, share: float) -> str:
    """Returns on which side of its point a label is: a long one not beyond the plot."""
    if len(label) <= LONG_LABEL or 0.15 < share < 0.85:
        return "center"
    return "left" if share < 0.5 else "right"


def _events(events: Sequence[Event], x: Any) -> list[Json]:
    """Returns a triangle at the top and a line down for each."""
    if not events:
        return []
    at_top, rows = constant(9), [{"x": one.x, "label": one.label} for one in events]
    rule = {"color": colour("bad"), "strokeDash": [2, 3], "strokeWidth": 1, "opacity": 0.8}
    mark = {"shape": "triangle-down", "size": 64, "filled": True, "color": colour("bad"), "opacity": 1}
    label = {"align": "left", "dx": 7, "color": colour("bad"), "fontSize": 10}
    return [
        layer("rule", rows, rule, x=x(), y=at_top, y2=constant("height")),
        layer("point", rows, mark, x=x(), y=at_top),
        layer("text", rows, label, x=x(), y=at_top, text="label"),
    ]


def _legend(lines: Sequence[Line]) -> list[Json]:
    """Returns names above the plot, one below the other, as narrow as the page may be."""
    drawn = []
    for i, line in enumerate(lines):
        y = constant(-LEGEND_ROW_PX * (len(lines) - i))
        words = {"align": "left", "color": colour("muted")}
        drawn.append(layer("rule", [{}], _stroke(line), x=constant(0), x2=constant(26), y=y))
        drawn.append(layer("text", [{}], words, x=constant(33), y=y, text=constant(line.name)))
    return drawn


def _labels(lines: Lines, across: Scaled, up: Scaled, height_px: int) -> list[Json]:
    """Returns names at the right edge, where nothing else is, so far apart that none lies on another."""
    ends: list[tuple[str, float, float | None, float, str]] = []
    for line in lines.lines:
        text = line.name if line.label is None else line.label
        if line.points and text:
            last = max(line.points, key=lambda point: point.x)
            at = (None, line.label_y) if line.label_y is not None else (last.x, last.y)
            ends.append((text, last.y, *at, line.colour))
    ends += [(area.name, area.label_y, None, area.label_y, area.colour) for area in lines.areas]
    for level in lines.levels:
        ends.append((level.label or level.name, level.y, across.high, level.y, level.colour))
    places = spread([up.share(at) * height_px for _, _, _, at, _ in ends], LABEL_GAP_PX, 0.0, float(height_px))
    return [
        {
            "text": text,
            "x": end_x,
            "y": end_y,
            "label_y": up.at(place_px / height_px),
            "edge": across.at(1.03),
            "colour": colour(own),
        }
        for (text, end_y, end_x, _, own), place_px in zip(ends, places, strict=True)
    ]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Returns places as near to the wanted ones as can be, in their order, `gap` apart and within `low` to `high`.

    Neighbours that would overlap share their displacement. Where there are too many for the room, they overflow at
    `high`.
    """

    def reach(members: Sequence[int]) -> float:
        return (len(members) - 1) * gap / 2

    def within(centre: float, members: Sequence[int]) -> float:
        return max(low + reach(members), min(centre, high - reach(members)))

    blocks: list[tuple[float, list[int]]] = []
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        blocks.append((within(wanted[i], [i]), [i]))
        while len(blocks) > 1 and blocks[-1][0] - reach(blocks[-1][1]) < blocks[-2][0] + reach(blocks[-2][1]) + gap:
            (one, before), (other, after) = blocks.pop(-2), blocks.pop()
            members = before + after
            blocks.append((within((one * len(before) + other * len(after)) / len(members), members), members))
    places = [0.0] * len(wanted)
    for centre, members in blocks:
        for rank, i in enumerate(members):
            places[i] = centre + (rank - (len(members) - 1) / 2) * gap
    return places


def _height_px(lines: Lines) -> int:
    """Low without a line, but with room for the labels."""
    low_px = max(LOW_PX, round(LABEL_GAP_PX * (len(lines.levels) - 1)))
    return HEIGHT_PX if any(line.points for line in lines.lines) else low_px


def _points(lines: Lines) -> list[LinePoint]:
    curves: list[Line | Area] = [*lines.lines, *lines.areas]
    return [point for curve in curves for point in curve.points]


def _scaled_x(lines: Lines) -> Scaled:
    """Returns the axis from a little before the first to a little after the last point."""
    places = [point.x for point in _points(lines)] + [end for ends in lines.shaded for end in ends] or [1.0]
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
