"""report.html, one file that needs no network, and, where they are asked for, the PNGs beside it, from one analysis."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overlap_sweep.cache import cached_bytes
from overlap_sweep.overlap.kernel_shape import CUSTOM
from overlap_sweep.report.charts.figures import Figure, figure, png, script_safe
from overlap_sweep.report.charts.palette import FONT, chart_config, style_sheet
from overlap_sweep.report.searches import knob_searches
from overlap_sweep.report.section import Analysis, Answer, Exhibit, Section
from overlap_sweep.report.table import Column, Listing, PointRow, is_unknown
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments, launch_commands, measured_when

FILE_NAME = "report.html"
PLOTS = "plots"
MOST_ROWS = 3000
"""Of a section's table of all points; some 0.7 kB each."""
MOST_LINKS = 12
"""To the answers of a section, at the top of the page."""
BEYOND = 1e300
"""Sorts below everything that is measured."""
NAMES = {
    "gpu": "GPU",
    "gpu_count": "GPUs",
    "cpu": "CPU",
    "cpu_count": "CPU cores",
    "nccl": "NCCL",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
}
"""What keys of an environment are called for people, where underscores are not all."""


@dataclass(frozen=True)
class Cell:
    text: str
    order: float | str | None = None
    """What it sorts by, where that is not its text."""
    kind: str = ""
    """`number`, or what a style sheet tells apart."""
    link: str = ""
    """An address of the page."""


@dataclass(frozen=True)
class PageTable:
    columns: list[str]
    rows: list[list[Cell]]
    numeric: frozenset[str]
    high_first: frozenset[str]
    """The columns whose highest numbers one looks for."""
    caption: str = ""


@dataclass(frozen=True)
class ShownExhibit:
    """An exhibit with its chart and table as the page has them."""

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
        """Its own, and those of its parts."""
        yield from [self.chart] if self.chart else []
        for part in self.parts:
            yield from part.charts


@dataclass(frozen=True)
class ShownAnswer:
    """An answer as the page has it."""

    address: str
    answer: Answer
    exhibits: list[ShownExhibit]
    table: PageTable


@dataclass(frozen=True)
class ShownSection:
    """A section as the page has it."""

    section: Section
    summary: PageTable | None
    answers: list[ShownAnswer]
    more: list[ShownExhibit]
    points: PageTable | None
    """None where there are too many."""


def page_files(analysis: Analysis, beside: Sequence[str], *, with_plots: bool = False) -> Iterator[tuple[str, bytes]]:
    """Yields paths below the report's directory, and what to write there: the page, then its charts as PNGs, which
    takes most of a report's time. `beside` are the names of the other files there."""
    sections = [_shown(section) for section in analysis.sections]
    yield FILE_NAME, _page(analysis, sections, beside).encode()
    exhibits = (exhibit for shown in sections for answer in shown.answers for exhibit in answer.exhibits)
    for chart in (chart for exhibit in exhibits for chart in exhibit.charts) if with_plots else ():
        yield f"{PLOTS}/{chart.name}.png", png(chart)


def _shown(section: Section) -> ShownSection:
    addresses = [f"{section.name}-{number}" for number in range(1, len(section.answers) + 1)]
    with_charts = len(addresses) if section.most_charts is None else section.most_charts
    answers = []
    for number, (address, answer) in enumerate(zip(addresses, section.answers, strict=True), start=1):
        exhibits = [*(answer.charts if number <= with_charts else []), *answer.more]
        answers.append(ShownAnswer(address, answer, _exhibits(address, exhibits), page_table(answer.compared)))
    return ShownSection(
        section=section,
        summary=summary_table(section.summary, addresses) if section.summary else None,
        answers=answers,
        more=_exhibits(section.name, section.more),
        points=points_table(section.points) if len(section.points.rows) <= MOST_ROWS else None,
    )


def _exhibits(address: str, exhibits: Sequence[Exhibit]) -> list[ShownExhibit]:
    """Returns those that show anything. Charts, which are files, too, are called after where they stand."""
    found = []
    for number, one in enumerate(exhibits, start=1):
        form = one.chart() if one.chart else None
        name = f"{address}-{one.name}" if one.name else address
        shown = ShownExhibit(
            address=f"{address}-exhibit-{number}",
            exhibit=one,
            chart=figure(name.replace("-", "_"), form) if form else None,
            table=page_table(one.listing) if one.listing else None,
            parts=_exhibits(name, one.parts()) if one.parts else [],
        )
        found += [shown] if shown.shows else []
    return found


