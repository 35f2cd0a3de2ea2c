"""Writes report.html, a single file that needs no network, and optionally its charts as PNGs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar, cast

from markupsafe import Markup, escape

from overlap_sweep.overlap.models import CUSTOM, title_of
from overlap_sweep.report.charts import FONT, chart_config, style_sheet
from overlap_sweep.report.charts.figures import (
    Figure,
    figure,
    left_out,
    page_script,
    png,
    script_safe,
    why_it_cannot_run,
)
from overlap_sweep.report.comparison import flat
from overlap_sweep.report.numbers import as_sentence, counted, some_of
from overlap_sweep.report.searches import knob_searches
from overlap_sweep.report.section import Analysis, Answer, Exhibit, Section
from overlap_sweep.report.table import Column, Listing, PointRow, RowText, is_unknown
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments, launch_commands, machines_in_brief, measured_when

R = TypeVar("R")

FILE_NAME = "report.html"
PLOTS = "plots"
MOST_ROWS = 3000
"""Most rows of a section's table of all points; about 0.7 kB each."""
MOST_LINKS = 12
"""Most links to the answers of a section, at the top of the page."""
MOST_CARDS = 6
"""Most cards of a section at the top of the page; with more, a row each there and the cards next to the answers."""
MOST_SENTENCES = 3
"""Sentences of a card that are not folded."""
MOST_SUBJECTS = 3
"""Most subjects, and most topics, in the page's title."""
BEYOND = 1e300
"""Sort key after all measured values."""
WORDS = {
    "none_us": ("without overlap", "no overlap", "none"),
    "floor_us": ("GEMMs alone", "floor"),
    "hidden_fraction": ("hidden",),
    "noise_us": ("noise",),
    "exposed_comm_us": ("exposed",),
    "over_bound": ("the bound",),
    "speedup": ("speedup",),
}
"""Words in sentences for columns, by column."""


@dataclass(frozen=True)
class Cell:
    text: str
    order: float | str | None = None
    """Sort key, if it is not the text."""
    kind: str = ""
    """`number`, or a class of the style sheet."""
    link: str = ""
    """Address on the page."""


@dataclass(frozen=True)
class PageTable:
    columns: list[Column]
    rows: list[list[Cell]]
    caption: str = ""
    texts: list[RowText] = field(default_factory=list)
    """Sentences of each row; empty: it is a table without them."""

    def turn(self, place: int) -> int:
        """Returns the order in which a narrow page drops the column, from 1 on: first page-only numbers, then as on
        terminals, then numbers from right to left, last numbers where high is better, counts and texts. 0, never: the
        first column, times, status and notes."""
        column = self.columns[place]
        if place == 0 or column.name == "time_us" or column.header in ("status", "note"):
            return 0
        if column.header == "point":
            return 1
        if column.page_only and column.is_number and place > 1:
            return 2
        if column.dropped:
            return 10 + column.dropped
        kind = 300 if column.kind != "number" else 200 if column.high_first else 100
        return kind + len(self.columns) - place


@dataclass(frozen=True)
class ShownExhibit:
    """An exhibit with its chart and table, ready for the page."""

    address: str
    exhibit: Exhibit
    chart: Figure | None
    table: PageTable | None
    parts: list[ShownExhibit]

    @property
    def shows(self) -> bool:
        return bool(self.chart or self.table or self.parts or self.exhibit.notes)

    @property
    def charts(self) -> Iterator[Figure]:
        yield from [self.chart] if self.chart else []
        for part in self.parts:
            yield from part.charts


@dataclass(frozen=True)
class ShownSection:
    """A section, ready for the page."""

    section: Section
    answers: list[tuple[str, Answer, list[ShownExhibit]]]
    """Address, answer and exhibits of each answer."""
    more: list[ShownExhibit]

    @property
    def cards_on_top(self) -> bool:
        cards = sum(len(answer.shown_cards) for _, answer, _ in self.answers)
        return self.summary is None and cards <= MOST_CARDS

    @property
    def explained_columns(self) -> list[Column]:
        """Returns the columns that its sentences may mention."""
        tables = [answer.compared.table for _, answer, _ in self.answers][:1]
        return [column for table in [*tables, self.section.points.table] for column in table.columns]

    @property
    def summary(self) -> PageTable | None:
        listing = self.section.summary
        return summary_table(listing, [address for address, *_ in self.answers]) if listing else None

    @property
    def points(self) -> PageTable | None:
        """Returns the table of all points; None if there are too many."""
        listing = self.section.points
        return points_table(listing) if len(listing.rows) <= MOST_ROWS else None


