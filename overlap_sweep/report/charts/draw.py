"""Draws the three forms: rows of bars and dots with cells beside them, lines over a quantity, timelines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from overlap_sweep.report.charts import Gantt, Key, Line, Lines, Reference, Row, Rows
from overlap_sweep.report.charts.palette import colour
from overlap_sweep.report.charts.vega import (
    LETTER_PX,
    NAME_PX,
    OWN_COLOUR,
    OWN_SHAPE,
    Json,
    chart,
    constant,
    detail_fields,
    layer,
    legend,
    place,
    row_axis,
    row_keys,
    tooltip,
)

LINES_PX = 230
LANE_PX = 17
MOST_TICKS = 20
"""Places that are ticks one by one."""


NARROW_LETTERS = 44
"""Letters of a line on a narrow screen."""
MOST_LETTERS = 16
"""Letters of a cell on a narrow screen; a column with longer ones has its texts below the rows' names."""
LINE_PX = 13


@dataclass(frozen=True)
class _Layout:
    """Places of a row's name, cells and bar; heights in pixels below the row's middle."""

    row_px: float
    bar_px: float
    cells_px: float
    gap_px: int
    """Between columns of cells."""
    references_px: int
    """Place of the references' names, from the top of the plot."""
    name_px: float | None = None
    """None: the axis has the names."""

    def with_lines(self, count: int) -> _Layout:
        """Returns the layout with this many lines for names, above the cells."""
        half_px = LINE_PX * (count - 1) / 2
        assert self.name_px is not None
        return replace(
            self,
            row_px=self.row_px + 2 * half_px,
            bar_px=self.bar_px + half_px,
            cells_px=self.cells_px + half_px,
            name_px=self.name_px - half_px,
        )


_WIDE = _Layout(row_px=26, bar_px=0, cells_px=0, gap_px=20, references_px=-8)
_NARROW = _Layout(row_px=48, bar_px=15, cells_px=-1, gap_px=10, references_px=-24, name_px=-20)


def draw_rows(rows: Rows) -> Json:
    """Returns the chart's specification: names on the left of the bars, cells on the right."""
    return _rows(rows, _WIDE)


def draw_narrow_rows(rows: Rows) -> Json:
    """Returns the same for a narrow screen: each row's name, long cells and short cells above its bar, all whole."""
    long = [
        j for j in range(len(rows.columns)) if any(len(row.cells[j]) > MOST_LETTERS for row in rows.rows if row.cells)
    ]
    short = [j for j in range(len(rows.columns)) if j not in long]
    named = [
        replace(row, name="\n".join(_lines(row, rows.columns, long)), cells=[row.cells[j] for j in short if row.cells])
        for row in rows.rows
    ]
    most_lines = max(row.name.count("\n") + 1 for row in named)
    return _rows(replace(rows, rows=named, columns=[rows.columns[j] for j in short]), _NARROW.with_lines(most_lines))


def _lines(row: Row, columns: Sequence[str], long: Sequence[int]) -> list[str]:
    """Returns the row's name and its cells in the columns `long`, in lines that fit a narrow screen."""
    texts = [row.name, *(f"{columns[j]}: {row.cells[j]}" for j in long if row.cells)]
    return [line for text in texts for line in textwrap.wrap(text, NARROW_LETTERS) or [text]]


