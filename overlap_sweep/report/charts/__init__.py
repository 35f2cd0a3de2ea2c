"""Charts in three forms that know no workload: rows of bars and dots, lines, gantt.

Whoever wants a chart builds a `Rows`, `Lines` or `Gantt` of plain values and gives it to `figures.figure`: how it is
drawn, colours and PNGs come with the form. Colours are names of `palette.COLOURS`; `details` are what a tooltip says,
by title.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SOLID, DASHED, DOTTED = (1, 0), (5, 3), (1, 3)
TICK = "M-.2,-1.2H.2V1.2H-.2Z"
"""A shape, beside those that Vega-Lite has by name: an upright bar."""


@dataclass(frozen=True)
class Axis:
    title: str = ""
    format: str = ""
    """As d3 has it, such as `.0%`; empty: as many digits as the values need."""
    domain: tuple[float, float] | None = None
    """Where it begins and ends; None: where the values do, and a margin."""
    from_zero: bool = False
    logarithmic: bool = False


@dataclass(frozen=True)
class Key:
    """What a colour means."""

    name: str
    colour: str
    shape: str = "square"
    dash: Sequence[int] = SOLID


@dataclass(frozen=True)
class Reference:
    """A line across the plot, at what is compared with it."""

    name: str
    at: float
    colour: str = "ink"
    dash: Sequence[int] = SOLID
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Dot:
    at: float
    low: float | None = None
    """With its noise, to `high`."""
    high: float | None = None
    colour: str = "accent"
    shape: str = "circle"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A bar from zero, cut into parts that follow each other, and dots; with neither it is a heading."""

    name: str
    cells: list[str] = field(default_factory=list)
    """What stands on the right, by column."""
    bold: bool = False
    details: dict[str, str] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)
    """Where each part of the bar ends; the next one begins there."""
    low: float | None = None
    """The bar with its noise, to `high`."""
    high: float | None = None
    colour: str = ""
    """Of the bar instead of its part's, where there is but one."""
    dots: list[Dot] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """Bars, dots or both, each with its noise, in rows below each other."""

    title: str
    subtitle: str
    axis: Axis
    rows: list[Row]
    """From top to bottom."""
    parts: list[Key] = field(default_factory=list)
    """Of bars."""
    columns: list[str] = field(default_factory=list)
    """Headers of the cells."""
    references: list[Reference] = field(default_factory=list)
    legend: list[Key] = field(default_factory=list)
    """What other colours mean than those of parts."""


def cut(base: float, time: float, whole: float) -> list[float]:
    """Returns the ends of three parts: the base, the time above it, and the hidden part of the whole."""
    return [min(base, time), time, max(time, whole)]


@dataclass(frozen=True)
class LinePoint:
    x: float
    y: float
    low: float | None = None
    """With its noise, to `high`."""
    high: float | None = None
    ringed: bool = False
    """What was chosen."""
    label: str = ""
    """Above it."""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    name: str
    points: list[LinePoint]
    colour: str
    shape: str = "circle"
    """Of its points; empty where they are not marked."""
    dash: Sequence[int] = SOLID
    width_px: float = 1.8
    connected: bool = True


@dataclass(frozen=True)
class Lines:
    """Lines over a quantity, with noise at their points, and what they are compared with."""

    title: str
    subtitle: str
    x: Axis
    y: Axis
    lines: list[Line]
    """From the lowest to the topmost."""
    references: list[Reference] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    start: float
    end: float
    colour: str
    text: str = ""
    """Within it."""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lane:
    name: str
    spans: list[Span]
    bold: bool = False


@dataclass(frozen=True)
class Gantt:
    """What ran when: lanes of spans below each other, on one time axis."""

    title: str
    unit: str
    lanes: list[Lane]
    """From top to bottom."""


Form = Rows | Lines | Gantt
"""All that one chart is drawn from, in the order of drawing."""
