"""Draws bars, dots and timelines: a row for each, its name on the left, columns of cells on the right, references."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from overlap_sweep.report.charts import Align, Bars, Column, Dots, Gantt, Group, Reference, Row
from overlap_sweep.report.charts.palette import colour
from overlap_sweep.report.charts.vega import (
    LETTER_PX,
    OWN_COLOUR,
    Json,
    Scaled,
    chart,
    constant,
    described,
    detail_fields,
    fitted,
    header,
    keys,
    layer,
    place,
    tooltip,
)

LINE_PX = 14
ROW_GAP_PX = 12
NAME_CHARACTERS = 48
MOST_LINES = 4
COLUMN_GAP_PX = 20
CELL_LETTER_PX = 6.8
WHISKER_PX = 8
LANE_PX = 17

Place = Callable[[str], Json]
"""Takes a field's name, returns its channel along the chart's axis."""


def draw_bars(bars: Bars) -> Json:
    """Returns the chart's specification."""
    frame, scaled = Frame(bars.bars, bars.columns), _scaled(bars)
    told, y = frame.tooltip, frame.y
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

    def x(name: str) -> Json:
        return scaled.place(name, clamp=True)

    opacity = {"field": "opacity", "scale": None, "type": "quantitative"}
    noise = [{**frame.fields(i), "low": bar.low, "high": bar.high} for i, bar in enumerate(bars.bars)]
    layers = [
        layer(
            "bar",
            pieces,
            {"height": 13},
            x=x("start"),
            x2="end",
            y=y,
            color=OWN_COLOUR,
            opacity=opacity,
            tooltip=told,
        ),
        *_references(bars.references, x, scaled),
        *frame.whiskers(noise, x, constant(colour("ink"))),
    ]
    styles: dict[str, tuple[str, Json]] = {
        "tick": ("tick", {"thickness": 3, "size": 15, "opacity": 1, "orient": "vertical"}),
        "dot": ("point", {"filled": True, "size": 46, "opacity": 1}),
    }
    for shape, (mark, style) in styles.items():
        shown = [
            {
                **frame.fields(i),
                "at": bar.marker.at,
                "colour": colour(bar.marker.colour),
                "label": bar.marker.label,
                # Centred, it would reach into the names of the rows.
                "align": "left" if scaled.share(bar.marker.at) < 0.05 else "center",
            }
            for i, bar in enumerate(bars.bars)
            if bar.marker and bar.marker.shape == shape
        ]
        said: Json = {"dy": -12, "fontSize": 9.5, "align": {"expr": "datum.align"}}
        layers += [
            layer(mark, shown, style, x=x("at"), y=y, color=OWN_COLOUR, tooltip=told),
            layer("text", shown, said, x=x("at"), y=y, color=OWN_COLOUR, text="label", tooltip=told),
        ]
    return chart([*layers, *frame.layers(), *keys(bars.parts)], frame.height_px, bars.title, bars.subtitle)


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


def draw_dots(dots: Dots) -> Json:
    """Returns the chart's specification."""
    values = [value for row in dots.rows for dot in row.dots for value in (dot.at, dot.low, dot.high)]
    scaled = fitted(dots.axis, [*values, *(reference.at for reference in dots.references)], margin=0.05)
    frame, x = Frame(dots.rows, dots.columns), scaled.place
    told, y = frame.tooltip, frame.y
    drawn: dict[str, list[Json]] = {"ring": [], "dot": [], "tick": []}
    joined, noise = [], []
    for i, row in enumerate(dots.rows):
        for dot in row.dots:
            own = {"low": dot.low, "high": dot.high, "colour": colour(dot.colour), "shape": dot.shape}
            noise.append({**frame.fields(i), "at": dot.at, **own})
            drawn[dot.shape].append(noise[-1])
        if row.dots:
            first, last = row.dots[0], row.dots[-1]
            joined.append({**frame.fields(i), "low": first.at, "high": last.at, "colour": colour(last.colour)})
    layers = _references(dots.references, x, scaled)
    if dots.connected:
        bar = {"strokeWidth": 3, "opacity": 0.55}
        layers.append(layer("rule", joined, bar, x=x("low"), x2="high", y=y, color=OWN_COLOUR))
    layers += frame.whiskers(noise, x, OWN_COLOUR)
    styles: dict[str, tuple[str, Json]] = {
        "ring": ("point", {"size": 60, "strokeWidth": 1.8, "opacity": 1}),
        "dot": ("point", {"filled": True, "size": 60, "opacity": 0.85}),
        "tick": ("tick", {"thickness": 2, "size": 16, "opacity": 1, "orient": "vertical"}),
    }
    layers += [
        layer(mark, drawn[shape], style, x=x("at"), y=y, color=OWN_COLOUR, tooltip=told)
        for shape, (mark, style) in styles.items()
    ]
    sides: tuple[tuple[bool, Align, int, str], ...] = ((False, "left", 7, "high"), (True, "right", -7, "low"))
    for far, align, dx, end in sides:
        noted = [
            {**frame.fields(i), "beside": getattr(row.dots[-1], end) or row.dots[-1].at, "note": row.note}
            for i, row in enumerate(dots.rows)
            if row.note and row.dots and (scaled.share(row.dots[-1].at) > 0.5) == far
        ]
        style: Json = {"align": align, "dx": dx, "fontSize": 10, "color": colour("muted")}
        layers.append(layer("text", noted, style, x=x("beside"), y=y, text="note", tooltip=told))
    return chart([*layers, *frame.layers(), *keys(dots.legend)], frame.height_px, dots.title, dots.subtitle)