def _rows(rows: Rows, layout: _Layout) -> Json:
    keys = row_keys((row.name, row.bold) for row in rows.rows)
    pieces, dots, noise, names = [], [], [], []
    for key, row in zip(keys, rows.rows, strict=True):
        own = {"row": key, **detail_fields(row.details)}
        cells = {f"cell{j}": cell for j, cell in enumerate(row.cells or [""] * len(rows.columns))}
        names.append({**own, "name": row.name, "weight": 700 if row.bold else 400, **cells})
        for part, start, end in zip(rows.parts, [0.0, *row.ends], row.ends, strict=False):
            pieces.append({**own, "start": start, "end": end, "colour": colour(row.colour or part.colour)})
        noise.append({"row": key, "low": row.low, "high": row.high, "colour": colour("ink")})
        for dot in row.dots:
            dots.append({**own, "at": dot.at, "colour": colour(dot.colour), "shape": dot.shape})
            noise.append({"row": key, "low": dot.low, "high": dot.high, "colour": colour(dot.colour)})
    axis = replace(rows.axis, from_zero=rows.axis.from_zero or bool(pieces))
    tips, y = tooltip(row.details for row in rows.rows), row_axis(keys, named=layout.name_px is None)
    bar = {"x": place("start", axis), "x2": "end", "color": OWN_COLOUR}
    at = {"x": place("at", axis), "color": OWN_COLOUR, "shape": OWN_SHAPE}
    lower = {"yOffset": layout.bar_px}
    layers = [layer("bar", pieces, {"height": 13, **lower}, y=y, tooltip=tips, **bar)] if pieces else []
    ends = rows.axis.domain or [piece["end"] for piece in pieces] + [dot["at"] for dot in dots]
    for one in rows.references:
        # At the right edge it would run into the cells' titles, at the left edge out of the plot.
        align = "right" if one.at > (min(ends) + max(ends)) / 2 else "left" if one.at <= min(ends) else "center"
        marked, muted = [{"at": one.at}], {"color": colour("muted"), "align": align}
        line = {"color": colour(one.colour), "strokeDash": list(one.dash)}
        above = constant(layout.references_px)
        layers.append(layer("rule", marked, line, x=place("at", axis)))
        layers.append(layer("text", marked, muted, x=place("at", axis), y=above, text=constant(one.name)))
    known = [one for one in noise if one["low"] is not None]
    spread = {"x": place("low", axis), "x2": "high", "color": OWN_COLOUR}
    layers.append(layer("rule", known, {"strokeWidth": 1.5, **lower}, y=y, **spread))
    layers.append(layer("point", dots, {"filled": True, "size": 60, "opacity": 1, **lower}, y=y, tooltip=tips, **at))
    if layout.name_px is not None:
        bold = {"fontWeight": {"expr": "datum.weight"}, "align": "left", "dy": layout.name_px, "limit": NAME_PX}
        bold |= {"baseline": "top", "lineBreak": "\n", "lineHeight": LINE_PX}
        layers.append(layer("text", names, bold, x=constant(0), y=y, text="name", tooltip=tips))
    edge, header = constant("width"), constant(-8)
    for j, (title, right_px) in enumerate(zip(rows.columns, _columns_px(rows, layout), strict=True)):
        style: Json = {"align": "right", "dx": right_px}
        layers.append(layer("text", [{}], {**style, "color": colour("muted")}, x=edge, y=header, text=constant(title)))
        style |= {"dy": layout.cells_px}
        layers.append(layer("text", names, style, x=edge, y=y, text=f"cell{j}", tooltip=tips))
    height_px = layout.row_px * len(keys)
    lengths = [[end - start for start, end in zip([0.0, *row.ends], row.ends, strict=False)] for row in rows.rows]
    parts = [part for j, part in enumerate(rows.parts) if any(len(own) > j and own[j] for own in lengths)]
    keys_above = legend([*parts, *rows.legend], offset_px=10 - layout.references_px)
    return chart([*layers, *keys_above], height_px, rows.title, rows.subtitle)


def _columns_px(rows: Rows, layout: _Layout) -> list[int]:
    """Returns where each column of cells ends, from the plot's right edge: beside it, or within it."""
    longest = [
        max(map(len, (title, *(row.cells[j] for row in rows.rows if row.cells))))
        for j, title in enumerate(rows.columns)
    ]
    ends_px = list(accumulate(layout.gap_px + LETTER_PX * letters for letters in longest))
    return ends_px if layout.name_px is None else [end_px - ends_px[-1] for end_px in ends_px]


