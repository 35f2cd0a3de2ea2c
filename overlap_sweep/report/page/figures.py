"""One chart: what it shows in words, and its Vega-Lite specification, made once for the same data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from overlap_sweep.cache import cached_bytes
from overlap_sweep.report.numbers import visible

if TYPE_CHECKING:
    import altair as alt

Panel = Any
"""A dataclass with all that one chart is drawn from, in the order of drawing."""


@dataclass(frozen=True)
class Figure:
    """A chart without colours and width of its own: it takes those of the page, or of the PNG."""

    name: str
    """Fit for a file and for an element's id."""
    description: str
    """What is to be seen, for those who cannot see it."""
    spec: dict[str, Any]

    @property
    def untitled(self) -> Figure:
        """For where a heading says the same."""
        return replace(self, spec={key: value for key, value in self.spec.items() if key != "title"})

    @property
    def spec_json(self) -> str:
        """Safe within a script element."""
        return script_safe(json.dumps({**self.spec, "description": self.description}, separators=(",", ":")))


def figure(name: str, description: str, panel: Panel, chart: Callable[[Any], alt.TopLevelMixin]) -> Figure:
    """`chart` draws `panel`; not again if the same was drawn before by the same code."""
    key = b"\0".join(
        [_code_digest(), chart.__qualname__.encode(), chart.__module__.encode(), msgspec.json.encode(panel)]
    )

    def draw() -> bytes:
        # Tests hold them against Vega-Lite's schema, which takes longer than all the rest.
        spec = chart(panel).to_dict(validate=False)
        # The page and the PNGs bring their own.
        return json.dumps(without_control({k: value for k, value in spec.items() if k != "config"})).encode()

    return Figure(name, description, json.loads(cached_bytes("charts", key, draw)))


def without_control(spec: Any) -> Any:
    """Vega-Lite makes expressions of names, and Vega refuses those with some characters."""
    if isinstance(spec, dict):
        return {key: without_control(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [without_control(value) for value in spec]
    return visible(spec) if isinstance(spec, str) else spec


def script_safe(text: str) -> str:
    """JSON that ends no script element and begins no comment, whatever it holds."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _code_digest() -> bytes:
    """Of all that decides how a panel is drawn."""
    digest = hashlib.sha256(version("altair").encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()
