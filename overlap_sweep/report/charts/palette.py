"""The colours of charts and page, each for light and dark: charts name them as CSS does, and both follow the reader.

Those of data are Okabe and Ito's, which the colour-blind can tell apart, moved to where both backgrounds carry them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
"""Colours by name, for a light and a dark page."""

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
    """Returns the style sheet that defines the colours."""
    defined = (f"  --{name}: light-dark({light}, {dark});\n" for name, (light, dark) in COLOURS.items())
    return f":root {{\n{''.join(defined)}}}\n"


def chart_config() -> dict[str, Any]:
    """Returns Vega-Lite's configuration, the same for all charts."""
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
