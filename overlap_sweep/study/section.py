"""The report of a study: its tables, the answer for each case, and the columns that all studies have; and its part in
comparisons and histories, by keys that are the same for all sweeps."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from overlap_sweep.overlap import space
from overlap_sweep.report import causes
from overlap_sweep.report.comparison import Comparing
from overlap_sweep.report.numbers import UNDEFINED, as_us
from overlap_sweep.report.section import Answer, Section, Sources
from overlap_sweep.report.table import Column, Kind, Listing, PointRow, Table, attribute, points_table, through
from overlap_sweep.results.comparable import Comparable, KeyedTime
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import measured_on, recorded
from overlap_sweep.results.records import Records
from overlap_sweep.results.traces import read_traces
from overlap_sweep.study import C, CaseAnalysis, R, Study
from overlap_sweep.study.analysis import Searches, analyse, point_row
from overlap_sweep.study.effects import with_effects
from overlap_sweep.study.equality import with_equality
from overlap_sweep.study.exhibits import exhibits
from overlap_sweep.study.predictions import in_words, with_predictions
from overlap_sweep.study.words import card, cautions, others, sentences

T = TypeVar("T")

MOST_ROWS = 40
"""Settings on a terminal."""

Row = Column[Any]
"""A column of rows of any study."""
Case = Column[Any]
"""A column of analyses of any study."""


def setting(about: str = "Options that are not at their defaults.") -> Row:
    """Returns the column of the setting in a table of settings."""
    return attribute("setting", about, "text", header="setting", style="setting")


def setting_of_point(named: Callable[[Point], str], about: str = "Options that are not at their defaults.") -> Row:
    """Returns the column of the setting in a table of points, of any status. `named`: returns it in words."""
    return Column("setting", lambda row: named(row.point), about, "text", header="setting", style="setting")


RUNS: Row = Column("runs", lambda row: len(row.points), "Number of runs of the setting.", "count", header="runs")
NOISE: Row = attribute("noise_us", read="step.noise_us", header="noise us", show=as_us, dropped=1, queried=True)
EFFECT: Row = Column(
    "effect",
    lambda row: row.effect.in_brief if row.effect else None,
    "What it changed in what ran, against the reference: aspects that docs/effects.md lists, or nothing; empty without "
    "traces, and of the reference.",
    "text",
    header="effect",
    dropped=9,
    queried=True,
)
RESULTS: Row = Column(
    "results",
    lambda row: row.equality.verdict if row.equality else None,
    "Whether it computes the same as the reference, by norms of gradients and parameters and by losses: equal bit by "
    "bit, equal but for rounding, differs, or unknown; empty where it does not matter.",
    "text",
    header="results",
    words=lambda row: {"unknown": UNDEFINED}.get(row.equality.verdict, row.equality.verdict) if row.equality else "",
    dropped=6,
)
PREDICTED: Row = Column(
    "predicted_speedup",
    lambda row: row.prediction and row.prediction.predicted_us and row.prediction.step_us / row.prediction.predicted_us,
    "Speedup over the reference that was predicted from the reference's traces (docs/predict.md); empty if it cannot "
    "be told.",
    header="predicted",
    words=lambda row: in_words(row.prediction) if row.prediction else "",
    dropped=9,
)
CHOSEN: Row = attribute("chosen", "The best setting among those that are compared.", "flag", queried=True)
NOTE: Row = attribute("", "", "text", "note", header="note", style="reason")


def knob_columns(setting: Callable[[T], Mapping[str, Scalar] | None]) -> list[Column[T]]:
    """Returns a column for each knob of tensor-parallel overlap. `setting`: returns that of a row, None for none."""

    def value(row: T, knob: str) -> Scalar:
        found = (setting(row) or {}).get(knob)
        # Files may spell flags as 0 and 1.
        return found if found is None or knob in space.NUMBERS else bool(found)

    kinds: dict[str, Kind] = {knob: "count" if knob in space.NUMBERS else "flag" for knob in space.KNOBS}
    return [Column(knob, partial(value, knob=knob), kind=kind) for knob, kind in kinds.items()]


LAUNCH_BOUND_NOTE: Row = Column(
    "", lambda row: "launch-bound" if row.launch_bound else "", kind="text", header="note", style="reason"
)
"""The note where nothing else is noted."""
OVER_REFERENCE = "Time with {} / time with this one, per sample or token where that is known."


def over_reference(reference: str) -> Row:
    """Returns the column of the speedup over the reference, which is described."""
    about = OVER_REFERENCE.format(reference)
    return attribute("speedup", about, read="over_reference", header="speedup", show="{:.3f}x".format, high_first=True)


def case_columns(texts: Sequence[str], counts: Sequence[str] = ("nodes",), **about: str) -> tuple[Case, ...]:
    """Returns columns of the properties of a case, for the table of answers. `about`: explanations."""
    kinds: dict[str, Kind] = {**dict.fromkeys(texts, "text"), **dict.fromkeys(counts, "count")}
    return tuple(attribute(name, about.get(name, ""), kind, f"case.{name}") for name, kind in kinds.items())


def decision_columns(reference: str) -> tuple[Case, ...]:
    """Returns the columns of why a setting is the best, for the table of answers. `reference`: what the reference is,
    in words."""
    described = reference.removeprefix("the ").capitalize()
    return (
        attribute("reference", f"{described}, to compare with.", "text", "reference.setting"),
        attribute("speedup", OVER_REFERENCE.format(reference), read="best.over_reference"),
        Column(
            "gain",
            lambda analysis: analysis.gain.share if analysis.gain else 0.0,
            "Time that it saves, as a fraction of the reference's or of what a search compared it with; 0 if it is the "
            "reference.",
        ),
        Column(
            "gain_noise",
            lambda analysis: analysis.gain.noise if analysis.gain else None,
            "How far the lower end of gain's 95 % confidence interval is below it; empty if it is the reference.",
        ),
        attribute(
            "too_few_runs",
            "Too few runs to tell settings apart, so that the setting is only the reference.",
            "flag",
        ),
        attribute("proven", "A search measured the setting again after choosing it.", "flag"),
        attribute("reason", kind="text"),
    )


class Tables(NamedTuple):
    """The tables of a study."""

    points: Table[Any]
    compared: Table[Any]
    answers: Table[Any]


def tables(name: str, case: Iterable[Case], asked: Iterable[Row], measured: Iterable[Row], reference: str) -> Tables:
    """Returns the tables of a study, under the name of its files. `case`: columns of its cases; `asked`: of points of
    any status, the setting among them; `measured`: of settings, and of points that are ok; `reference`: what gains
    compare with, in words."""
    own = (*measured, attribute("launch_bound", kind="flag"))
    of_best = (through(column, attrgetter("answer")) for column in (RUNS, *own))
    return Tables(
        points_table(name, "one row per point", asked, (*own, EFFECT, CHOSEN, NOTE)),
        Table(name, "one row per setting", (setting(), RUNS, over_reference(reference), *own, EFFECT, NOTE)),
        Table(
            name,
            "one row per case: the best setting",
            (
                *case,
                through(attribute("setting", kind="text"), attrgetter("answer")),
                *of_best,
                *decision_columns(reference),
            ),
        ),
    )


def as_module(study: Study[C, R]) -> SimpleNamespace:
    """Returns what reports a study's results, by the names of the module `section` of other workloads."""
    return SimpleNamespace(
        TABLE=study.points_table,
        ANSWERS=study.answers,
        COMPARING=comparing(study),
        section=partial(section, study),
    )


