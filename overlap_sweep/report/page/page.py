"""report.html and, where they are asked for, the PNGs beside it, from one analysis."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.overlap.kernel_shape import CUSTOM
from overlap_sweep.report.charts.figures import Figure, column, figure, png, script_safe
from overlap_sweep.report.charts.palette import FONT, chart_config, style_sheet
from overlap_sweep.report.page import libraries
from overlap_sweep.report.page.environment import machines
from overlap_sweep.report.page.points_table import points_table
from overlap_sweep.report.page.tables import PageTable, page_table, summary_table
from overlap_sweep.report.page.tables import points_table as points_table_of
from overlap_sweep.report.searches import knob_searches
from overlap_sweep.report.section import Answer as Told
from overlap_sweep.report.section import Exhibit, Section
from overlap_sweep.results.provenance import launch_commands, measured_when
from overlap_sweep.workloads.operator import async_tp
from overlap_sweep.workloads.operator.case_figures import (
    CaseFigures,
    case_figures,
)
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.cautions import cautions
from overlap_sweep.workloads.operator.page_answers import Answer, answers, scaling_sentence

FILE_NAME = "report.html"
PLOTS = "plots"
MOST_ROWS = 3000
"""Of a section's table of all points; some 0.7 kB each."""
MOST_LINKS = 12
"""To the answers of a section, at the top of the page."""


@dataclass(frozen=True)
class CaseSection:
    case: CaseAnalysis
    title: str
    folder: str
    default_name: str
    """In a sentence."""
    answers: list[Answer]
    scaling: str
    cautions: list[str]
    figures: CaseFigures


@dataclass(frozen=True)
class ShownExhibit:
    """A chart or a table beside the one of what was compared, as the page has it."""

    heading: str
    explained: str
    drawn: str
    notes: Sequence[str]
    chart: Figure | None
    small: bool
    table: PageTable | None


@dataclass(frozen=True)
class ShownAnswer:
    """An answer as the page has it."""

    address: str
    answer: Told
    exhibits: list[ShownExhibit]
    table: PageTable


@dataclass(frozen=True)
class ShownSection:
    """A section as the page has it."""

    section: Section
    summary: PageTable | None
    answers: list[ShownAnswer]
    points: PageTable | None
    """None where there are too many."""


@dataclass(frozen=True)
class Sections:
    """All of the page's, but those that every page has."""

    cases: list[CaseSection]
    others: list[ShownSection]


