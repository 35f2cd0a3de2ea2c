"""Draws the three forms as Vega-Lite's specifications: rows of bars and dots with cells beside them, lines over a
quantity, timelines; and what they share: layers, axes, legends."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from overlap_sweep.report.charts import Axis, Gantt, Json, Key, Line, Lines, Reference, Row, Rows, colour

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.4.1.json"
MARGIN_PX = 14
"""Between the outermost values and the ends of an axis."""
LETTER_PX = 7
"""Width of a digit in the widest of the fonts."""
LEGEND_PX = 350
"""Charts may stand beside each other, or on a phone."""
SUBTITLE_WIDTH = 84
"""Width of a subtitle in characters, as wide as a panel."""
NAME_PX = 330
"""The longest name of a row; Vega cuts what is longer, and the tooltip has it."""

OWN_COLOUR: Json = {"field": "colour", "scale": None, "type": "nominal"}
OWN_SHAPE: Json = {"field": "shape", "scale": None, "type": "nominal"}
"""Those that each row has."""
LINES_PX = 230
LANE_PX = 17
MOST_TICKS = 20
"""Places that are ticks one by one."""
NARROW_LETTERS = 44
"""Letters of a line on a narrow screen."""
MOST_LETTERS = 16
"""Letters of a cell on a narrow screen; a column with longer ones has its texts below the rows' names."""
LINE_PX = 13
BELOW_BAR_PX = 8
"""From a bar's middle to dots with intervals of their own, which its noise would hide."""


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
    texts = [row.name, *(f"{columns[j]}: {row.cells[j]}" for j in long if row.cells and row.cells[j])]
    return [line for text in texts for line in textwrap.wrap(text, NARROW_LETTERS) or [text]]


def _rows(rows: Rows, layout: _Layout) -> Json:
    keys = row_keys((row.name, row.bold) for row in rows.rows)
    pieces, dots, noise, intervals, names = [], [], [], [], []
    for key, row in zip(keys, rows.rows, strict=True):
        own = {"row": key, **detail_fields(row.details)}
        cells = {f"cell{j}": cell for j, cell in enumerate(row.cells or [""] * len(rows.columns))}
        names.append({**own, "name": row.name, "weight": 700 if row.bold else 400, **cells})
        for part, start, end in zip(rows.parts, [0.0, *row.ends], row.ends, strict=False):
            pieces.append({**own, "start": start, "end": end, "colour": colour(row.colour or part.colour)})
        noise.append({"row": key, "low": row.low, "high": row.high, "colour": colour("ink")})
        for dot in row.dots:
            dots.append({**own, "at": dot.at, "colour": colour(dot.colour), "shape": dot.shape})
            intervals.append({"row": key, "low": dot.low, "high": dot.high, "colour": colour(dot.colour)})
    axis = replace(rows.axis, from_zero=rows.axis.from_zero or bool(pieces))
    tips, y = tooltip(row.details for row in rows.rows), row_axis(keys, named=layout.name_px is None)
    bar: Json = {"x": place("start", axis), "x2": "end", "color": OWN_COLOUR}
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
    noise, intervals = ([one for one in found if one["low"] is not None] for found in (noise, intervals))
    below = {"yOffset": layout.bar_px + (BELOW_BAR_PX if noise and intervals else 0)}
    spread: Json = {"x": place("low", axis), "x2": "high", "color": OWN_COLOUR}
    layers.append(layer("rule", noise, {"strokeWidth": 1.5, **lower}, y=y, **spread))
    layers.append(layer("rule", intervals, {"strokeWidth": 1.5, **below}, y=y, **spread))
    layers.append(layer("point", dots, {"filled": True, "size": 60, "opacity": 1, **below}, y=y, tooltip=tips, **at))
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
    points = [point for line in lines.lines for point in line.points]
    places = sorted({point.x for point in points})
    ticks: Json = {"values": places} if len(places) <= MOST_TICKS else {"tickMinStep": 1}

    def x(name: str = "x") -> Json:
        return place(name, lines.x, **{"format": lines.x.format or "d", "grid": False, **ticks})

    def y(name: str = "y") -> Json:
        return place(name, lines.y, minExtent=38)

    layers = []
    for one in lines.references:
        across: Json = {"x": constant(0), "x2": constant("width"), "tooltip": tooltip([one.details])}
        layers.append(layer("rule", [{"y": one.at, **detail_fields(one.details)}], _stroke(one), y=y(), **across))
    noisy, marked, ringed, labelled = [], [], [], []
    for line in lines.lines:
        if line.points:
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


