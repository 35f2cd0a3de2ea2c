"""Draws the three forms: rows of bars and dots with cells beside them, lines over a quantity, timelines."""

from __future__ import annotations

from dataclasses import replace

from overlap_sweep.report.charts import Gantt, Key, Line, Lines, Reference, Rows
from overlap_sweep.report.charts.palette import colour
from overlap_sweep.report.charts.vega import (
    LETTER_PX,
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

ROW_PX = 26
COLUMN_GAP_PX = 20
LINES_PX = 230
LANE_PX = 17
MOST_TICKS = 20
"""Places that are ticks one by one."""


def draw_rows(rows: Rows) -> Json:
    """Returns the chart's specification."""
    keys = row_keys((row.name, row.bold) for row in rows.rows)
    pieces, dots, noise, names = [], [], [], []
    for key, row in zip(keys, rows.rows, strict=True):
        own = {"row": key, **detail_fields(row.details)}
        names.append({**own, **{f"cell{j}": cell for j, cell in enumerate(row.cells or [""] * len(rows.columns))}})
        for part, start, end in zip(rows.parts, [0.0, *row.ends], row.ends, strict=False):
            pieces.append({**own, "start": start, "end": end, "colour": colour(row.colour or part.colour)})
        noise.append({"row": key, "low": row.low, "high": row.high, "colour": colour("ink")})
        for dot in row.dots:
            dots.append({**own, "at": dot.at, "colour": colour(dot.colour), "shape": dot.shape})
            noise.append({"row": key, "low": dot.low, "high": dot.high, "colour": colour(dot.colour)})
    axis = replace(rows.axis, from_zero=rows.axis.from_zero or bool(pieces))
    told, y, header = tooltip(row.details for row in rows.rows), row_axis(keys), constant(-8)
    bar = {"x": place("start", axis), "x2": "end", "color": OWN_COLOUR}
    at = {"x": place("at", axis), "color": OWN_COLOUR, "shape": OWN_SHAPE}
    layers = [layer("bar", pieces, {"height": 13}, y=y, tooltip=told, **bar)] if pieces else []
    ends = rows.axis.domain or [piece["end"] for piece in pieces] + [dot["at"] for dot in dots]
    for one in rows.references:
        # At the right edge it would run into the cells' titles.
        align = "right" if one.at > (min(ends) + max(ends)) / 2 else "center"
        marked, muted = [{"at": one.at}], {"color": colour("muted"), "align": align}
        line = {"color": colour(one.colour), "strokeDash": list(one.dash)}
        layers.append(layer("rule", marked, line, x=place("at", axis)))
        layers.append(layer("text", marked, muted, x=place("at", axis), y=header, text=constant(one.name)))
    known = [one for one in noise if one["low"] is not None]
    layers.append(layer("rule", known, {"strokeWidth": 1.5}, x=place("low", axis), x2="high", y=y, color=OWN_COLOUR))
    layers.append(layer("point", dots, {"filled": True, "size": 60, "opacity": 1}, y=y, tooltip=told, **at))
    right_px, edge = 0, constant("width")
    for j, title in enumerate(rows.columns):
        longest = max(map(len, (title, *(row.cells[j] for row in rows.rows if row.cells))))
        right_px += COLUMN_GAP_PX + LETTER_PX * longest
        style: Json = {"align": "right", "dx": right_px}
        layers.append(layer("text", [{}], {**style, "color": colour("muted")}, x=edge, y=header, text=constant(title)))
        layers.append(layer("text", names, style, x=edge, y=y, text=f"cell{j}", tooltip=told))
    return chart([*layers, *legend([*rows.parts, *rows.legend])], ROW_PX * len(keys), rows.title, rows.subtitle)


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
            # What is not marked has a tooltip all the same.
            mark = {"shape": line.shape or "circle", "opacity": 1 if line.shape else 0}
            marked += [{**own, **mark}] if line.shape or point.details else []
            noisy += [{**own, "low": point.low, "high": point.high}] if point.low is not None else []
            ringed += [own] if point.ringed else []
            labelled += [{**own, "label": point.label}] if point.label else []
    told = tooltip(point.details for point in points)
    opacity = {"field": "opacity", "scale": None, "type": "quantitative"}
    look = {"color": OWN_COLOUR, "shape": OWN_SHAPE, "opacity": opacity}
    ring = {"size": 190, "color": colour("ink"), "strokeWidth": 2, "opacity": 1}
    words = {"dy": -14, "fontWeight": 600}
    layers += [
        layer("rule", noisy, {"strokeWidth": 1.5}, x=x(), y=y("low"), y2="high", color=OWN_COLOUR),
        layer("point", marked, {"filled": True, "size": 42, "clip": True}, x=x(), y=y(), tooltip=told, **look),
        layer("point", ringed, ring, x=x(), y=y(), tooltip=told),
        layer("text", labelled, words, x=x(), y=y(), text="label", color=OWN_COLOUR, tooltip=told),
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
    told = tooltip(span.details for lane in gantt.lanes for span in lane.spans)
    end = max(span["end"] for span in spans)
    y = row_axis(keys)

    def x(name: str) -> Json:
        axis = {"format": ",.0f", "tickCount": 8, "domain": False, "ticks": False}
        scale = {"domain": [0, end], "nice": False}
        return {"axis": axis, "field": name, "scale": scale, "title": gantt.unit, "type": "quantitative"}

    # A border of the page's colour parts neighbours, and would hide what is as thin as it.
    wide = {"test": f"datum.end - datum.start > {end / 250}", "value": colour("page")}
    look = {"color": OWN_COLOUR, "stroke": {"condition": wide, **OWN_COLOUR}}
    style = {"height": LANE_PX * 0.82, "strokeWidth": 0.7}
    layers = [
        layer("bar", spans, style, x=x("start"), x2="end", y=y, tooltip=told, **look),
        layer("text", [span for span in spans if span["text"]], {}, x=x("middle"), y=y, text="text", tooltip=told),
    ]
    return chart(layers, LANE_PX * len(keys), gantt.title)
