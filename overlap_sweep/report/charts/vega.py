"""Vega-Lite specifications as plain JSON: layers, axes fitted to values, and what the four forms share."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlap_sweep.report.charts import Align, Axis, Key
from overlap_sweep.report.charts.palette import colour

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.4.1.json"
LOGARITHMIC_FROM = 4.0
"""Ratio of the largest to the smallest value from which on an axis is logarithmic."""
LETTER_PX = 6
KEYS_Y_PX = -28
_SHAPES = {"dot": "circle", "ring": "circle", "tick": "stroke", "square": "square"}

Json = dict[str, Any]
OWN_COLOUR: Json = {"field": "colour", "scale": None, "type": "nominal"}
"""The one that each row has."""


def layer(mark: str, rows: Iterable[Json], style: Mapping[str, Any], **channels: Any) -> Json:
    """Returns a layer that draws a mark for each row. A channel is a definition of Vega-Lite's, or the name of a field:
    one with a text, or of `x2` and `y2` with a number."""

    def defined(channel: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return {"field": value} if channel in ("x2", "y2") else {"field": value, "type": "nominal"}

    return {
        "data": {"values": list(rows)},
        "mark": {"type": mark, **dict(sorted(style.items()))},
        "encoding": {channel: defined(channel, value) for channel, value in sorted(channels.items())},
    }


def constant(value: float | str) -> Json:
    """Returns a channel that is the same for all rows; of places in pixels, or `width` and `height` of the plot."""
    return {"value": value}


def place(field: str, title: str | None, scale: Json, axis: Mapping[str, Any]) -> Json:
    """Returns the channel of a number that is drawn at its place along an axis."""
    drawn = dict(sorted(axis.items()))
    return {"axis": drawn, "field": field, "scale": scale, "title": title, "type": "quantitative"}


def chart(layers: Iterable[Json], height_px: int, title: str, subtitle: str | Sequence[str] = "") -> Json:
    """Returns the specification of layers above each other, as wide as there is room; rows that several have are in it
    once. The second of two charts below each other may have no title."""
    datasets: dict[str, list[Json]] = {}
    drawn = []
    for one in layers:
        rows = one["data"]["values"]
        # Charts of one PNG have their data together.
        name = f"data-{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]}"
        datasets[name] = rows
        drawn.append({**one, "data": {"name": name}})
    heading = {"text": title, "offset": 14, **({"subtitle": subtitle} if subtitle else {})}
    return {
        "layer": drawn,
        "height": height_px,
        **({"title": heading} if title else {}),
        "width": "container",
        "$schema": SCHEMA,
        "datasets": datasets,
    }


@dataclass(frozen=True)
class Scaled:
    """An axis fitted to values."""

    axis: Axis
    low: float
    high: float
    logarithmic: bool

    def share(self, value: float) -> float:
        """Returns where a value lies between both ends, from 0 to 1."""
        low, high, at = (math.log(one) if self.logarithmic else one for one in (self.low, self.high, value))
        return (at - low) / (high - low)

    def at(self, share: float) -> float:
        """Returns the value that lies there; the inverse of `share`."""
        if self.logarithmic:
            return float(self.low * (self.high / self.low) ** share)
        return self.low + share * (self.high - self.low)

    def scale(self, *, clamp: bool = False) -> Json:
        # Vega warns of a logarithmic scale that is told about zero.
        kind = {"type": "log"} if self.logarithmic else {"zero": False}
        return {"clamp": clamp, "domain": [self.low, self.high], "nice": False, **kind}

    def place(self, field: str, *, count: int = 6, clamp: bool = False, **options: Any) -> Json:
        """Returns the channel of a field, with about `count` ticks where the axis has none of its own."""
        ticks = self.axis.ticks or (log_ticks(self.low, self.high) if self.logarithmic else [])
        form = self.axis.format or ",.5~r"
        axis = {"format": form, "domain": False, "ticks": False, **options}
        # Of ticks that are given Vega would leave some out, had it a count.
        axis |= {"values": ticks} if ticks else {"tickCount": count}
        if form.startswith("+"):
            # Nobody writes "+0%".
            axis["labelExpr"] = f"datum.value ? format(datum.value, '{form}') : '0'"
        title = f"{self.axis.title}, logarithmic" if self.logarithmic else self.axis.title
        return place(field, title or None, self.scale(clamp=clamp), axis)


def fitted(axis: Axis, values: Iterable[float | None], margin: float = 0.07) -> Scaled:
    """Returns the axis with its ends: those wanted, or of the values with a margin, which is a share of their range."""
    known = [value for value in values if value is not None]
    if axis.domain:
        return Scaled(axis, *axis.domain, logarithmic=bool(axis.logarithmic))
    low, high = min(known, default=0.0), max(known, default=1.0)
    logarithmic = axis.logarithmic
    if logarithmic is None:
        logarithmic = not axis.from_zero and 0 < LOGARITHMIC_FROM * low < high
    if logarithmic:
        return Scaled(axis, low / 1.12, high * 1.12, logarithmic=True)
    if axis.from_zero:
        low = min(0.0, low)
    gap = margin * (high - low) or 0.01 * abs(high) or 1.0
    begins = 0.0 if low == 0.0 and axis.from_zero else low - gap
    return Scaled(axis, max(0.0, begins) if low >= 0 else begins, high + gap, logarithmic=False)


def log_ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten within `low` to `high`, both above 0; in a narrow range more of them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in (
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 6, 8),
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9),
    ):
        ticks = [round(step * 10.0**decade, 9) for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) > 2:
            break
    return ticks


def detail_fields(details: Mapping[str, str]) -> Json:
    return {f"detail{i}": text for i, text in enumerate(details.values())}


def tooltip(details: Mapping[str, str]) -> list[Json]:
    """Returns what is shown of rows with the `detail_fields` of such details."""
    return [{"field": f"detail{i}", "title": title, "type": "nominal"} for i, title in enumerate(details)]


def header(text: str, where: Json, dx: int, align: Align) -> Json:
    """Returns words above the plot; `where` is the channel `x`."""
    style = {"align": align, "dx": dx, "color": colour("muted")}
    return layer("text", [{}], style, x=where, y=constant(-8), text=constant(text))


def keys(shown: Sequence[Key]) -> list[Json]:
    """Returns what colours mean, in a row above the plot; nothing where there is but one."""
    drawn, at_px, y = [], 0, constant(KEYS_Y_PX)
    for key in shown if len(shown) > 1 else ():
        style = {
            "shape": _SHAPES[key.shape],
            "filled": key.shape in ("dot", "square"),
            "size": 90,
            "angle": 90 if key.shape == "tick" else 0,
            "color": colour(key.colour),
            "opacity": key.opacity,
        }
        drawn.append(layer("point", [{}], style, x=constant(at_px + 5), y=y))
        name_style = {"align": "left", "color": colour("muted")}
        drawn.append(layer("text", [{}], name_style, x=constant(at_px + 14), y=y, text=constant(key.name)))
        at_px += 34 + LETTER_PX * len(key.name)
    return drawn


def described(title: str, subtitle: str, said: Iterable[str]) -> str:
    """Returns what a chart shows, for those who cannot see it."""
    return f"{f'{title}: {subtitle}' if subtitle else title}. {'; '.join(said)}."
