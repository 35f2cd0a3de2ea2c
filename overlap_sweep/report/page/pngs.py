"""Charts as PNGs, on white."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from overlap_sweep.cache import cached_bytes
from overlap_sweep.report.page.figures import Figure
from overlap_sweep.report.page.palette import chart_config, in_light

SCALE = 1.5
WIDE_PX = 1000
PANEL_PX = 330
"""Of one of several charts side by side, without its labels."""
COLUMNS = 2


def png(figures: Sequence[Figure]) -> bytes:
    """One chart in its full width, several two by two. `figures` is not empty."""
    whole = _wide(figures[0].spec) if len(figures) == 1 else _grid([figure.spec for figure in figures], COLUMNS)
    return _rendered(whole)


def column(figures: Sequence[Figure]) -> bytes:
    """Wide charts below each other. `figures` is not empty."""
    return _rendered(_grid([figure.spec for figure in figures], 1, WIDE_PX - 170))


def _wide(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "width": WIDE_PX, "autosize": {"type": "fit-x", "contains": "padding"}}


def _grid(specs: Sequence[dict[str, Any]], columns: int, width_px: int = PANEL_PX) -> dict[str, Any]:
    whole = ("$schema", "datasets")
    return {
        "$schema": specs[0]["$schema"],
        "datasets": {name: rows for spec in specs for name, rows in spec["datasets"].items()},
        "columns": columns,
        "spacing": 30,
        "concat": [{**{k: v for k, v in spec.items() if k not in whole}, "width": width_px} for spec in specs],
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
    }


def _rendered(spec: dict[str, Any]) -> bytes:
    text = in_light(json.dumps({**spec, "padding": 12}))
    config = in_light(json.dumps({**chart_config(), "background": "white"}))

    def render() -> bytes:
        import vl_convert

        rendered: bytes = vl_convert.vegalite_to_png(text, scale=SCALE, config=json.loads(config))
        return rendered

    return cached_bytes("pngs", f"{version('vl-convert-python')}\0{SCALE}\0{text}\0{config}", render)