def describe_rows(form: Bars | Dots) -> str:
    """Returns what bars or dots show, in words."""
    title = f"{form.title}, {form.axis.title}" if form.axis.title else form.title
    said = []
    for row in form.bars if isinstance(form, Bars) else form.rows:
        cells = ", ".join(f"{c.title} {cell}" for c, cell in zip(form.columns, row.cells, strict=False) if cell)
        said.append(f"{row.name}: {cells}" if cells else row.name)
    return described(title, form.subtitle, said)


@dataclass(frozen=True)
class Frame:
    """Rows to draw in, from top to bottom."""

    rows: Sequence[Row]
    columns: Sequence[Column]

    @cached_property
    def names(self) -> list[str]:
        """In lines, each different."""
        return wrapped([row.name for row in self.rows])

    @property
    def height_px(self) -> int:
        lines = max(name.count("\n") + 1 for name in self.names)
        return (LINE_PX * lines + ROW_GAP_PX) * len(self.rows)

    @property
    def y(self) -> Json:
        # An axis would not centre names of several lines.
        scale = {"domain": list(range(len(self.rows)))}
        return {"axis": None, "field": "row", "scale": scale, "title": None, "type": "ordinal"}

    @property
    def tooltip(self) -> list[Json]:
        return tooltip(max((row.details for row in self.rows), key=len))

    def fields(self, i: int) -> Json:
        """Returns what everything that is drawn in a row has in common."""
        row = self.rows[i]
        weight = 700 if row.bold else 400
        return {"row": i, "name": self.names[i], "weight": weight, **detail_fields(row.details)}

    def layers(self) -> list[Json]:
        """Returns names and columns."""
        rows = [
            {
                **self.fields(i),
                "up_px": -LINE_PX * self.names[i].count("\n") / 2,
                **{f"cell{j}": row.cells[j] if row.cells else "" for j in range(len(self.columns))},
            }
            for i, row in enumerate(self.rows)
        ]
        by_row = {"expr": "datum.weight"}
        style = {
            **{"align": "right", "baseline": "middle", "dx": -8, "dy": {"expr": "datum.up_px"}, "fontSize": 12},
            **{"lineBreak": "\n", "lineHeight": LINE_PX, "fontWeight": by_row},
        }
        found = [layer("text", rows, style, x=constant(0), y=self.y, text="name", tooltip=self.tooltip)]
        left_px, edge = 0, constant("width")
        for j, column in enumerate(self.columns):
            cells = [row.cells[j] for row in self.rows if row.cells]
            left_px += COLUMN_GAP_PX
            right_px = left_px + round(
                max(LETTER_PX * len(column.title), *(CELL_LETTER_PX * len(cell) for cell in cells), 0)
            )
            at_px = left_px if column.align == "left" else right_px
            weight = {"expr": "600"} if column.bold else by_row
            style = {"align": column.align, "dx": at_px, "fontSize": 12, "fontWeight": weight}
            found.append(header(column.title, edge, at_px, column.align))
            found.append(layer("text", rows, style, x=edge, y=self.y, text=f"cell{j}", tooltip=self.tooltip))
            left_px = right_px
        return found

    def whiskers(self, rows: Sequence[Json], x: Place, own: Json) -> list[Json]:
        """Returns the ranges from `low` to `high`, in the colour of the channel `own`."""
        known = [row for row in rows if row["low"] is not None]
        tick = {"thickness": 1.5, "size": WHISKER_PX, "orient": "vertical", "opacity": 1}
        style, told = {"strokeWidth": 1.5}, self.tooltip
        rule = layer("rule", known, style, x=x("low"), x2="high", y=self.y, color=own, tooltip=told)
        return [rule, *(layer("tick", known, tick, x=x(end), y=self.y, color=own) for end in ("low", "high"))]


def wrapped(names: Sequence[str]) -> list[str]:
    """Returns names broken into lines; those that are cut to the same are numbered."""
    broken = [
        "\n".join(textwrap.wrap(name, NAME_CHARACTERS, max_lines=MOST_LINES, placeholder=" ...")) for name in names
    ]
    was_cut = [one.endswith(" ...") and broken.count(one) > 1 for one in broken]
    return [f"{one} ({i})" if cut else one for i, (one, cut) in enumerate(zip(broken, was_cut, strict=True), start=1)]