def _page(analysis: Analysis, sections: Sequence[ShownSection], beside: Sequence[str]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    reading = analysis.sources.reading
    return environment.get_template("page.html.j2").render(
        title=f"Communication overlap of {', '.join(_subjects(analysis))}",
        measured=measured_when(reading.points),
        knob_searches=list(knob_searches(analysis.sources.records.knobs, reading.root)),
        sections=sections,
        most_links=MOST_LINKS,
        counts={name: count for name, count in analysis.counts.items() if count},
        machines=_machines(reading.points),
        commands=[*launch_commands(reading.points), analysis.sources.command],
        problems=analysis.problems,
        beside=beside,
        style=style_sheet() + f":root {{ --font: {FONT}; }}\n" + (here / "page.css").read_text(),
        tables_style=_tables_style(),
        config=script_safe(json.dumps(chart_config())),
        vega_script=_vega_script(),
        tables_script=_tables_script(),
        page_script=(here / "page.js").read_text(),
    )


def _subjects(analysis: Analysis) -> list[str]:
    """Returns what was measured: models, and what sections say of the rest."""
    models = (point.case.model for point in analysis.sources.reading.points if point.case.model != CUSTOM)
    return list(dict.fromkeys([*models, *(subject for section in analysis.sections for subject in section.subjects)]))


@dataclass(frozen=True)
class Machine:
    """One environment, and how many points it was recorded with."""

    points: int
    measured: str
    rows: list[tuple[str, str]]


def _machines(points: Sequence[Point]) -> list[Machine]:
    """The most frequent first; what was never measured has none."""
    found = []
    with_result = [point for point in points if point.result and point.result.environment]
    for environment in environments(with_result):
        own = [point for point in with_result if point.result and point.result.environment == environment]
        found.append(Machine(len(own), measured_when(own), rows_of(environment)))
    return found


def rows_of(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """What is known of it, each with a name for people."""
    rows = []
    for name, value in environment.items():
        if isinstance(value, dict):
            told = {key: item for key, item in value.items() if item is not None}
            rows += [(_name(name), ", ".join(f"{key} {item}" for key, item in told.items()))] if told else []
        elif isinstance(value, list):
            rows.append((_name(name), "\n".join(map(str, value))))
        elif name == "cudnn" and isinstance(value, int):
            rows.append((_name(name), _dotted(value)))
        elif value is not None:
            rows.append((_name(name), str(value)))
    return rows


def _dotted(version: int) -> str:
    """cuDNN's number as people write it: 91900 is 9.19.0, and before version 9 8907 was 8.9.7."""
    if version < 10_000:
        return f"{version // 1000}.{version // 100 % 10}.{version % 100}"
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


def _name(key: str) -> str:
    return NAMES.get(key, key.replace("_", " "))


def _vega_script() -> str:
    """Defines `window.vegaEmbed`."""

    def make() -> bytes:
        import vl_convert

        # Without an argument it makes the bundle of vegaEmbed; its stub requires one.
        return vl_convert.javascript_bundle().encode()  # type: ignore[call-arg]

    return _in_script(cached_bytes("scripts", f"vega {version('vl-convert-python')}", make).decode())


def _tables_script() -> str:
    """A module whose default export is DataTables."""
    return _in_script((_itables() / "dt_bundle.js").read_text(encoding="utf-8"))


def _tables_style() -> str:
    return (_itables() / "dt_bundle.css").read_text(encoding="utf-8")


def _itables() -> Path:
    # Importing the package would import pandas.
    spec = find_spec("itables")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent / "html"


def _in_script(code: str) -> str:
    """In strings and comments of JavaScript, which is where it may stand, `<\\/` is `</`."""
    return code.replace("</script", r"<\/script").replace("<!--", r"<\!--")


def page_table(listing: Listing[Any]) -> PageTable:
    """Returns the listing's rows with the columns that people see."""
    columns = listing.columns
    rows = [[_cell(column, row, listing.chosen(row)) for column in columns] for row in _in_order(listing)]
    return _table(columns, rows, listing.caption)


def summary_table(listing: Listing[Any], addresses: Sequence[str]) -> PageTable:
    """Returns rows that sum up answers, each with a link to its answer at one of the `addresses`."""
    table = page_table(listing)
    if listing.link is None:
        return table
    linked = [
        [replace(first, link=addresses[listing.link(row)]), *others]
        for row, (first, *others) in zip(_in_order(listing), table.rows, strict=True)
    ]
    return replace(table, rows=linked)


def _in_order(listing: Listing[Any]) -> Sequence[Any]:
    return sorted(listing.rows, key=listing.order) if listing.order else listing.rows


def points_table(listing: Listing[PointRow[Any]]) -> PageTable:
    """Returns all points, with a note on each, which of one that is not ok is the reason, and where it lies."""
    columns = [column for column in listing.columns if column.header != "note"]
    before, behind = ([one for one in columns if one.behind_note == is_behind] for is_behind in (False, True))
    rows = [
        [
            *(_cell(column, row, chosen=False) for column in before),
            _note(listing, row),
            *(_cell(column, row, chosen=False) for column in behind),
            Cell(row.directory),
        ]
        for row in _in_order(listing)
    ]
    table = _table(columns, rows, listing.caption)
    headers = [*(column.header for column in before), "note", *(column.header for column in behind), "point"]
    return replace(table, columns=headers)


def _table(columns: list[Column[Any]], rows: list[list[Cell]], caption: str) -> PageTable:
    return PageTable(
        [column.header for column in columns],
        rows,
        numeric=frozenset(column.header for column in columns if column.is_number),
        high_first=frozenset(column.header for column in columns if column.high_first),
        caption=caption,
    )


def _cell(column: Column[Any], row: Any, chosen: bool) -> Cell:
    value, kind = column.value(row), column.style if isinstance(column.style, str) else column.style(row)
    if not column.is_number:
        return Cell(column.text(row), kind="chosen" if chosen and kind == "reason" else kind)
    if is_unknown(value):
        return Cell(column.text(row), -BEYOND if column.high_first else BEYOND, "number")
    return Cell(column.text(row), round(value, 6), "number")


def _note(listing: Listing[PointRow[Any]], row: PointRow[Any]) -> Cell:
    if row.point.status != "ok":
        return Cell(row.why_not_ok, kind="reason")
    notes = [column.text(row) for column in listing.table.shown if column.header == "note"]
    return Cell(notes[0] if notes else "", kind="chosen" if listing.chosen(row) else "reason")