def section(study: Study[C, R], sources: Sources) -> Section | None:
    """Returns the section of the study, with the best setting of each case; None if there are no such points."""
    points, root = sources.points(study.workload), sources.reading.root
    if not points:
        return None
    ok = [point for point in points if point.status == "ok"]
    traces = read_traces(ok) if study.reads_traces else {}
    study = study.over(ok, traces)
    analyses = judged(study, ok, sources.records.knobs)
    placed = {point.directory: row for one in analyses for row in one.rows for point in row.points}
    rows: list[PointRow[R]] = [
        PointRow(point, root, point_row(study, point, placed[point.directory]) if point.status == "ok" else None)
        for point in points
    ]
    return Section(
        name=study.name,
        what=study.what,
        title=study.heading,
        topic=study.topic,
        explained=f"{study.legend} {study.explained}",
        answers=[_answer(study, analysis, sources.records.knobs) for analysis in analyses],
        points=Listing(
            study.points_table,
            rows,
            study.measured_as,
            chosen=lambda row: row.measured is not None and row.measured.chosen,
        ),
        report={
            study.name: [_report(study, analysis) for analysis in analyses],
            study.points_key: study.points_table.records(rows),
        },
        decided=Listing(study.answers, analyses),
        files=study.files(rows),
        problems=[problem for reading in traces.values() for problem in reading.problems],
        warnings=[warning for reading in traces.values() for warning in reading.warnings],
    )


