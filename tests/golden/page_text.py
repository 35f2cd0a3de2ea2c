"""What a reader sees of report.html, as lines: text, tables and chart specifications."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

_BLOCKS = re.compile("p|li|h[1-4]|caption|figure|summary|dt|dd|div|pre|button|title")
_CELLS = {"td", "th"}
_CODE = "application/json"
DATA = "chart_data.txt"
WIDTH = 140
"""Of a line of a chart's specification, where it can be folded."""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.charts: dict[str, Any] = {}
        self._text = ""
        self._cells: list[str] | None = None
        self._skipped: str | None = None
        self._chart, self._figure = "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "style"):
            self._skipped = given.get("type") or tag
            return
        if _BLOCKS.fullmatch(tag):
            self._end_line()
        if tag == "tr":
            self._end_line()
            self._cells = []
        if tag == "figure":
            self._figure = given.get("id") or ""
            self.lines.append(f"[chart {self._figure}: {given.get('aria-label') or ''}]")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            if self._skipped == _CODE:
                self.charts[self._figure] = json.loads(self._chart)
            self._skipped, self._chart = None, ""
        elif tag in _CELLS and self._cells is not None:
            self._cells.append(" ".join(self._text.split()))
            self._text = ""
        elif tag == "tr" and self._cells is not None:
            self.lines.append(" | ".join(self._cells))
            self._cells = None
        elif _BLOCKS.fullmatch(tag):
            self._end_line()

    def handle_data(self, data: str) -> None:
        if self._skipped == _CODE:
            self._chart += data
        elif self._skipped is None:
            self._text += data

    def _end_line(self) -> None:
        if self._cells is None and (text := " ".join(self._text.split())):
            self.lines.append(text)
            self._text = ""


def page_text(html: str) -> dict[str, str]:
    """Returns `page.txt`, the text with a line for each row of a table, `charts.txt`, what its charts draw, and
    `chart_data.txt`, of what."""
    page = _Page()
    page.feed(html)
    charts = "".join(chart_text(name, spec) for name, spec in page.charts.items())
    data = "".join(f"{line}\n" for name, spec in page.charts.items() for line in _data_lines(name, spec))
    return {"page.txt": "\n".join(page.lines) + "\n", "charts.txt": charts, DATA: data}


def chart_text(name: str, spec: dict[str, Any]) -> str:
    """Returns a Vega-Lite specification as lines."""
    return "".join(f"{line}\n" for line in _chart_lines(name, spec))


def _chart_lines(name: str, spec: dict[str, Any]) -> Iterator[str]:
    """The specification, then its data with a line for each row."""
    drawn = json.dumps({key: value for key, value in spec.items() if key != "datasets"}, ensure_ascii=False)
    datasets = {f"data_{number}": rows for number, rows in enumerate(spec.get("datasets", {}).values(), start=1)}
    for short, digest in zip(datasets, spec.get("datasets", {}), strict=True):
        drawn = drawn.replace(digest, short)
    yield f"== {name}"
    yield from _folded(json.loads(drawn))
    for short, rows in datasets.items():
        yield f"-- {short}"
        yield from (json.dumps(row, ensure_ascii=False) for row in rows)


def _data_lines(name: str, spec: dict[str, Any]) -> Iterator[str]:
    """Rows alone, for charts that differ from others in these."""
    scales = sorted(set(re.findall('"type": "(linear|log|symlog)"', json.dumps(spec))))
    yield f"== {name}, scales: {', '.join(scales)}"
    for rows in spec.get("datasets", {}).values():
        yield "--"
        yield from (json.dumps(row, ensure_ascii=False) for row in rows)


def _folded(value: Any, before: str = "", depth: int = 0) -> Iterator[str]:
    """JSON in which whatever fits stands in one line."""
    text = f"{' ' * depth}{before}{json.dumps(value, ensure_ascii=False)}"
    if len(text) <= WIDTH or not isinstance(value, dict | list):
        yield text
        return
    yield f"{' ' * depth}{before}"
    named = value.items() if isinstance(value, dict) else (("-", element) for element in value)
    for name, element in named:
        yield from _folded(element, f"{name}: ", depth + 1)
