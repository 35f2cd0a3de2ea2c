"""report.html and, where they are asked for, the PNGs beside it, from one analysis."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from overlap_sweep.analysis.sweep import Analysis
from overlap_sweep.report.charts.figures import Figure, column, figure, png, script_safe
from overlap_sweep.report.charts.palette import FONT, chart_config, style_sheet
from overlap_sweep.report.page import libraries
from overlap_sweep.report.page.environment import machines
from overlap_sweep.report.page.points_table import layers_table, points_table
from overlap_sweep.report.page.tables import PageTable, page_table
from overlap_sweep.report.page.tables import points_table as points_table_of
from overlap_sweep.report.section import Answer as Told
from overlap_sweep.report.section import Exhibit, Section
from overlap_sweep.results.provenance import launch_commands, measured_when
from overlap_sweep.search.text import told_searches
from overlap_sweep.workloads.kernel import section as kernels
from overlap_sweep.workloads.kernel.answer import KernelAnalysis, answers_in_words
from overlap_sweep.workloads.kernel.page_tables import compared_table, kernels_table
from overlap_sweep.workloads.layer import section as layers
from overlap_sweep.workloads.operator import async_tp
from overlap_sweep.workloads.operator.case_figures import (
    CaseFigures,
    case_figures,
    kernel_figure,
    loose_layer_figures,
    stacks_figures,
)
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.cautions import cautions
from overlap_sweep.workloads.operator.page_answers import Answer, answers, scaling_sentence
from overlap_sweep.workloads.tp_training import section as tp_training
from overlap_sweep.workloads.tp_training.answer import TpTrainingAnalysis
from overlap_sweep.workloads.tp_training.page_tables import stack_points_table, stacks_table
from overlap_sweep.workloads.tp_training.sentences import in_words

FILE_NAME = "report.html"
PLOTS = "plots"
MOST_KERNEL_CHARTS = 12
"""As many as a page is scrolled through for; a chart takes half a second to draw."""
MOST_KERNEL_ROWS = 3000
"""Of the table of all points; some 0.7 kB each."""


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
class LayerSection:
    title: str
    verdict: str
    cautions: list[str]
    chart: Figure
    timeline: Figure | None


@dataclass(frozen=True)
class KernelSection:
    number: int
    """From 1 on, in the page's addresses."""
    title: str
    brief: str
    answer_cells: list[dict[str, str]]
    """One for each m, in the table that stands before all kernels."""
    verdict: str
    """Empty at a single m, where the answer says it."""
    answers: list[str]
    """One for each m."""
    cautions: list[str]
    chart: Figure | None
    """None beyond MOST_KERNEL_CHARTS."""
    single: bool
    """Whether it has one m: then the chart shows every implementation, and needs the page's whole width."""
    table: PageTable


@dataclass(frozen=True)
class StacksSection:
    number: int
    title: str
    answers: list[str]
    cautions: list[str]
    chart: Figure
    losses: Figure
    table: PageTable


@dataclass(frozen=True)
class ShownExhibit:
    """A chart or a table beside the one of what was compared, as the page has it."""

    heading: str
    explained: str
    drawn: str
    notes: Sequence[str]
    chart: Figure | None
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
    answers: list[ShownAnswer]
    points: PageTable


@dataclass(frozen=True)
class Sections:
    """All of the page's, but those that every page has."""

    cases: list[CaseSection]
    loose: list[LayerSection]
    kernels: list[KernelSection]
    stacks: list[StacksSection]
    others: list[ShownSection]


