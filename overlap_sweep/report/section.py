"""The report of a workload. Terminal, summary.txt, report.html, tables and tuning_report.json are renderings of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.table import Listing, PointRow
from overlap_sweep.results.points import Point, PointStatus, Reading
from overlap_sweep.results.records import Records

if TYPE_CHECKING:
    import pandas as pd

    from overlap_sweep.report.charts import Form


@dataclass(frozen=True)
class Sources:
    """The inputs of an analysis."""

    reading: Reading
    records: Records
    """Records of searches."""
    config: AnalysisConfig
    command: str = ""
    """The command line of the analysis."""

    def points(self, workload: str) -> list[Point]:
        """Returns the points of a workload, of any status."""
        return [point for point in self.reading.points if point.workload == workload]


@dataclass(frozen=True)
class Exhibit:
    """A chart or a table with notes. A terminal shows only those with a table or notes."""

    chart: Callable[[], Form | None] | None = None
    """Returns the chart, or None if it would be empty; only the page calls it."""
    name: str = ""
    """Last part of the chart's file name, after the section's name and the answer's number."""
    small: bool = False
    """Whether the chart does not need the page's full width."""
    listing: Listing | None = None
    heading: str = ""
    brief: str = ""
    """One word for the link at the top of the page; empty: no link."""
    explained: str = ""
    drawn: str = ""
    """How to read the chart."""
    notes: Sequence[str] = ()
    parts: Callable[[], Sequence[Exhibit]] | None = None
    """Returns the exhibits below this heading on the page: small charts side by side, others below each other."""
    folded: str = ""
    """Text to click on the page to unfold it; empty: not folded."""
    closed: bool = False
    """Whether it is folded at first even where little else is there."""
    on_page: bool = True
    """Whether the page shows it, too; False if the page says more about the same elsewhere."""


@dataclass(frozen=True)
class Card:
    """A short answer: cards are side by side on the page and one after the other on a terminal."""

    title: str
    headline: str
    """The answer in a few words."""
    sentences: list[str]
    """Sentences on what to do, and how certain it is."""
    basis: list[str] = field(default_factory=list)
    """Sentences with the basis of the answer; folded on the page."""
    advised: str = ""
    """Why this card is recommended, in a few words; empty if it is not."""
    file: str = ""
    """Path of the file to use, relative to the page."""
    to_set: list[str] = field(default_factory=list)
    """Lines of configuration, shown verbatim."""
    code: list[str] = field(default_factory=list)
    """The file's content in blocks, for the page."""
    use: list[str] = field(default_factory=list)
    """Lines for training with it, to be copied from the page."""
    to_write: list[str] = field(default_factory=list)
    """Lines for the user's script, without which those do not give it; shown verbatim."""
    limits: str = ""
    """Why the lines may not hold where training runs, shown beside them; empty if they do."""


@dataclass(frozen=True)
class Answer:
    """The answer for one case, that is for comparable points."""

    title: str
    """The measured case and its machine, in a line."""
    sentences: list[str]
    """Sentences: first what to do, then the reasons."""
    cautions: list[str]
    """Reasons to doubt the answer, a sentence each."""
    compared: Listing
    """Rows that the answer was chosen from."""
    points: list[Point]
    cards: list[Card] = field(default_factory=list)
    card: Card | None = None
    """The page's card if there are no cards; None: made of the sentences."""
    legend: str = ""
    """Explanation of the columns, below the table on the terminal."""
    others: list[str] = field(default_factory=list)
    """Sentences on how much each other row that could win differs from the answer; empty where a search says so."""
    brief: str = ""
    """Short title for links and lists of answers; empty: no links."""
    charts: list[Exhibit] = field(default_factory=list)
    more: list[Exhibit] = field(default_factory=list)
    """Further tables."""
    details: list[str] = field(default_factory=list)
    """Lines for summary.txt only."""
    later: Callable[[], str] | None = None
    """Returns one more sentence, or an empty text, for terminals and summary.txt: what is slow to find."""

    @property
    def shown_cards(self) -> list[Card]:
        """Returns the cards of the page: its own, or one made of the sentences."""
        headline, *more = self.sentences or [""]
        return self.cards or [self.card or Card(self.title, headline, more)]


@dataclass(frozen=True)
class File:
    """A file that a workload writes."""

    directory: Path
    """The analysed directory, a run directory in it, or one of the workload's own; with `--output` at the same place
    there.
    """
    name: str
    content: Callable[[], bytes]
    kind: str = ""
    """Common name of files that are not listed one by one, such as `results_*.json`; empty: listed."""
    by_launch: bool = False
    """Whether launching writes it into the run directory, which analysis does not change."""


@dataclass(frozen=True)
class Section:
    """The report of one workload."""

    name: str
    """Name for the page's addresses and the charts' files."""
    what: str
    """What was measured, in one or two words, plural: `copies`."""
    title: str
    explained: str
    """What was measured and how to read it, on the page."""
    answers: list[Answer]
    points: Listing[PointRow]
    """Every point, for files, queries and the page."""
    report: dict[str, object]
    """Keys and contents for tuning_report.json."""
    decided: Listing | None = None
    """The answers as rows, for `--format` and `--fail-if`; None: the points. With a caption they are shown before
    several answers."""
    files: list[File] = field(default_factory=list)
    """Files besides tables and charts."""
    more: list[Exhibit] = field(default_factory=list)
    """Exhibits that belong to no single answer, after all answers."""
    most_tables: int | None = None
    """With more answers than this a terminal shows only the summary."""
    most_charts: int | None = None
    """The page has charts for this many answers, the first ones."""
    topic: str = ""
    """Topic for the page's title: `tensor-parallel overlap`; empty: `what`."""
    subjects: list[str] = field(default_factory=list)
    """Subjects other than models, for the page's title."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each file that could not be read."""
    warnings: list[str] = field(default_factory=list)
    """A sentence for each file of which only part was read."""

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Returns the points with every column of files."""
        return self.points.frame

    @property
    def launch_bound(self) -> int:
        """Returns the number of launch-bound points."""
        return len({row.directory for row in self.points.rows if row.is_launch_bound})

    @property
    def answered(self) -> Listing:
        return self.decided or self.points

    @property
    def summary(self) -> Listing | None:
        """Returns the table that sums up several answers; None if the answers as rows have no caption."""
        return self.decided if self.decided and self.decided.caption and len(self.answers) > 1 else None

    @property
    def file(self) -> str:
        """Returns the name of the file with the table of all points."""
        return f"{self.points.table.name}.csv"


@dataclass(frozen=True)
class Analysis:
    """The analysis of a directory of results."""

    sources: Sources
    sections: list[Section]

    @property
    def answers(self) -> list[Answer]:
        return [answer for section in self.sections for answer in section.answers]

    @property
    def problems(self) -> list[str]:
        """Returns a sentence for each file that cannot be read."""
        reading, records = self.sources.reading, self.sources.records
        section_problems = [problem for section in self.sections for problem in section.problems]
        return [*reading.problems, *records.problems, *section_problems]

    @property
    def warnings(self) -> list[str]:
        """Returns a sentence for each file of which only part was read."""
        return [warning for section in self.sections for warning in section.warnings]

    @property
    def counts(self) -> dict[str, int]:
        """Returns the number of points by status, and of unreadable and launch-bound ones."""
        points, unreadable = self.sources.reading.points, len(self.sources.reading.problems)
        found = Counter(point.status for point in points)
        return {
            "points": len(points) + unreadable,
            **{status: found[status] for status in get_args(PointStatus)},
            "unreadable": unreadable,
            "launch_bound": sum(section.launch_bound for section in self.sections),
        }