def draw_lines(lines: Lines) -> Json:
    """Returns the chart's specification."""
    points = [point for line in lines.lines for point in line.points]
    places = sorted({point.x for point in points})
    ticks: Json = {"values": places} if len(places) <= MOST_TICKS else {"tickMinStep": 1}

    def x(name: str = "x") -> Json:
        return place(name, lines.x, **{"format": lines.x.format or "d", "grid": False, **ticks})

    def y(name: str = "y") -> Json:
        return place(name, lines.y, minExtent=38)

    layers = []
    for one in lines.references:
        across = {"x": constant(0), "x2": constant("width"), "tooltip": tooltip([one.details])}
        layers.append(layer("rule", [{"y": one.at, **detail_fields(one.details)}], _stroke(one), y=y(), **across))
    noisy, marked, ringed, labelled = [], [], [], []
    for line in lines.lines:
        if line.connected and line.points:
            rows = [{"x": point.x, "y": point.y} for point in line.points]
            layers.append(layer("line", rows, {"clip": True, **_stroke(line)}, x=x(), y=y()))
        for point in line.points:
            own = {"x": point.x, "y": point.y, "colour": colour(line.colour), **detail_fields(point.details)}
            # Points that are not marked have a tooltip too.
            mark = {"shape": line.shape or "circle", "opacity": 1 if line.shape else 0}
            marked += [{**own, **mark}] if line.shape or point.details else []
            noisy += [{**own, "low": point.low, "high": point.high}] if point.low is not None else []
            ringed += [own] if point.ringed else []
            labelled += [{**own, "label": point.label}] if point.label else []
    tips = tooltip(point.details for point in points)
    opacity = {"field": "opacity", "scale": None, "type": "quantitative"}
    look = {"color": OWN_COLOUR, "shape": OWN_SHAPE, "opacity": opacity}
    ring = {"size": 190, "color": colour("ink"), "strokeWidth": 2, "opacity": 1}
    words = {"dy": -14, "fontWeight": 600}
    layers += [
        layer("rule", noisy, {"strokeWidth": 1.5}, x=x(), y=y("low"), y2="high", color=OWN_COLOUR),
        layer("point", marked, {"filled": True, "size": 42, "clip": True}, x=x(), y=y(), tooltip=tips, **look),
        layer("point", ringed, ring, x=x(), y=y(), tooltip=tips),
        layer("text", labelled, words, x=x(), y=y(), text="label", color=OWN_COLOUR, tooltip=tips),
    ]
    keys = [Key(line.name, line.colour, shape=line.shape or "stroke", dash=line.dash) for line in lines.lines]
    keys += [Key(one.name, one.colour, shape="stroke", dash=one.dash) for one in lines.references]
    return chart([*layers, *legend(keys, filled=False)], LINES_PX, lines.title, lines.subtitle)


def _stroke(line: Line | Reference) -> Json:
    width_px = line.width_px if isinstance(line, Line) else 1.2
    return {"color": colour(line.colour), "strokeDash": list(line.dash), "strokeWidth": width_px}


def draw_gantt(gantt: Gantt) -> Json:
    """Returns the chart's specification."""
    keys = row_keys((lane.name, lane.bold) for lane in gantt.lanes)
    spans = [
        {
            **{"row": key, "start": span.start, "end": span.end, "middle": (span.start + span.end) / 2},
            **{"colour": colour(span.colour), "text": span.text, **detail_fields(span.details)},
        }
        for key, lane in zip(keys, gantt.lanes, strict=True)
        for span in lane.spans
    ]
    tips = tooltip(span.details for lane in gantt.lanes for span in lane.spans)
    end = max(span["end"] for span in spans)
    y = row_axis(keys)

    def x(name: str) -> Json:
        axis = {"format": ",.0f", "tickCount": 8, "domain": False, "ticks": False}
        scale = {"domain": [0, end], "nice": False}
        return {"axis": axis, "field": name, "scale": scale, "title": f"time, {gantt.unit}", "type": "quantitative"}

    # A border of the page's colour parts neighbours, and would hide what is as thin as it.
    wide = {"test": f"datum.end - datum.start > {end / 250}", "value": colour("page")}
    look = {"color": OWN_COLOUR, "stroke": {"condition": wide, **OWN_COLOUR}}
    style = {"height": LANE_PX * 0.82, "strokeWidth": 0.7}
    layers = [
        layer("bar", spans, style, x=x("start"), x2="end", y=y, tooltip=tips, **look),
        layer("text", [span for span in spans if span["text"]], {}, x=x("middle"), y=y, text="text", tooltip=tips),
    ]
    return chart(layers, LANE_PX * len(keys), gantt.title)
