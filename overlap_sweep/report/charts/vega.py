"""Vega-Lite specifications as plain JSON: layers, axes, legends, and what the three forms share."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from overlap_sweep.report.charts import Axis, Key
from overlap_sweep.report.charts.palette import colour

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

Json = dict[str, Any]
OWN_COLOUR: Json = {"field": "colour", "scale": None, "type": "nominal"}
OWN_SHAPE: Json = {"field": "shape", "scale": None, "type": "nominal"}
"""Those that each row has."""


def layer(mark: str, rows: Iterable[Json], style: Mapping[str, Any], **channels: Any) -> Json:
    """Returns a layer that draws a mark for each row. A channel is a definition of Vega-Lite's, or the name of a field:
    a text's, or with `x2` and `y2` a number's."""

    def defined(channel: str, value: Any) -> Any:
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


def place(field: str, axis: Axis, **drawn: Any) -> Json:
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