def page_files(
    analysis: Analysis, command: str, beside: Sequence[str], *, with_plots: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Paths below the report's directory; `beside` are the names of the other files there."""
    sections = Sections(
        cases=[_case(case, analysis, i) for i, case in enumerate(analysis.operators.cases)],
        loose=[_layer(i, analysis) for i in range(len(analysis.operators.not_tuned(analysis.layers)))],
        kernels=[_kernel(kernel, i, analysis) for i, kernel in enumerate(analysis.kernels, start=1)],
        stacks=[_stacks(of_case, i) for i, of_case in enumerate(analysis.tp_training, start=1)],
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
    yield from (layer.chart for layer in sections.loose)
    yield from (kernel.chart for kernel in sections.kernels if kernel.chart)
    for of_stacks in sections.stacks:
        yield of_stacks.chart
        yield of_stacks.losses
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


def _layer(number: int, analysis: Analysis) -> LayerSection:
    layer = analysis.operators.not_tuned(analysis.layers)[number]
    chart, timeline = loose_layer_figures(layer, f"layer_{number + 1}")
    return LayerSection(layers.title(layer.point), layers.verdict(layer), layers.cautions(layer), chart, timeline)


def _kernel(kernel: KernelAnalysis, number: int, analysis: Analysis) -> KernelSection:
    case, single = kernel.case, len(kernel.shapes) == 1
    name = f"kernel_{number}_{case.kernel}_n{case.n}_k{case.k}_tp{case.tp_size}"
    return KernelSection(
        number=number,
        title=kernels.title(kernel),
        brief=case.brief,
        answer_cells=[kernels.answer_cells(kernel, shape, analysis.kernels) for shape in kernel.shapes],
        verdict="" if single else answers_in_words(kernel),
        answers=[kernels.answer(shape) for shape in kernel.shapes],
        cautions=kernels.cautions(kernel),
        chart=kernel_figure(kernel, name) if number <= MOST_KERNEL_CHARTS else None,
        single=single,
        table=compared_table(kernel),
    )


def _stacks(of_case: TpTrainingAnalysis, number: int) -> StacksSection:
    chart, losses = stacks_figures(of_case, f"tp_training_{number}")
    return StacksSection(
        number=number,
        title=tp_training.title(of_case),
        answers=in_words(of_case),
        cautions=tp_training.cautions(of_case),
        chart=chart,
        losses=losses,
        table=stacks_table(of_case),
    )


def _shown(section: Section) -> ShownSection:
    """Charts are numbered throughout the section, since each is a file, too."""
    numbers = itertools.count(1)

    def exhibit(one: Exhibit) -> ShownExhibit:
        chart = figure(f"{section.name}_{next(numbers)}", one.chart()) if one.chart else None
        table = page_table(one.listing) if one.listing else None
        return ShownExhibit(one.heading, one.explained, one.drawn, one.notes, chart, table)

    answers = [
        ShownAnswer(
            address=f"{section.name}-{number}",
            answer=answer,
            exhibits=[exhibit(one) for one in (*answer.charts, *answer.more)],
            table=page_table(answer.compared),
        )
        for number, answer in enumerate(section.answers, start=1)
    ]
    return ShownSection(section, answers, points_table_of(section.points))


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
        loose=sections.loose,
        kernels=sections.kernels,
        knob_searches=told_searches(analysis.records.knobs, analysis.reading.root),
        stacks=sections.stacks,
        stacks_legend=tp_training.LEGEND,
        others=sections.others,
        most_charts=MOST_KERNEL_CHARTS,
        counts={name: count for name, count in analysis.counts().items() if count},
        points=points_table(analysis),
        layers=layers_table(analysis),
        kernel_points=kernels_table(analysis) if len(analysis.kernel_rows) <= MOST_KERNEL_ROWS else None,
        kernel_rows=len(analysis.kernel_rows),
        stack_points=stack_points_table(analysis),
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
    """What was measured: models, or where sizes were given the kernels, or copies."""
    named = (
        point.case.model
        for point in analysis.reading.points
        if not point.is_copy and (not point.is_kernel or point.config["operator"])
    )
    models = list(dict.fromkeys(named))
    kernels_alone = list(dict.fromkeys(kernel.case.kernel for kernel in analysis.kernels)) if not models else []
    return [
        *models,
        *kernels_alone,
        *(["GEMMs and copies"] if any(point.is_copy for point in analysis.reading.points) else []),
    ]


def _tuners(analysis: Analysis) -> list[str]:
    """What the tuner left out, and why."""
    records = analysis.records.tuners.values()
    return [f"{what}: {why}" for record in records for what, why in record.dropped.items()]
