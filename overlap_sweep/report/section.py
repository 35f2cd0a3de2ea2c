"""What a workload reports of its measurements. Terminal, summary.txt, report.html, tables and tuning_report.json are
renderings of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.table import Listing, PointRow, Row
from overlap_sweep.results.points import Point, PointStatus, Reading
from overlap_sweep.results.records import Records

if TYPE_CHECKING:
    from overlap_sweep.report.charts import Form


@dataclass(frozen=True)
class Sources:
    """All that an analysis is made of."""

    reading: Reading
    records: Records
    """What the sweeps that searched say of themselves."""
    config: AnalysisConfig
    command: str = ""
    """What was typed to analyse them."""

    def points(self, workload: str) -> list[Point]:
        """Returns the points of a workload, whatever became of them."""
        return [point for point in self.reading.points if point.workload == workload]


@dataclass(frozen=True)
class Exhibit:
    """A chart or a table with its notes. A terminal shows those with a table or notes."""

    chart: Callable[[], Form | None] | None = None
    """Returns what is to be drawn, or None where it would show nothing; only the page asks for it."""
    name: str = ""
    """What tells the chart's file from others of the same answer, behind the section's name and the answer's number."""
    small: bool = False
    """Whether the chart does without the page's whole width."""
    listing: Listing[Any] | None = None
    heading: str = ""
    brief: str = ""
    """The heading in a word, for a link to it at the top of the page; empty: there is none."""
    explained: str = ""
    drawn: str = ""
    """How the chart is read."""
    notes: Sequence[str] = ()
    parts: Callable[[], Sequence[Exhibit]] | None = None
    """Returns what the page has below this heading: small charts side by side, others below each other."""
    folded: str = ""
    """What is clicked on the page to see it; empty: it is open."""


@dataclass(frozen=True)
class Card:
    """One of several answers that are compared at a glance: side by side on the page, one by one on a terminal."""

    title: str
    headline: str
    """In a few words."""
    sentences: list[str]
    """What to do, and how sure it is."""
    basis: list[str] = field(default_factory=list)
    """What that rests on, a sentence each; the page folds it."""
    advised: str = ""
    """In a few words, why this is the card to take; empty where it is not."""
    file: str = ""
    """Where it is written, as seen from the page."""
    to_set: list[str] = field(default_factory=list)
    """Lines of configuration, to be read as they are."""
    code: list[str] = field(default_factory=list)
    """The file's content in blocks, for the page."""
    use: list[str] = field(default_factory=list)
    """Lines that switch it on where one trains, to be copied from the page."""


@dataclass(frozen=True)
class Answer:
    """The answer for one case: points that may be compared with each other."""

    title: str
    """What was measured, and on what."""
    sentences: list[str]
    """What to do first, then what that comes from."""
    cautions: list[str]
    """What to know before believing it."""
    compared: Listing[Any]
    """What the answer was chosen from."""
    points: list[Point]
    cards: list[Card] = field(default_factory=list)
    card: Card | None = None
    """What the page says instead of the sentences, where there are no cards; None: the sentences."""
    legend: str = ""
    """What the columns mean, below the table on the terminal."""
    brief: str = ""
    """The title in a few words, for links to it and for what is said of several answers; empty: there are no links."""
    charts: list[Exhibit] = field(default_factory=list)
    more: list[Exhibit] = field(default_factory=list)
    """Tables beside the one of what was compared."""
    details: list[str] = field(default_factory=list)
    """For summary.txt alone."""

    @property
    def shown_cards(self) -> list[Card]:
        """Returns the cards of the page: its own, or one of what it says."""
        headline, *more = self.sentences or [""]
        return self.cards or [self.card or Card(self.title, headline, more)]


@dataclass(frozen=True)
class File:
    """A file that a workload writes."""

    directory: Path
    """The analysed one, a run directory in it, or one of the workload's own; there, or at the same place in `--output`.
    """
    name: str
    content: Callable[[], bytes]
    kind: str = ""
    """What such files are called together, where they are not listed one by one: `results_*.json`."""


@dataclass(frozen=True)
class Section:
    """All that a workload reports."""

    name: str
    """Fit for an address of the page, and for the names of charts."""
    what: str
    """What was measured, in a word or two and in plural: `copies`."""
    title: str
    explained: str
    """What was measured and how it is to be read, on the page."""
    answers: list[Answer]
    points: Listing[PointRow[Any]]
    """Every point, for files, queries and the page."""
    report: dict[str, Any]
    """What tuning_report.json says, by its keys."""
    decided: Listing[Any] | None = None
    """The answers as rows, for `--format` and `--fail-if`; None: the points. Those with a caption
    are shown before the answers, where there are several."""
    files: list[File] = field(default_factory=list)
    """Beside the tables and charts."""
    more: list[Exhibit] = field(default_factory=list)
    """What is of no single answer, behind all of them."""
    most_tables: int | None = None
    """Of more answers than so many a terminal shows only the rows that sum them up."""
    most_charts: int | None = None
    """The page has charts of the first so many answers."""
    topic: str = ""
    """What it is about, for the page's title: `tensor-parallel overlap`; empty: `what`."""
    subjects: list[str] = field(default_factory=list)
    """What was measured of no model, for the page's title."""
    launch_bound: int = 0
    """Points whose times say nothing about the device."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each file that could not be read."""
    warnings: list[str] = field(default_factory=list)
    """A sentence for each file that was read only in part."""

    @cached_property
    def records(self) -> list[Row]:
        """Returns the points as rows, with every column of files."""
        return self.points.table.records(self.points.rows)

    @property
    def answered(self) -> Listing[Any]:
        """Returns the answers as rows."""
        return self.decided or self.points

    @property
    def summary(self) -> Listing[Any] | None:
        """Returns several answers in a table, where the answers as rows have a caption."""
        return self.decided if self.decided and self.decided.caption and len(self.answers) > 1 else None

    @property
    def file(self) -> str:
        """Returns the name of the file with the table of all points."""
        return f"{self.points.table.name}.csv"


@dataclass(frozen=True)
class Analysis:
    """All that is known about a directory of results."""

    sources: Sources
    sections: list[Section]

    @property
    def problems(self) -> list[str]:
        """Returns a sentence for each file that is there and cannot be read."""
        reading, records = self.sources.reading, self.sources.records
        of_sections = [problem for section in self.sections for problem in section.problems]
        return [*reading.problems, *records.problems, *of_sections]

    @property
    def warnings(self) -> list[str]:
        """Returns a sentence for each file that was read only in part."""
        return [warning for section in self.sections for warning in section.warnings]

    @property
    def counts(self) -> dict[str, int]:
        """Returns the number of points by status, and of those that cannot be read or believed."""
        points, unreadable = self.sources.reading.points, len(self.sources.reading.problems)
        found = Counter(point.status for point in points)
        return {
            "points": len(points) + unreadable,
            **{status: found[status] for status in get_args(PointStatus)},
            "unreadable": unreadable,
            "launch_bound": sum(section.launch_bound for section in self.sections),
        }