def page_files(
    analysis: Analysis, command: str, beside: Sequence[str], *, with_plots: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Paths below the report's directory; `beside` are the names of the other files there."""
    sections = Sections(
        cases=[_case(case, analysis, i) for i, case in enumerate(analysis.operators.cases)],
        others=[_shown(section) for section in analysis.sections],
    )
    yield FILE_NAME, _page(analysis, sections, command, beside).encode()
    if with_plots:
        yield from _plot_files(sections)


def _plot_files(sections: Sections) -> Iterator[tuple[str, bytes]]:
    """The page's charts as PNGs; to draw them takes most of a report's time."""
    for section in sections.cases:
        for name, content in _plots(section.figures):
            yield (PurePosixPath(section.folder) / PLOTS / name).as_posix(), content
    for chart in _single_charts(sections):
        yield f"{PLOTS}/{chart.name}.png", png([chart])


def _single_charts(sections: Sections) -> Iterator[Figure]:
    """Those with a file of their own."""
    answers = (answer for shown in sections.others for answer in shown.answers)
    yield from (exhibit.chart for answer in answers for exhibit in answer.exhibits if exhibit.chart)


def _case(case: CaseAnalysis, analysis: Analysis, number: int) -> CaseSection:
    folder = analysis.operators.folder(case)
    return CaseSection(
        case=case,
        title=str(case.case),
        folder=folder,
        default_name="async TP" if case.case.backend == async_tp.BACKEND else "the library's default",
        answers=answers(case, folder),
        scaling=scaling_sentence(case),
        # How to switch it on stands in the answer.
        cautions=[line for line in cautions(case) if line not in async_tp.HOW_TO],
        figures=case_figures(case, analysis.operators, f"case{number + 1}_" if folder else ""),
    )


def _shown(section: Section) -> ShownSection:
    addresses = [f"{section.name}-{number}" for number in range(1, len(section.answers) + 1)]
    with_charts = len(addresses) if section.most_charts is None else section.most_charts
    answers = []
    for number, (address, answer) in enumerate(zip(addresses, section.answers, strict=True), start=1):
        # A chart is a file, too, and called after its answer.
        name = f"{section.name}_{number}"
        exhibits = [*(answer.charts if number <= with_charts else []), *answer.more]
        shown = [_exhibit(one, f"{name}_{one.name}" if one.name else name) for one in exhibits]
        drawn = [exhibit for exhibit in shown if exhibit.chart or exhibit.table]
        answers.append(ShownAnswer(address, answer, drawn, page_table(answer.compared)))
    return ShownSection(
        section=section,
        summary=summary_table(section.summary, addresses) if section.summary else None,
        answers=answers,
        points=points_table_of(section.points) if len(section.points.rows) <= MOST_ROWS else None,
    )


def _exhibit(one: Exhibit, name: str) -> ShownExhibit:
    form = one.chart() if one.chart else None
    return ShownExhibit(
        heading=one.heading,
        explained=one.explained,
        drawn=one.drawn,
        notes=one.notes,
        chart=figure(name, form) if form else None,
        small=one.small,
        table=page_table(one.listing) if one.listing else None,
    )


def _plots(figures: CaseFigures) -> Iterator[tuple[str, bytes]]:
    for chart in (*figures.hidden, *figures.layers):
        yield f"{_plain(chart.name)}.png", png([chart])
    for tp_size, panels in figures.num_sm.items():
        if panels:
            yield f"num_sm_tp{tp_size}.png", png(panels)
    if figures.scaling:
        yield "tp_scaling.png", png(figures.scaling)
    for timelines in figures.timelines:
        what = timelines.what.rsplit(" ", 1)[-1]
        yield f"timeline_tp{timelines.tp_size}_{what}.png", column(timelines.figures)


def _plain(name: str) -> str:
    """Without the prefix of a case, which has a folder of its own."""
    return name.partition("_")[2] if name.startswith("case") else name


def _page(
    analysis: Analysis,
    sections: Sections,
    command: str,
    beside: Sequence[str],
) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    points = analysis.reading.points
    return environment.get_template("page.html.j2").render(
        title=f"Communication overlap of {', '.join(_subjects(analysis))}",
        measured=measured_when(points),
        cases=sections.cases,
        knob_searches=list(knob_searches(analysis.records.knobs, analysis.reading.root)),
        others=sections.others,
        most_links=MOST_LINKS,
        counts={name: count for name, count in analysis.counts().items() if count},
        points=points_table(analysis),
        machines=machines(points),
        commands=[*launch_commands(points), command],
        tuners=_tuners(analysis),
        strays=[stray.verdict for stray in analysis.operators.strays],
        problems=analysis.problems,
        beside=beside,
        style=style_sheet() + f":root {{ --font: {FONT}; }}\n" + (here / "page.css").read_text(),
        tables_style=libraries.tables_style(),
        config=script_safe(json.dumps(chart_config())),
        vega_script=libraries.vega_script(),
        tables_script=libraries.tables_script(),
        page_script=(here / "page.js").read_text(),
    )


def _subjects(analysis: Analysis) -> list[str]:
    """Returns what was measured: models, and what sections say of the rest."""
    models = (point.case.model for point in analysis.reading.points if point.case.model != CUSTOM)
    return list(dict.fromkeys([*models, *(subject for section in analysis.sections for subject in section.subjects)]))


def _tuners(analysis: Analysis) -> list[str]:
    """What the tuner left out, and why."""
    records = analysis.records.tuners.values()
    return [f"{what}: {why}" for record in records for what, why in record.dropped.items()]
