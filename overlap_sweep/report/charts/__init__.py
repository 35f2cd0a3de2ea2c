"""Three forms of charts, independent of workloads: rows of bars and dots, lines, and gantt.

A chart is a `Rows`, `Lines` or `Gantt` of plain values, which `figures.figure` draws. Colours are names of
`COLOURS`, as CSS has them; `details` are the tooltip's texts by title.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
"""A part of a Vega-Lite specification."""

SOLID, DASHED, DOTTED = (1, 0), (5, 3), (1, 3)
TICK = "M-.2,-1.2H.2V1.2H-.2Z"
"""Shape of an upright bar, which Vega-Lite has no name for."""


@dataclass(frozen=True)
class Axis:
    title: str
    """Quantity and unit."""
    format: str = ""
    """Format of d3, such as `.0%`; empty: as many digits as the values need."""
    domain: tuple[float, float] | None = None
    """Ends of the axis; None: those of the values, with a margin."""
    from_zero: bool = False
    logarithmic: bool = False


@dataclass(frozen=True)
class Key:
    """An entry of the legend: the meaning of a colour."""

    name: str
    colour: str
    shape: str = "square"
    dash: Sequence[int] = SOLID


@dataclass(frozen=True)
class Reference:
    """A line across the plot at a value to compare with."""

    name: str
    at: float
    colour: str = "ink"
    dash: Sequence[int] = SOLID
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Dot:
    at: float
    low: float | None = None
    """Lower end of its noise; the upper one is `high`."""
    high: float | None = None
    colour: str = "accent"
    shape: str = "circle"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A bar from zero in consecutive parts, and dots; with neither it is a heading."""

    name: str
    cells: list[str] = field(default_factory=list)
    """Texts on the right, by column."""
    bold: bool = False
    details: dict[str, str] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    """End of each part of the bar, where the next one begins."""
    low: float | None = None
    """Lower end of the bar's noise; the upper one is `high`."""
    high: float | None = None
    colour: str = ""
    """Colour of a bar with a single part, instead of the part's."""
    dots: list[Dot] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """Bars, dots or both, each with its noise, in rows below each other."""

    title: str
    subtitle: str
    axis: Axis
    rows: list[Row]
    """In order from top to bottom."""
    parts: list[Key] = field(default_factory=list)
    """Parts of the bars; the legend has those that a bar has."""
    columns: list[str] = field(default_factory=list)
    """Headers of the cells."""
    references: list[Reference] = field(default_factory=list)
    legend: list[Key] = field(default_factory=list)
    """Meanings of colours other than those of parts."""


LOST = Key("lost by overlapping", "series4")
"""The last of the parts of a bar that is `cut`."""


def cut(base: float, time: float, whole: float) -> list[float]:
    """Returns the ends of four parts: the base, the time above it, the hidden part of the whole, and `LOST`, by which
    the time exceeds the whole."""
    base = min(base, time)
    whole = max(base, whole)
    return [base, min(time, whole), whole, max(time, whole)]


@dataclass(frozen=True)
class LinePoint:
    x: float
    y: float
    low: float | None = None
    """Lower end of its noise; the upper one is `high`."""
    high: float | None = None
    ringed: bool = False
    """Whether it was chosen, which a ring shows."""
    label: str = ""
    """Text above the point."""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    name: str
    points: list[LinePoint]
    colour: str
    shape: str = "circle"
    """Shape of its points; empty: not marked."""
    dash: Sequence[int] = SOLID
    width_px: float = 1.8


@dataclass(frozen=True)
class Lines:
    """Lines over a quantity, with noise at their points, and references."""

    title: str
    subtitle: str
    x: Axis
    y: Axis
    lines: list[Line]
    """Lines from the lowest layer to the topmost."""
    references: list[Reference] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    start: float
    end: float
    colour: str
    text: str = ""
    """Text inside the span."""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lane:
    name: str
    spans: list[Span]
    bold: bool = False


@dataclass(frozen=True)
class Gantt:
    """Lanes of spans below each other on one time axis."""

    title: str
    unit: str
    lanes: list[Lane]
    """In order from top to bottom."""


Form = Rows | Lines | Gantt

COLOURS = {
    "page": ("#ffffff", "#14171c"),
    "panel": ("#f5f6f8", "#1d2128"),
    "line": ("#d9dde3", "#363c46"),
    "faint": ("#e9ecf0", "#282d36"),
    "ink": ("#1a1f27", "#e8ebf0"),
    "muted": ("#5b6572", "#a3adba"),
    "accent": ("#0b63a5", "#6cb8f5"),
    "good": ("#00704f", "#4fd1a5"),
    "bad": ("#b3400a", "#ff9a5c"),
    "gemm": ("#0072b2", "#4aa8e0"),
    "comm": ("#d55e00", "#f58b3c"),
    "saved": ("#f3d2ba", "#5e4026"),
    "wait": ("#8a8f98", "#7d8592"),
    "compute": ("#00916a", "#35b892"),
    "memory": ("#b0578d", "#d68bb8"),
    "series1": ("#0072b2", "#5ab4ec"),
    "series2": ("#c25200", "#f5924a"),
    "series3": ("#00805e", "#45c49e"),
    "series4": ("#a8487f", "#dd93c0"),
    "series5": ("#7a6300", "#d9bd4e"),
    "series6": ("#5a54a6", "#a9a3f0"),
}
"""Colours of charts and page by name, for a light and a dark page. Those of data are Okabe and Ito's, which the
colour-blind can tell apart, moved to where both backgrounds carry them."""

SERIES = tuple(name for name in COLOURS if name.startswith("series"))
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def colour(name: str) -> str:
    """Returns the colour as charts and style sheets refer to it."""
    if name not in COLOURS:
        raise KeyError(name)
    return f"var(--{name})"


def looks_of(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns colour and shape by name; two look the same only if there are more than 36 names."""
    count = len(SERIES)
    return {name: (SERIES[i % count], SHAPES[(i + i // count) % count]) for i, name in enumerate(names)}


def in_light(text: str) -> str:
    """Returns the text with the light colours themselves, for what is no web page."""
    for name, (light, _) in COLOURS.items():
        text = text.replace(colour(name), light)
    return text


def style_sheet() -> str:
    defined = (f"  --{name}: light-dark({light}, {dark});\n" for name, (light, dark) in COLOURS.items())
    return f":root {{\n{''.join(defined)}}}\n"


def chart_config() -> Json:
    axis = {
        "domainColor": colour("line"),
        "tickColor": colour("line"),
        "gridColor": colour("faint"),
        "labelColor": colour("muted"),
        "titleColor": colour("muted"),
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "titlePadding": 8,
    }
    return {
        "background": None,
        "font": FONT,
        "padding": {"left": 0, "right": 2, "top": 4, "bottom": 4},
        "view": {"stroke": None},
        "axis": axis,
        "title": {
            "color": colour("ink"),
            "subtitleColor": colour("muted"),
            "fontSize": 13,
            "fontWeight": 600,
            "subtitleFontSize": 11.5,
            "anchor": "start",
            "frame": "bounds",
            "offset": 10,
            "subtitlePadding": 4,
        },
        "text": {"color": colour("ink"), "fontSize": 11},
        "legend": {"labelColor": colour("muted"), "labelFontSize": 11, "labelLimit": 0, "symbolStrokeWidth": 1.8},
    }
