"""Charts in four forms that know no workload: bars, dots, lines, gantt.

Whoever wants a chart builds a `Bars`, `Dots`, `Lines` or `Gantt` of plain values and gives it to `figures.figure`: how
it is drawn, what a screen reader says of it, colours and PNGs come with the form. Colours are names of
`palette.COLOURS`; `details` are what a tooltip says, by title.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Align = Literal["left", "center", "right"]
Mark = Literal["dot", "ring", "tick"]

SUBTITLE_WIDTH = 150
"""In characters: as long as a chart is wide that stands alone."""


@dataclass(frozen=True)
class Axis:
    title: str = ""
    format: str = ""
    """As d3 has it, such as `.0%`; empty: as many digits as the values need."""
    domain: tuple[float, float] | None = None
    """Where it begins and ends; None: where the values do, and a margin."""
    ticks: list[float] = field(default_factory=list)
    """Empty: wherever they fit."""
    from_zero: bool = False
    logarithmic: bool | None = None
    """None: where the values are above 0 and far apart, unless there is a domain."""


@dataclass(frozen=True)
class Key:
    """What a colour means."""

    name: str
    colour: str
    opacity: float = 1.0
    shape: Literal["square"] | Mark = "square"


@dataclass(frozen=True)
class Column:
    """Of the cells on the right of rows."""

    title: str
    align: Align = "right"
    bold: bool = False


@dataclass(frozen=True)
class Reference:
    """A line at what rows are compared with."""

    at: float
    label: str = ""
    below: str = ""
    """What being below it means; above it `above`."""
    above: str = ""
    colour: str = "ink"


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    cells: list[str] = field(default_factory=list)
    """What stands on the right, by column."""
    bold: bool = False
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Dot:
    at: float
    low: float | None = None
    """With its noise, to `high`."""
    high: float | None = None
    colour: str = "accent"
    shape: Mark = "dot"
    label: str = ""
    """Above it; of a bar's marker alone."""


@dataclass(frozen=True, kw_only=True)
class Bar(Row):
    ends: list[float]
    """Where each part ends; the next one begins there. Empty where nothing is known."""
    low: float | None = None
    """With its noise, to `high`."""
    high: float | None = None
    colour: str = ""
    """Instead of the part's, where there is but one."""
    marker: Dot | None = None
    """Another value, such as that of another setting."""


@dataclass(frozen=True)
class Bars:
    """Bars from zero, one a row: cut into parts that follow each other, or of a single part, to either side."""

    title: str
    subtitle: str
    axis: Axis
    parts: list[Key]
    columns: list[Column]
    bars: list[Bar]
    """From top to bottom."""
    references: list[Reference] = field(default_factory=list)


def cut(base: float, time: float, whole: float) -> list[float]:
    """Returns the ends of three parts: the base, what stands above it in the time, what is hidden of the whole."""
    return [min(base, time), time, max(time, whole)]


@dataclass(frozen=True, kw_only=True)
class DotRow(Row):
    dots: list[Dot] = field(default_factory=list)
    """None where the row is a heading."""
    note: str = ""
    """Beside the last dot, where there is room."""


@dataclass(frozen=True)
class Dots:
    """Dots, any number in a row: values with their noise beside what they are compared with."""

    title: str
    subtitle: str
    axis: Axis
    columns: list[Column]
    rows: list[DotRow]
    references: list[Reference] = field(default_factory=list)
    legend: list[Key] = field(default_factory=list)
    connected: bool = False
    """Whether a bar joins the dots of a row, in the colour of the last."""


@dataclass(frozen=True)
class LinePoint:
    x: float
    y: float
    low: float | None = None
    """With its noise, to `high`."""
    high: float | None = None
    part: int = 0
    """A line does not go from one part to another, as where steps were not recorded."""
    ringed: bool = False
    """What was chosen; `label` stands below it, others' above."""
    label: str = ""
    colour: str = ""
    """Instead of the line's; likewise the shape."""
    shape: str = ""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    name: str
    points: list[LinePoint]
    colour: str
    shape: str = "circle"
    """Of its points; empty where they are not marked."""
    dash: Sequence[int] = (1, 0)
    width_px: float = 1.8
    connected: bool = True
    label: str | None = None
    """At its end; None: its name."""
    label_y: float | None = None
    """Where the label stands; None: where the line ends."""


@dataclass(frozen=True)
class Level:
    """What does not change along the axis, or what lines are compared with."""

    name: str
    y: float
    colour: str
    low: float | None = None
    high: float | None = None
    dash: Sequence[int] = (1, 0)
    width_px: float = 1.5
    label: str | None = None
    """At the right; None: its name."""
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Area:
    """Between the `low` and the `high` of its points."""

    name: str
    points: list[LinePoint]
    colour: str
    opacity: float
    label_y: float


@dataclass(frozen=True)
class Event:
    """What happened at a place of the axis: a triangle at the top."""

    x: float
    label: str


@dataclass(frozen=True)
class Note:
    """Words at the foot of the plot."""

    x: float
    text: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lines:
    """Lines over a quantity, with noise at their points; levels, areas and what else stands beside them."""

    title: str
    subtitle: str
    x: Axis
    y: Axis
    lines: list[Line]
    """From the lowest to the topmost."""
    levels: list[Level] = field(default_factory=list)
    areas: list[Area] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    shaded: list[tuple[float, float]] = field(default_factory=list)
    """From where to where on the axis the background is grey."""
    legend: bool = False
    """Whether names stand above the plot, as of lines that lie on each other, and not at their ends."""
    subtitle_width: int = SUBTITLE_WIDTH


@dataclass(frozen=True)
class GanttBar:
    start: float
    end: float
    colour: str
    details: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lane:
    name: str
    bars: list[GanttBar]


@dataclass(frozen=True)
class Extent:
    """A stretch of the group as a whole, such as a pass."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Group:
    title: str
    lanes: list[Lane]
    """From top to bottom."""
    extents: list[Extent]
    """Above the lanes."""


@dataclass(frozen=True)
class Gantt:
    """What ran when: lanes of spans in groups below each other, on one time axis that begins with each group."""

    title: str
    unit: str
    groups: list[Group]


Form = Bars | Dots | Lines | Gantt
"""All that one chart is drawn from, in the order of drawing."""