def _references(shown: Sequence[Reference], x: Place, scaled: Scaled) -> list[Json]:
    """Returns their lines and what stands above these."""
    drawn: list[Json] = []
    for reference in shown:
        at, share = {"datum": reference.at}, scaled.share(reference.at)
        drawn.append(layer("rule", [{"at": reference.at}], {"color": colour(reference.colour)}, x=x("at")))
        half_px = LETTER_PX * len(reference.label) // 2
        align: Align = "right" if share > 0.85 else "left" if share < 0.15 else "center"
        if reference.label:
            drawn.append(header(reference.label, at, {"right": 4, "left": -4, "center": 0}[align], align))
        below_px = {"right": 2 * half_px, "left": 0, "center": half_px}[align] + 8
        if reference.below and share > 0.2:
            drawn.append(header(reference.below, at, -below_px, "right"))
        if reference.above and share < 0.8:
            above_px = {"right": 0, "left": 2 * half_px, "center": half_px}[align] + 8
            drawn.append(header(reference.above, at, above_px, "left"))
    return drawn


def describe_gantt(gantt: Gantt) -> str:
    """Returns what a timeline shows, in words."""
    said = (f"{group.title}: {', '.join(extent.text for extent in group.extents)}" for group in gantt.groups)
    return described(f"Timeline of streams, {gantt.title}", "", said)


def draw_gantt(gantt: Gantt) -> Json:
    """Returns the chart's specification."""
    rows, titles, extents, bars = _lanes(gantt.groups)
    end = max(one["end"] for one in (*extents, *bars))
    x_axis = {"format": ",.0f", "tickCount": 8, "domain": False, "ticks": False, "titleAnchor": "end"}
    # What a row is called follows its '|'.
    label = "split(datum.label, '|')[1]"
    names = {"domain": False, "grid": False, "labelExpr": label, "labelLimit": 210, "labelPadding": 6, "ticks": False}
    y_scale = {"domain": rows, "paddingInner": 0.12}
    y = {"axis": names, "field": "row", "scale": y_scale, "sort": rows, "title": None, "type": "nominal"}

    def x(name: str) -> Json:
        return place(name, gantt.unit, {"domain": [0, end], "nice": False}, x_axis)

    # A border of the page's colour parts neighbours, and would hide what is as thin as it.
    wide = {"test": f"datum.end - datum.start > {end / 250}", "value": colour("page")}
    told = tooltip(next((bar.details for group in gantt.groups for lane in group.lanes for bar in lane.bars), {}))
    of_extent = tooltip({"setting": "", "takes": ""})
    band = {"height": LANE_PX, "color": colour("panel"), "stroke": colour("line"), "cornerRadius": 3}
    border = {"color": colour("line"), "strokeDash": [3, 3]}
    title = {"align": "left", "fontSize": 12, "fontWeight": 600, "dy": -LANE_PX}
    span, stroke = {"height": LANE_PX * 0.82, "strokeWidth": 0.7}, {"condition": wide, **OWN_COLOUR}
    middle = [{"calculate": "(datum.start + datum.end) / 2", "as": "middle"}]
    layers = [
        layer("rule", [{"end": extent["end"]} for extent in extents], border, x=x("end")),
        layer("bar", extents, band, x=x("start"), x2="end", y=y, tooltip=of_extent),
        layer("text", extents, {"fontSize": 11}, x=x("middle"), y=y, text="text", tooltip=of_extent)
        | {"transform": middle},
        layer("bar", bars, span, x=x("start"), x2="end", y=y, color=OWN_COLOUR, stroke=stroke, tooltip=told),
        layer("text", titles, title, x=constant(0), y=y, text="title"),
    ]
    return chart(layers, LANE_PX * len(rows), gantt.title)


def _lanes(groups: Sequence[Group]) -> tuple[list[str], list[Json], list[Json], list[Json]]:
    """Returns the rows from top to bottom, a gap between groups, and what is drawn in them: titles, extents, bars."""
    rows: list[str] = []
    titles, extents, bars = [], [], []
    for number, group in enumerate(groups):
        head = f"{number}|"
        rows += [*([f"gap{number}|"] if rows else []), head]
        titles.append({"row": head, "title": group.title})
        for extent in group.extents:
            told = detail_fields({"setting": group.title, "takes": extent.text})
            extents.append({"row": head, "start": extent.start, "end": extent.end, "text": extent.text, **told})
        for lane in group.lanes:
            rows.append(f"{head}{lane.name}")
            for bar in lane.bars:
                drawn: dict[str, Any] = {"start": bar.start, "end": bar.end, "colour": colour(bar.colour)}
                bars.append({"row": rows[-1], **drawn, **detail_fields(bar.details)})
    return rows, titles, extents, bars