def judged(study: Study[C, R], points: Sequence[Point], searches: Searches | None = None) -> list[CaseAnalysis[C, R]]:
    """Returns an analysis of the `ok` points for each case, whose settings have their equality with the reference,
    effects and predictions."""
    analyses = with_equality(study, analyse(study, points, searches))
    return with_predictions(study, with_effects(study, analyses)) if study.shows_effects else analyses


def _answer(study: Study[C, R], analysis: CaseAnalysis[C, R], searches: Searches) -> Answer:
    return Answer(
        title=analysis.title,
        sentences=sentences(study, analysis),
        card=card(study, analysis),
        cautions=cautions(study, analysis),
        compared=Listing(
            study.compared,
            analysis.rows,
            f"Every setting, from fast to slow by time {analysis.per}.",
            chosen=lambda row: row is analysis.answer,
            reference=lambda row: row is analysis.reference,
            most_rows=MOST_ROWS,
        ),
        points=analysis.points,
        others=others(analysis),
        brief=analysis.title,
        legend=study.legend_of(analysis),
        charts=exhibits(study, analysis, searches),
        more=study.more(analysis),
        details=[*study.details(analysis), measured_on(analysis.points)],
        later=lambda: causes.in_a_sentence(study.side(analysis.best)),
    )


def _report(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> dict[str, object]:
    """Returns a case's entry in tuning_report.json: the best setting and all `settings`."""
    (best,) = study.answers.records([analysis])
    return {
        **analysis.case._asdict(),
        **recorded(analysis.points),
        "best": best,
        "shared": analysis.shared,
        "answers": sentences(study, analysis),
        "warnings": cautions(study, analysis),
        "settings": [
            {**cells, **study.report_of_row(row), "points": [point.name for point in row.points]}
            for row, cells in zip(analysis.rows, study.compared.records(analysis.rows), strict=True)
        ],
        **study.report(analysis),
    }


def comparing(study: Study[C, R]) -> Comparing:
    """Returns how the study takes part in comparisons and histories."""

    def measured(points: Sequence[Point], records: Records) -> Comparable:
        analyses = analyse(study, points)
        briefs = Counter(analysis.case.brief for analysis in analyses)
        return Comparable(
            [
                _time(study, analysis, row, several=briefs[analysis.case.brief] > 1)
                for analysis in analyses
                for row in analysis.rows
            ]
        )

    return Comparing(measured, study.samples, matched=study.matched, changes_nothing=study.changes_nothing)


def _time(study: Study[C, R], analysis: CaseAnalysis[C, R], row: R, *, several: bool) -> KeyedTime:
    """Returns the row's time. `several`: whether the dataset has other cases with the same brief name, so that the key
    must tell them apart; else a sweep can be compared with one of a changed command."""
    key = study.key(analysis, row)
    key = key._replace(device=analysis.case.device, nodes=analysis.case.nodes, setting=key.setting or row.whole_setting)
    if several and (more := analysis.title.removeprefix(str(analysis.case)).removeprefix(", ")):
        key = key._replace(operator=f"{key.operator}: {more}")
    return KeyedTime(key, row.step, row.none_us, row.floor_us, tuple(point.name for point in row.points))
