"""What the charts of comparisons have in common. Everything in them is named where it is drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap_sweep.report.page.figures import without_control
from overlap_sweep.report.page.palette import chart_config, in_light

SCALE = 2.0
WIDTH_PX = 560
ROW_PX = 26
TIMELINE_HEIGHT_PX = 300


@dataclass(frozen=True)
class Chart:
    """Vega-Lite, in the colours of the page."""

    file_name: str
    spec: dict[str, Any]


def as_png(chart: Chart) -> bytes:
    """On white, for documents."""
    import vl_convert

    text = in_light(json.dumps({**without_control(chart.spec), "padding": 12}))
    config = json.loads(in_light(json.dumps({**chart_config(), "background": "white"})))
    rendered: bytes = vl_convert.vegalite_to_png(text, scale=SCALE, config=config)
    return rendered


def ratios_file(label: str, candidates: Sequence[str]) -> str:
    """Of one of them."""
    return "ratios.png" if len(candidates) == 1 else f"{_word(label)}_ratios.png"


def timeline_file(label: str) -> str:
    return f"{_word(label)}_timeline.png"


def _word(label: str) -> str:
    """As part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", label).strip("-.") or "dataset"
