"""Timelines as SVG: rows of bars, launches with lines to their kernels, and marks of the intervals that decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from overlap_sweep.report.charts import COLOURS, FONT

WIDTH_PX, NAMES_PX, ROW_PX, BAR_PX, LETTER_PX = 800, 118, 23, 16, 5.9
SHORTEST_PX = 0.7
MOST_LINKS = 30
MEANINGS = {
    "gemm": "GEMM",
    "compute": "other computation",
    "memory": "copies",
    "comm": "communication",
    "saved": "its wait for another rank",
    "wait": "host waits",
}
"""Of colours."""


@dataclass
class Bar:
    start_ns: float
    end_ns: float
    colour: str
    text: str = ""


@dataclass
class Row:
    """A lane of bars and ticks; without a name a row of marks."""

    name: str = ""
    bars: list[Bar] = field(default_factory=list)
    ticks: list[tuple[float, str]] = field(default_factory=list)
    """Moment and colour."""
    marks: list[tuple[float, float, str]] = field(default_factory=list)
    """Start, end and text of an interval that decides."""
    links: list[tuple[float, float, int]] = field(default_factory=list)
    """Of launches that are shown with their kernels: moment, start of the kernel, its lane."""
    lane: int = -1
    bold: bool = False


@dataclass(frozen=True)
class Window:
    start_ns: float
    end_ns: float

    def x(self, moment_ns: float) -> float:
        share = (moment_ns - self.start_ns) / (self.end_ns - self.start_ns)
        return NAMES_PX + min(max(share, 0.0), 1.0) * (WIDTH_PX - NAMES_PX - 8)

    def shows(self, start_ns: float, end_ns: float) -> bool:
        return end_ns > self.start_ns and start_ns < self.end_ns


def drawn(rows: Sequence[tuple[Window, Row]], about: str) -> str:
    """Returns the picture as SVG."""
    height = ROW_PX * len(rows) + 54
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" width="{WIDTH_PX}" '
        f'height="{height}" font-family="{escape(FONT)}" font-size="11" role="img"><title>{escape(about)}</title>',
        f'<rect width="{WIDTH_PX}" height="{height}" fill="#fff"/>',
    ]
    tops = [6 + ROW_PX * number for number in range(len(rows))]
    for number, (window, row) in enumerate(rows):
        if len(row.links) <= MOST_LINKS:
            parts += _links(window, row, tops[number], rows[number:], tops[number:])
    for (window, row), top in zip(rows, tops, strict=True):
        parts += _row(window, row, top)
    parts += _axis(rows[0][0], height - 20)
    parts += _legend([row for _, row in rows], height)
    return "\n".join([*parts, "</svg>\n"])


def _links(
    window: Window, row: Row, top: float, below: Sequence[tuple[Window, Row]], tops: Sequence[float]
) -> Iterator[str]:
    """Yields a line from each launch to its kernel."""
    for at, start, lane in row.links:
        place = next((y for (_, other), y in zip(below, tops, strict=True) if other.lane == lane), None)
        if place is not None and start < window.end_ns:
            line = f"M{window.x(at):.1f} {top + BAR_PX - 2}L{window.x(start):.1f} {place}"
            yield f'<path d="{line}" stroke="{COLOURS["muted"][0]}" opacity="0.5"/>'


def _row(window: Window, row: Row, y: float) -> Iterator[str]:
    ink, muted, middle = COLOURS["ink"][0], COLOURS["muted"][0], y + BAR_PX / 2 + 4
    if row.bold:
        yield f'<text x="4" y="{middle:.1f}" font-weight="600" fill="{ink}">{escape(row.name)}</text>'
    elif row.name:
        yield f'<text x="{NAMES_PX - 8}" y="{middle:.1f}" text-anchor="end" fill="{muted}">{escape(row.name)}</text>'
    for bar in row.bars:
        a, b = window.x(bar.start_ns), window.x(bar.end_ns)
        width = max(b - a - 0.4, SHORTEST_PX)
        yield f'<rect x="{a:.1f}" y="{y}" width="{width:.1f}" height="{BAR_PX}" fill="{COLOURS[bar.colour][0]}"/>'
        if bar.text and LETTER_PX * len(bar.text) + 6 < b - a:
            place = f'x="{(a + b) / 2:.1f}" y="{middle:.1f}" text-anchor="middle"'
            yield f'<text {place} fill="#fff">{escape(bar.text)}</text>'
    for moment, colour in row.ticks:
        x = window.x(moment)
        yield f'<path d="M{x:.1f} {y + 2}v{BAR_PX - 4}" stroke="{COLOURS[colour][0]}"/>'
    for start, end, text in row.marks:
        a, b, low = window.x(start), window.x(end), y + BAR_PX + 3
        half = LETTER_PX * len(text) / 2
        x = min(max((a + b) / 2, NAMES_PX + half), WIDTH_PX - 4 - half)
        yield f'<text x="{x:.1f}" y="{y + 11}" text-anchor="middle" fill="{ink}">{escape(text)}</text>'
        yield f'<path d="M{a:.1f} {low + 2}v-4H{b:.1f}v4" fill="none" stroke="{ink}"/>'


def _axis(window: Window, height: float) -> Iterator[str]:
    muted, length_us = COLOURS["muted"][0], (window.end_ns - window.start_ns) / 1000
    every = next(step for step in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000) if length_us / step <= 9)
    for at in range(0, int(length_us) + 1, every):
        x = window.x(window.start_ns + 1000 * at)
        yield f'<path d="M{x:.1f} {height - 24}v5" stroke="{muted}"/>'
        text = f"{at} us" if length_us < 1000 else f"{at / 1000:g} ms"
        anchor = "start" if at == 0 else "end" if x > WIDTH_PX - 30 else "middle"
        yield f'<text x="{x:.1f}" y="{height - 8}" text-anchor="{anchor}" fill="{muted}">{text}</text>'


def _legend(rows: Sequence[Row], height: float) -> Iterator[str]:
    used = {bar.colour for row in rows for bar in row.bars}
    x = float(NAMES_PX)
    for colour, meaning in MEANINGS.items():
        if colour in used:
            yield f'<rect x="{x:.0f}" y="{height - 17}" width="10" height="10" fill="{COLOURS[colour][0]}"/>'
            yield f'<text x="{x + 14:.0f}" y="{height - 8}" fill="{COLOURS["muted"][0]}">{meaning}</text>'
            x += 30 + LETTER_PX * len(meaning)