@dataclass
class Terms:
    """The explanations of columns, and of the words for them in sentences, each of which is on a page once."""

    explained: dict[tuple[str, str], str] = field(default_factory=dict)
    """Ids by name and explanation."""

    def id_of(self, column: Column) -> str:
        """Returns the id of the column's explanation; empty if there is none."""
        plain_header = column.header.replace(" ", "_")
        in_files = f"In files: {column.name}." if column.name not in ("", plain_header) else ""
        text = " ".join(filter(None, [column.about, in_files]))
        return self.explained.setdefault((column.header, text), f"term-{len(self.explained) + 1}") if text else ""

    def marked(self, text: str, columns: Iterable[Column]) -> Markup:
        """Returns the sentence, in which the first word for each column refers to its explanation."""
        known = {word: column for column in columns for word in WORDS.get(column.name, ())}
        if not known:
            return escape(text)
        ordered = sorted(known, key=len, reverse=True)
        pieces = re.split(rf"(?<![\w-])({'|'.join(map(re.escape, ordered))})(?![\w-])", text)
        explained: set[str] = set()
        marked = Markup("")
        for i, piece in enumerate(pieces):
            column = known[piece] if i % 2 else None
            if column and column.name not in explained and (term := self.id_of(column)):
                explained.add(column.name)
                marked += Markup('<span class="term" tabindex="0" aria-describedby="{}">{}</span>').format(term, piece)
            else:
                marked += escape(piece)
        return marked


