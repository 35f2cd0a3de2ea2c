"""The report on jobs: columns, the best setting of the user's own command, and why communication is exposed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from overlap_sweep.diagnosis import as_share
from overlap_sweep.report import causes
from overlap_sweep.report.nodes import NODES
from overlap_sweep.report.numbers import as_rate, as_us, some_of
from overlap_sweep.report.section import Answer, Card, Exhibit, Section, Sources
from overlap_sweep.report.table import (
    DEVICE,
    DIRECTORY,
    ERROR,
    POINT,
    STATUS,
    Column,
    Listing,
    PointRow,
    Table,
    attribute,
    points_table,
    through,
)
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import measured_on, recorded
from overlap_sweep.workloads.job.answer import JobAnalysis, analyse_jobs, exposure_in_words, headline, sentences
from overlap_sweep.workloads.job.cautions import cautions
from overlap_sweep.workloads.job.chart import exhibits, side_of, sides
from overlap_sweep.workloads.job.result import FoundCause
from overlap_sweep.workloads.job.rows import JobRow, point_row
from overlap_sweep.workloads.job.setting import in_words, options_of, script_of

MOST_ROWS = 40
"""Settings on a terminal."""
MOST_FINDINGS = 3
"""Findings of a setting in the table of all settings."""
MOST_FOUND_ROWS = 12
"""Rows of that table on a terminal."""

A = Column[JobAnalysis]
C = Column[JobRow]
P = Column[PointRow[JobRow]]


def as_time(time_us: float) -> str:
    """Returns the time with tenths, or of less than 10 us three digits: that of a single token may be short."""
    return as_us(time_us) if time_us >= 10 else f"{time_us:.3g}"


def _us(name: str, about: str = "", read: str = "", **more: Any) -> C:
    return attribute(name, about, read=read, show=as_time, **more)


def _rate(name: str, header: str, about: str = "", **more: Any) -> C:
    return attribute(name, about, header=header, show=as_rate, high_first=True, **more)


SCRIPT = "Name of the script or program that the command runs."
COMMAND = "The command line as configured, with its placeholders."
RANKS = "Number of training processes."
SETTING = "What job.values, job.env, runtime.max_connections and runtime.multicast set."

TIMES = (
    _us(
        "time_us",
        "Time of one training step of the slowest rank: mean of the steps and of the runs.",
        header="time us",
    ),
    _us("noise_us", "", "step.noise_us", header="noise us", dropped=12, queried=True),
)
MEASURED = (
    C("repeats", attrgetter("repeats"), "Number of timed steps, of all runs.", "count"),
    _us("us_per_sample"),
    attribute("samples_per_step", kind="number"),
    attribute("tokens_per_step", "Tokens of all ranks in one step.", kind="number"),
    _rate("samples_per_s", "samples/s", dropped=11),
    _rate("tokens_per_s", "tokens/s", dropped=10),
    attribute("unit", "Name of the metric, if time_us is the time of one unit of it.", "text"),
    _rate(
        "units_per_s",
        "rate",
        "The metric's rate, if time_us is the time of one unit of it.",
        words=lambda row: row.rate if row.unit else "",
        dropped=11,
    ),
    _us("profiled_us", "Time of a profiled step; empty without traces."),
    _us(
        "exposed_comm_us",
        "Part of a profiled step in which communication runs while nothing computes.",
        header="exposed us",
        dropped=7,
        queried=True,
    ),
    attribute(
        *("exposed_fraction", "exposed_comm_us / profiled_us."),
        header="exposed",
        show=as_share,
        dropped=8,
    ),
    attribute(
        *("exposed_by_group", "exposed_comm_us of each process group, the largest first.", "text"),
        header="exposed us by group",
        dropped=2,
    ),
    attribute("peak_memory_gb", header="peak GB", show="{:.1f}".format, dropped=5),
    attribute(
        *("main_cause", "Cause of exposed communication that costs most, as found when it was measured.", "text"),
        header="main cause",
        dropped=4,
        words=lambda row: f"{row.main_cause} {as_share(row.main_cause_share)}" if row.main_cause else "",
    ),
    attribute(
        "main_cause_share",
        "Time that fixing the main cause alone could gain at most / time of a profiled step.",
    ),
    attribute("calls_per_step", "Calls of optimizers, or of overlap_sweep.step(), in one step.", "count"),
    attribute(
        *("timed_by", "What timed it: events on the gpu, the clocks of the host, or the metric in the output.", "text"),
        header="timed by",
        dropped=3,
    ),
    attribute("launch_bound", kind="flag"),
)
CHOSEN = C(
    *("chosen", lambda row: row.standing.startswith("best") or row.standing == "only"),
    kind="flag",
    about="The best setting among those that are compared.",
    queried=True,
)
NOTE = C("", attrgetter("note"), kind="text", header="note", style="reason")

TABLE = points_table(
    *("jobs", "one row per point"),
    (
        *(POINT, DIRECTORY),
        P("script", lambda row: script_of(row.point.config), SCRIPT, "text", header="script"),
        P("command", lambda row: row.point.config["job"]["command"], COMMAND, "text"),
        P("ranks", lambda row: row.point.config["job"]["ranks"], RANKS, "count", header="ranks"),
        NODES,
        DEVICE,
        P(
            *("setting", lambda row: in_words(options_of(row.point.config)), SETTING, "text"),
            header="setting",
            style="setting",
        ),
        P("repetition", lambda row: row.point.config["repetition"], "Number of the repetition.", "count"),
        *(STATUS, ERROR),
    ),
    (*TIMES, *MEASURED, CHOSEN, NOTE),
)


@dataclass(frozen=True)
class ComparedRow:
    """A setting among those of its case."""

    analysis: JobAnalysis
    row: JobRow

    @property
    def speedup(self) -> float:
        return self.analysis.speedup(self.row)


R = Column[ComparedRow]


def _compared(columns: Iterable[C]) -> Iterable[R]:
    return (through(column, lambda compared: compared.row) for column in columns)


SPEEDUP = "Time with the setting that was started first / time with this one, per sample or token where that is known."
OF_RUNS = (
    C("runs", lambda row: len(row.points), "Number of runs of the setting.", "count", header="runs", dropped=6),
    *TIMES,
    _us(
        *("between_runs_us", "Standard deviation of the runs' times; empty with one run."),
        header="between runs us",
        dropped=1,
    ),
)
COMPARED: Table[ComparedRow] = Table(
    *("jobs", "one row per setting"),
    (
        *_compared([C("setting", attrgetter("setting"), SETTING, "text", header="setting", style="setting"), *OF_RUNS]),
        attribute("speedup", SPEEDUP, header="speedup", show="{:.3f}x".format, high_first=True),
        *_compared([*MEASURED, NOTE]),
    ),
)
ANSWERS = Table(
    *("jobs", "one row per command, ranks, nodes and device: the best setting"),
    (
        A("script", attrgetter("case.script"), SCRIPT, "text"),
        A("command", attrgetter("case.command"), COMMAND, "text"),
        A("ranks", attrgetter("case.ranks"), RANKS, "count"),
        A("nodes", attrgetter("case.nodes"), kind="count"),
        A("device", attrgetter("case.device"), kind="text"),
        A("setting", attrgetter("best.setting"), SETTING, "text"),
        A("to_run", attrgetter("command"), "Command line with this setting.", "text"),
        *(through(column, lambda analysis: analysis.best) for column in (*OF_RUNS, *MEASURED)),
        A("reference", attrgetter("reference.setting"), "Setting that was started first, to compare with.", "text"),
        A("speedup", lambda analysis: analysis.speedup(analysis.best), SPEEDUP),
        A(
            *("gain", lambda analysis: analysis.gain.share if analysis.gain else 0.0),
            about="Time that it saves, as a fraction of the reference's; 0 if it is the reference.",
        ),
        A(
            *("gain_noise", lambda analysis: analysis.gain.noise if analysis.gain else None),
            about="Half-width of the 95 % confidence interval of gain; empty if it is the reference.",
        ),
        A(
            *("too_few_runs", attrgetter("too_few_runs")),
            about="Too few runs to tell settings apart, so that the setting is only the reference.",
            kind="flag",
        ),
        A("proven", attrgetter("settled"), "A search measured the setting again after choosing it.", "flag"),
        A("reason", attrgetter("reason"), kind="text"),
    ),
)


@dataclass(frozen=True)
class FindingRow:
    """A finding about one setting."""

    setting: str
    finding: FoundCause
    of_best: bool
    of_reference: bool


F = Column[FindingRow]
FINDINGS = Table(
    *("job_findings", "one row per setting and cause, in each setting the most worthwhile first"),
    (
        F("setting", attrgetter("setting"), kind="text", header="setting", style="setting"),
        F("cause", attrgetter("finding.cause"), kind="text", header="cause"),
        F("lost_us", attrgetter("finding.lost_us"), header="lost us", show=as_us),
        F("share", attrgetter("finding.share"), header="share", show=as_share),
        F("where", attrgetter("finding.where"), kind="text", header="where", style="setting", dropped=1),
    ),
)

LEGEND = (
    "time: mean of the steps and runs, slowest rank; noise: half of its 95 % confidence interval, with the "
    "noise between runs; exposed: of a profiled step, communication while nothing computes."
)


def section(sources: Sources) -> Section | None:
    """Returns the section on jobs, with the best setting of each case; None if there are no jobs."""
    points, root = sources.points("job"), sources.reading.root
    if not points:
        return None
    analyses = analyse_jobs(points, sources.records.knobs)
    standing = {point.directory: row.standing for one in analyses for row in one.rows for point in row.points}
    rows = [PointRow(point, root, _measured(point, standing)) for point in points]
    return Section(
        name="jobs",
        what="jobs",
        title="Training jobs",
        topic="training jobs",
        explained=f"{LEGEND} The setting that was started first is the reference; another is best only if it is "
        "faster beyond the noise.",
        answers=list(map(_answer, analyses)),
        points=Listing(
            *(TABLE, rows, "Every job, as measured; noise here is that within the run."),
            chosen=lambda row: bool(row.measured and CHOSEN.value(row.measured)),
        ),
        report={"jobs": list(map(_report, analyses)), "job_points": TABLE.records(rows)},
        decided=Listing(ANSWERS, analyses),
        launch_bound=sum(row.is_launch_bound for row in rows),
    )


def _measured(point: Point, standing: dict[Any, str]) -> JobRow | None:
    return point_row(point, standing[point.directory]) if point.status == "ok" else None


def _answer(analysis: JobAnalysis) -> Answer:
    compared = [ComparedRow(analysis, row) for row in analysis.rows]
    return Answer(
        title=analysis.title,
        sentences=sentences(analysis),
        card=_card(analysis),
        cautions=cautions(analysis),
        compared=Listing(
            *(COMPARED, compared, f"Every setting, from fast to slow by time {analysis.per}."),
            chosen=lambda one: one.row is analysis.best,
            reference=lambda one: one.row is analysis.reference,
            most_rows=MOST_ROWS,
        ),
        points=analysis.points,
        brief=analysis.title,
        legend=LEGEND,
        charts=exhibits(analysis, lambda row: COMPARED.details(ComparedRow(analysis, row))),
        more=_findings(analysis),
        details=[f"Command: {analysis.case.command}", measured_on(analysis.points)],
        later=lambda: causes.in_a_sentence(side_of(analysis.best)),
    )


def _card(analysis: JobAnalysis) -> Card:
    time, *_ = sentences(analysis)[1:]
    more = [f"All settings have {analysis.shared}."] if analysis.shared else []
    return Card(
        analysis.title,
        headline(analysis),
        [time, *exposure_in_words(analysis), *more],
        use=[analysis.command],
    )


def _findings(analysis: JobAnalysis) -> list[Exhibit]:
    """Returns the table of each setting's findings, as recorded when it was measured; empty if none was profiled."""
    found = [
        FindingRow(row.setting, finding, row is analysis.best, row is analysis.reference)
        for row in analysis.rows
        for finding in row.causes[:MOST_FINDINGS]
    ]
    if not found:
        return []
    several = len({one.setting for one in found}) > 1
    settings_by_advice: dict[tuple[str, str], list[str]] = {}
    for one in found:
        if one.finding.advice:
            settings_by_advice.setdefault((one.finding.cause, one.finding.advice), []).append(one.setting)
    return [
        Exhibit(
            listing=Listing(
                *(FINDINGS, found, "Findings of each setting, as recorded when it was measured."),
                chosen=lambda one: one.of_best,
                reference=lambda one: one.of_reference,
                group=lambda one: one.setting,
                most_rows=MOST_FOUND_ROWS,
            ),
            heading="Why communication is exposed, by setting",
            # The page diagnoses the traces, which says more.
            on_page=len(sides(analysis)) < len({one.setting for one in found}),
            notes=[
                f"Try for {cause}{f' with {some_of(settings)}' if several else ''}: {advice}"
                for (cause, advice), settings in settings_by_advice.items()
            ],
        )
    ]


def _report(analysis: JobAnalysis) -> dict[str, Any]:
    """Returns a case's entry in tuning_report.json: the best setting and all `settings` with their findings."""
    (best,) = ANSWERS.records([analysis])
    cells = COMPARED.records([ComparedRow(analysis, row) for row in analysis.rows])
    return {
        **analysis.case._asdict(),
        **recorded(analysis.points),
        "best": best,
        "shared": analysis.shared,
        "answers": sentences(analysis),
        "warnings": cautions(analysis),
        "settings": [
            {
                **own,
                "options": row.options,
                "exposed_us_by_group": row.exposed_us_by_group,
                "causes": row.causes,
                "points": [point.name for point in row.points],
            }
            for row, own in zip(analysis.rows, cells, strict=True)
        ],
    }