def layer(mark: str, rows: Iterable[Json], style: Json, **channels: Json | list[Json] | str) -> Json:
    """Returns a layer that draws a mark for each row. A channel is a definition of Vega-Lite's, or the name of a field:
    a text's, or with `x2` and `y2` a number's."""

    def defined(channel: str, value: Json | list[Json] | str) -> Json | list[Json]:
        if not isinstance(value, str):
            return value
        return {"field": value} if channel in ("x2", "y2") else {"field": value, "type": "nominal"}

    return {
        "data": {"values": list(rows)},
        "mark": {"type": mark, **style},
        "encoding": {channel: defined(channel, value) for channel, value in channels.items()},
    }


def constant(value: float | str) -> Json:
    """Returns a channel that is the same for all rows; for places in pixels, or `width` and `height` of the plot."""
    return {"value": value}


def place(field: str, axis: Axis, **drawn: object) -> Json:
    """Returns the channel of a number that is drawn at its place along an axis."""
    scale: Json = {"type": "log"} if axis.logarithmic else {"zero": axis.from_zero}
    if axis.domain:
        scale |= {"domain": list(axis.domain), "clamp": True, "nice": False}
    else:
        scale |= {"nice": True} if axis.from_zero else {"nice": False, "padding": MARGIN_PX}
    shown = {
        "format": axis.format or ",.5~r",
        "domain": False,
        "ticks": False,
        "labelOverlap": "greedy",
        "labelSeparation": 8,
    }
    # A logarithmic axis has its ticks at round numbers, however many.
    shown |= drawn if axis.logarithmic else {"tickCount": 6, **drawn}
    title = f"{axis.title}, logarithmic" if axis.logarithmic else axis.title
    return {"axis": shown, "field": field, "scale": scale, "title": title, "type": "quantitative"}


def row_keys(rows: Iterable[tuple[str, bool]]) -> list[str]:
    """Returns a key for each row of `row_axis`, all different, from the rows' names and whether these are bold."""
    return [f"{'*' if bold else ''}{i}|{name}" for i, (name, bold) in enumerate(rows)]


def row_axis(keys: Sequence[str], named: bool = True) -> Json:
    """Returns the channel of the field `row`, which has one of the keys, from top to bottom; its axis has the names."""
    shown = {
        "labelExpr": "slice(datum.label, indexof(datum.label, '|') + 1)",
        "labelFontWeight": {"condition": {"test": "datum.label[0] == '*'", "value": 700}, "value": 400},
        **{"domain": False, "grid": False, "labelLimit": NAME_PX, "labelPadding": 8, "ticks": False},
    }
    scale = {"domain": list(keys), "paddingInner": 0.12}
    return {
        "axis": shown if named else None,
        "field": "row",
        "scale": scale,
        "sort": None,
        "title": None,
        "type": "nominal",
    }


def chart(layers: Iterable[Json], height_px: float, title: str, subtitle: str = "") -> Json:
    """Returns the specification of layers above each other, as wide as there is room; rows that several have are in it
    once. The second of two charts below each other may have no title."""
    datasets: dict[str, list[Json]] = {}
    drawn = []
    for one in layers:
        rows = one["data"]["values"]
        if not rows and "x" in one["encoding"]:
            # Vega warns of a scale without values.
            continue
        # Charts of one PNG have their data together.
        name = f"data-{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]}"
        datasets[name] = rows
        drawn.append({**one, "data": {"name": name}})
    wrapped = textwrap.wrap(subtitle, SUBTITLE_WIDTH, max_lines=3, placeholder=" ...")
    return {
        "layer": drawn,
        "height": height_px,
        **({"title": {"text": title, "offset": 14, "subtitle": wrapped}} if title else {}),
        "width": "container",
        "$schema": SCHEMA,
        "datasets": datasets,
    }


def detail_fields(details: Mapping[str, str]) -> Json:
    return {f"detail{i}": text for i, text in enumerate(details.values())}


def tooltip(details: Iterable[Mapping[str, str]]) -> list[Json]:
    """Returns the tooltip of rows with the `detail_fields` of such details, which have the same titles or none."""
    titles = max(details, key=len, default={})
    return [{"field": f"detail{i}", "title": title, "type": "nominal"} for i, title in enumerate(titles)]


def legend(keys: Sequence[Key], *, filled: bool = True, offset_px: int = 18) -> list[Json]:
    """Returns the legend of the colours, above the plot, as that of a layer without marks; nothing for a single
    colour."""
    if len(keys) < 2:
        return []
    names = [key.name for key in keys]
    shown = {
        "orient": "top",
        "title": None,
        "offset": offset_px,
        "columns": max(1, LEGEND_PX // (LETTER_PX * (max(map(len, names)) + 5))),
    }
    ranges = {
        "color": [colour(key.colour) for key in keys],
        "shape": [key.shape for key in keys],
        "strokeDash": [list(key.dash) for key in keys],
    }
    channels = {
        channel: {"field": "name", "type": "nominal", "scale": {"domain": names, "range": values}, "legend": shown}
        for channel, values in ranges.items()
    }
    return [layer("point", [], {"filled": filled, "opacity": 1}, **channels)]