def page_files(
    analysis: Analysis, other_files: Sequence[str], *, with_plots: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Yields paths below the report's directory with their contents: the page, then its charts as PNGs, which take most
    of the time. `other_files`: names of the other files there."""
    sections = [_shown(section) for section in analysis.sections]
    with_plots = with_plots and not why_it_cannot_run()
    yield FILE_NAME, _page(analysis, sections, other_files).encode()
    exhibits = (exhibit for shown in sections for *_, exhibits in shown.answers for exhibit in exhibits)
    for chart in (chart for exhibit in exhibits for chart in exhibit.charts) if with_plots else ():
        yield f"{PLOTS}/{chart.name}.png", png(chart)


def _shown(section: Section) -> ShownSection:
    with_charts = len(section.answers) if section.most_charts is None else section.most_charts
    answers = []
    for number, answer in enumerate(section.answers, start=1):
        address = f"{section.name}-{number}"
        exhibits = [*(answer.charts if number <= with_charts else []), *(one for one in answer.more if one.on_page)]
        answers.append((address, answer, _exhibits(address, exhibits)))
    return ShownSection(section, answers, _exhibits(section.name, section.more))


def _exhibits(address: str, exhibits: Sequence[Exhibit]) -> list[ShownExhibit]:
    """Returns the exhibits that are not empty. Charts, which are also files, are named by their place."""
    found = []
    for number, one in enumerate(exhibits, start=1):
        form = one.chart() if one.chart else None
        name = f"{address}-{one.name}" if one.name else address
        shown = ShownExhibit(
            address=f"{address}-exhibit-{number}",
            exhibit=one,
            chart=figure(name.replace("-", "_"), form) if form and page_script() else None,
            table=page_table(one.listing) if one.listing else None,
            parts=_exhibits(name, one.parts()) if one.parts else [],
        )
        found += [shown] if shown.shows else []
    return found


def _page(analysis: Analysis, sections: Sequence[ShownSection], other_files: Sequence[str]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    reading, terms = analysis.sources.reading, Terms()
    scripts = [_in_script(page_script() or ""), _in_script((here / "page.js").read_text())]
    return environment.get_template("page.html.j2").render(
        title=_title(analysis),
        terms=terms,
        most_sentences=MOST_SENTENCES,
        measured=measured_when(reading.points),
        knob_searches=list(knob_searches(analysis.sources.records.knobs, reading.root)),
        sections=sections,
        page_table=page_table,
        most_links=MOST_LINKS,
        counts={name: count for name, count in analysis.counts.items() if count},
        machines=list(_machines(reading.points)),
        commands=[*launch_commands(reading.points), analysis.sources.command],
        problems=analysis.problems,
        other_files=other_files,
        style=style_sheet() + f":root {{ --font: {FONT}; }}\n" + (here / "page.css").read_text(),
        tables_style=_itables_file("dt_bundle.css"),
        config=script_safe(json.dumps(chart_config())),
        tables_script=_in_script(_itables_file("dt_bundle.js")),
        scripts=scripts,
        policy=_policy(scripts),
        left_out=left_out(),
    )


def _title(analysis: Analysis) -> str:
    """Returns `Llama-3 8B on 2 x NVIDIA H200: tensor-parallel overlap`."""
    points, answered = analysis.sources.reading.points, [section for section in analysis.sections if section.answers]
    models = dict.fromkeys(title_of(point.case.model) for point in points if point.case.model != CUSTOM)
    subjects = list(dict.fromkeys([*models, *(subject for section in answered for subject in section.subjects)]))
    machine = machines_in_brief(points)
    about = " on ".join(filter(None, [some_of(subjects, MOST_SUBJECTS), machine]))
    topics = some_of(
        dict.fromkeys(section.topic or section.what for section in answered or analysis.sections), MOST_SUBJECTS
    )
    return f"{about}: {topics}" if about else as_sentence(topics)


def _machines(points: Sequence[Point]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields a heading and the values of each environment, the most frequent first."""
    with_result = [point for point in points if point.result and point.result.environment]
    first: dict[str, object] = {}
    for environment in environments(with_result):
        own = [point for point in with_result if point.result and point.result.environment == environment]
        known = {name: value for name, value in flat(environment).items() if value is not None}
        # Other environments only list what differs from the first.
        new = {name: value for name, value in known.items() if not first or first.get(name) != value}
        new |= {name: "-" for name in first if name not in known}
        lines = {name: value if isinstance(value, list) else [value] for name, value in new.items()}
        differs = ", where it differs" if first else ""
        first = first or known
        yield (
            f"{counted(len(own), 'point')}, {measured_when(own)}{differs}",
            {name: "\n".join(map(str, values)) for name, values in lines.items()},
        )


def _policy(scripts: Sequence[str]) -> str:
    """Returns the page's Content-Security-Policy: its own scripts and those that they make, and no network."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    own = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {own} blob:; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _itables_file(name: str) -> str:
    """Returns a file of DataTables from itables: a style sheet, or a module that exports DataTables."""
    # Importing the package would import pandas.
    spec = find_spec("itables")
    assert spec
    assert spec.origin
    return (Path(spec.origin).parent / "html" / name).read_text(encoding="utf-8")


def _in_script(code: str) -> str:
    r"""Returns the code with `<\/` for `</`, which means the same in JavaScript's strings and comments, and with
    the line ends that browsers make of others."""
    return code.replace("</script", r"<\/script").replace("<!--", r"<\!--").replace("\r\n", "\n").replace("\r", "\n")


def page_table(listing: Listing) -> PageTable:
    """Returns the listing's rows with the columns for people."""
    columns = listing.columns
    rows = [[_cell(column, row, listing.chosen(row)) for column in columns] for row in _in_order(listing)]
    texts = list(map(listing.text, listing.rows)) if listing.text else []
    return PageTable(columns, rows, listing.caption, texts)


def summary_table(listing: Listing, addresses: Sequence[str]) -> PageTable:
    """Returns rows that sum up answers, each with a link to its answer at one of the `addresses`."""
    table = page_table(listing)
    if listing.link is None:
        return table
    linked = [
        [replace(first, link=addresses[listing.link(row)]), *others]
        for row, (first, *others) in zip(_in_order(listing), table.rows, strict=True)
    ]
    return replace(table, rows=linked)


def _in_order(listing: Listing[R]) -> Sequence[R]:
    return sorted(listing.rows, key=listing.order) if listing.order else listing.rows


def points_table(listing: Listing[PointRow]) -> PageTable:
    """Returns all points with a note, such as why a point is not ok, and the directory."""
    notes = [column for column in listing.table.shown if column.header == "note"]

    def note(row: PointRow) -> str:
        return row.why_not_ok or (notes[0].text(row) if notes else "")

    columns = [column for column in listing.columns if column.header != "note"]
    if any(map(note, listing.rows)):
        # Next to the status, where it is visible.
        note_place = next((i for i, column in enumerate(columns, start=1) if column.header == "status"), 0)
        columns.insert(note_place, Column("", note, kind="text", header="note", style="reason"))
    columns.append(Column("", lambda row: row.directory, kind="text", header="point"))
    return page_table(replace(listing, table=replace(listing.table, columns=tuple(columns))))


def _cell(column: Column[R], row: R, chosen: bool) -> Cell:
    value, kind = column.value(row), column.style if isinstance(column.style, str) else column.style(row)
    if not column.is_number:
        return Cell(column.text(row), kind="chosen" if chosen and kind == "reason" else kind)
    if is_unknown(value):
        return Cell(column.text(row), -BEYOND if column.high_first else BEYOND, "number")
    return Cell(column.text(row), round(cast("float", value), 6), "number")
