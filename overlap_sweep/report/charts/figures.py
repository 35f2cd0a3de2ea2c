"""One chart: its Vega-Lite specification, and its PNG, which vl-convert renders with Vega's JavaScript where it can."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlap_sweep import cache as kept
from overlap_sweep.report.charts import Form, Gantt, Json, Lines, chart_config, in_light
from overlap_sweep.report.charts.draw import draw_gantt, draw_lines, draw_narrow_rows, draw_rows
from overlap_sweep.report.numbers import visible

SCALE = 1.5
WIDE_PX = 1000


@dataclass(frozen=True)
class Figure:
    """A chart without colours and width of its own: it takes those of the page, or of the PNG."""

    name: str
    """Name for a file and an element's id."""
    description: str
    """Text for readers who cannot see it; the tables have its numbers."""
    spec: Json
    narrow: Json | None = None
    """Parts of the specification that differ on a narrow screen, if any."""
    scrolls: bool = False
    """Whether it keeps its width and scrolls on a narrow screen."""

    @property
    def untitled(self) -> Figure:
        """Returns the chart without its title, for where a heading says the same."""
        return replace(self, spec={key: value for key, value in self.spec.items() if key != "title"})

    @property
    def spec_json(self) -> str:
        """Returns the specification as JSON that is safe within a script element."""
        return _as_json({**self.spec, "description": self.description})

    @property
    def narrow_json(self) -> str:
        """Returns the parts that differ on a narrow screen as JSON; empty if none do."""
        return _as_json(self.narrow) if self.narrow else ""


def figure(name: str, form: Form) -> Figure:
    if isinstance(form, Gantt):
        return Figure(name, form.title, _without_control(draw_gantt(form)), scrolls=True)
    words = ": ".join(filter(None, [form.title, form.subtitle]))
    if isinstance(form, Lines):
        return Figure(name, words, _without_control(draw_lines(form)))
    spec, drawn = _without_control(draw_rows(form)), _without_control(draw_narrow_rows(form))
    # Their data are the same.
    spec["datasets"] |= drawn["datasets"]
    return Figure(name, words, spec, {key: drawn[key] for key in ("layer", "height")})


def _as_json(spec: Json) -> str:
    return script_safe(json.dumps(spec, separators=(",", ":")))


def _without_control(spec: Any) -> Any:
    """Returns the same, control characters escaped: Vega-Lite makes expressions of names, and Vega refuses some."""
    if isinstance(spec, dict):
        return {key: _without_control(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_without_control(value) for value in spec]
    return visible(spec) if isinstance(spec, str) else spec


def script_safe(text: str) -> str:
    """Returns JSON that cannot end a script element or begin a comment."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def png(figure: Figure) -> bytes:
    """Returns the chart in its full width, on white."""
    return rendered({**figure.spec, "width": WIDE_PX, "autosize": {"type": "fit-x", "contains": "padding"}})


def column_spec(figures: Sequence[Figure], title: Json | None = None) -> Json:
    """Returns the specification of wide charts below each other, with a title above them all."""
    specs, whole = [figure.spec for figure in figures], ("$schema", "datasets")
    return {
        "$schema": specs[0]["$schema"],
        "datasets": {name: rows for spec in specs for name, rows in spec["datasets"].items()},
        "columns": 1,
        "spacing": 30,
        "concat": [{**{k: v for k, v in spec.items() if k not in whole}, "width": WIDE_PX - 170} for spec in specs],
        "resolve": {"scale": dict.fromkeys(("color", "shape", "strokeDash"), "independent")},
        **({"title": title} if title else {}),
    }


def rendered(spec: Json) -> bytes:
    """Returns the PNG of a specification, cached once rendered."""
    text = in_light(json.dumps({**spec, "padding": 12}))
    config = in_light(json.dumps({**chart_config(), "background": "white"}))

    def render() -> bytes:
        import vl_convert

        rendered: bytes = vl_convert.vegalite_to_png(text, scale=SCALE, config=json.loads(config))
        return rendered

    return kept.cached_bytes("pngs", f"{version('vl-convert-python')}\0{SCALE}\0{text}\0{config}", render)


_LIMITED = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2); import vl_convert; "
_BUNDLE = "vl_convert.javascript_bundle()"


@cache
def why_it_cannot_run() -> str | None:
    """Returns why vl-convert cannot run in this process, and the fix; None if it can."""
    if not find_spec("vl_convert"):
        return "vl-convert is not installed; pip install vl-convert-python"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    # Its V8 ends a process in which it cannot reserve its address space, of some hundred GiB.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    command = [sys.executable, "-c", _LIMITED + _BUNDLE, str(max(0, limit - used))]
    failed = subprocess.run(command, capture_output=True, check=False).returncode
    return "ulimit -v leaves vl-convert too little address space; use ulimit -v unlimited" if failed else None


@cache
def page_script() -> str | None:
    """Returns the script that defines `window.vegaEmbed`; None if it was never made here and cannot be."""
    if not find_spec("vl_convert"):
        return None
    key = f"vega {version('vl-convert-python')}"
    found = kept.find("scripts", key)
    if found is None and not why_it_cannot_run():
        import vl_convert

        # Without an argument it returns the bundle of vegaEmbed; its stub requires one.
        found = vl_convert.javascript_bundle().encode()  # type: ignore[call-arg]
        kept.keep("scripts", key, found)
    return found.decode() if found is not None else None


def left_out(*, page: bool = True, images: bool = False) -> list[str]:
    """Returns a sentence if a page or images are written without charts here, else an empty list."""
    missing = (page and page_script() is None) or (images and why_it_cannot_run())
    return [f"Charts are left out: {why_it_cannot_run()}."] if missing else []
