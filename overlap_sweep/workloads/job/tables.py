"""Tables of jobs: points, settings, the best of each case, and the findings about each setting."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter

from overlap_sweep.diagnosis import as_share
from overlap_sweep.report import table
from overlap_sweep.report.diagnosis import NODES
from overlap_sweep.report.numbers import as_rate, as_us, shortened, some_of
from overlap_sweep.report.section import Exhibit
from overlap_sweep.report.table import Column, Listing, PointRow, Table, asked, attribute, points_table, through
from overlap_sweep.results.points import Point
from overlap_sweep.study import section
from overlap_sweep.workloads.job.command import command_line, to_write
from overlap_sweep.workloads.job.config import Resolved
from overlap_sweep.workloads.job.result import FoundCause
from overlap_sweep.workloads.job.rows import NAMING, Analysis, JobRow, options_of, script_of

LONGEST_GROUP = 40
"""Longest name of a process group in a cell, in characters."""
MOST_FINDINGS = 3
"""Findings of a setting in the table of all settings."""
MOST_FOUND_ROWS = 12
"""Rows of that table on a terminal."""

C = Column[JobRow]
P = Column[PointRow[JobRow]]

SCRIPT = "Name of the script or program that the command runs."
COMMAND = "The command line as configured, with its placeholders."
RANKS = "Number of training processes."
TO_WRITE = "Lines for the script that do what job.levers did in its processes, which the command line lacks."
SETTING = "What job.values, job.env, job.levers, runtime.max_connections and runtime.multicast set."


def as_time(time_us: float) -> str:
    """Returns the time with tenths, or of less than 10 us three digits: that of a single token may be short."""
    return as_us(time_us) if time_us >= 10 else f"{time_us:.3g}"


def _us(name: str, about: str = "", read: str = "", *, header: str = "", dropped: int = 0, queried: bool = False) -> C:
    return attribute(name, about, read=read, show=as_time, header=header, dropped=dropped, queried=queried)


def _rate(name: str, header: str, amount: Callable[[JobRow], float | None], dropped: int) -> C:
    def rate(row: JobRow) -> float | None:
        work = amount(row)
        return work / row.time_us * 1e6 if work else None

    return C(name, rate, header=header, show=as_rate, high_first=True, dropped=dropped)


def _groups(row: JobRow) -> str | None:
    groups = row.exposed_us_by_group.items()
    texts = [f"{shortened(group, LONGEST_GROUP)} {as_us(time_us)}" for group, time_us in groups]
    return some_of(texts, separator="; ") or None


def _lines(point: Point) -> str | None:
    return to_write(point.config_as(Resolved)) or None


TIMES = (
    _us(
        "time_us",
        "Time of one training step of the slowest rank: mean of the steps and of the runs, without the few in which "
        "Python collected garbage for long.",
        header="time us",
    ),
    _us("noise_us", "", "step.noise_us", header="noise us", dropped=12, queried=True),
)
MEASURED = (
    attribute("repeats", "Number of timed steps, of all runs.", "count", "step.repeats"),
    C("us_per_sample", lambda row: row.per("sample").time_us if row.samples_per_step else None, show=as_time),
    attribute("samples_per_step", kind="number"),
    attribute("tokens_per_step", "Tokens of all ranks in one step.", kind="number"),
    _rate("samples_per_s", "samples/s", lambda row: row.samples_per_step, dropped=11),
    _rate("tokens_per_s", "tokens/s", lambda row: row.tokens_per_step, dropped=10),
    attribute("unit", "Name of the metric, if time_us is the time of one unit of it.", "text"),
    replace(
        _rate("units_per_s", "rate", lambda row: 1.0 if row.unit else None, dropped=11),
        about="The metric's rate, if time_us is the time of one unit of it.",
        words=lambda row: row.rate if row.unit else "",
    ),
    attribute(
        "garbage_share",
        "Time by which the few steps with a long garbage collection of Python are longer than others, which are left "
        "out of time_us / time of all timed steps. Empty if there were none.",
        header="garbage",
        show=as_share,
        dropped=9,
    ),
    _us("profiled_us", "Time of a profiled step; empty without traces."),
    _us(
        "exposed_comm_us",
        "Part of a profiled step in which communication runs while nothing computes.",
        header="exposed us",
        dropped=7,
        queried=True,
    ),
    attribute("exposed_fraction", "exposed_comm_us / profiled_us.", header="exposed", show=as_share, dropped=8),
    C(
        "exposed_by_group",
        _groups,
        "exposed_comm_us of each process group, the largest first.",
        "text",
        header="exposed us by group",
        dropped=2,
    ),
    attribute("peak_memory_gb", header="peak GB", show="{:.1f}".format, dropped=5),
    C(
        "main_cause",
        lambda row: row.causes[0].cause if row.causes else None,
        "Cause of exposed communication that costs most, as found when it was measured.",
        "text",
        header="main cause",
        dropped=4,
        words=lambda row: f"{row.causes[0].cause} {as_share(row.causes[0].share)}" if row.causes else "",
    ),
    C(
        "main_cause_share",
        lambda row: row.causes[0].share if row.causes else None,
        "Time that fixing the main cause alone could gain at most / time of a profiled step.",
    ),
    attribute("calls_per_step", "Calls of optimizers, or of overlap_sweep.step(), in one step.", "count"),
    attribute(
        "timed_by",
        "What timed it: events on the gpu, the clocks of the host, or the metric in the output.",
        "text",
        header="timed by",
        dropped=3,
    ),
    attribute(
        "gradients_norm",
        "Norm of the gradients at the end of the skipped steps, over all ranks; median of the runs. Empty if it was "
        "not seen.",
    ),
    attribute("parameters_norm", "The same of the parameters."),
    attribute("loss_of_step", "The loss that overlap_sweep.step(loss) was given at that step, mean of the ranks."),
    attribute("launch_bound", kind="flag"),
)
CHECKED = (section.EFFECT, section.RESULTS, section.PREDICTED)
"""What it changed in what ran and in what was computed, and what was expected of it."""
TABLE = points_table(
    "jobs",
    "one row per point",
    (
        P("script", lambda row: script_of(row.point.config_as(Resolved)), SCRIPT, "text", header="script"),
        asked("command", "job", "command", about=COMMAND, kind="text"),
        asked("ranks", "job", "ranks", about=RANKS, kind="count", header="ranks"),
        NODES,
        table.DEVICE,
        section.setting_of_point(lambda point: NAMING.in_words(options_of(point.config_as(Resolved))), SETTING),
        P("to_write", lambda row: _lines(row.point), TO_WRITE, "text"),
        asked("repetition", about="Number of the repetition.", kind="count"),
    ),
    (*TIMES, *MEASURED, *CHECKED, section.CHOSEN, section.NOTE),
)
OF_RUNS = (
    section.RUNS,
    *TIMES,
    _us(
        "between_runs_us",
        "Standard deviation of the runs' times; empty with one run.",
        "times.between_runs_us",
        header="between runs us",
        dropped=1,
    ),
)
REFERENCE = "the setting that was started first"
COMPARED: Table[JobRow] = Table(
    "jobs",
    "one row per setting",
    (
        section.setting(SETTING),
        *OF_RUNS,
        section.over_reference(REFERENCE),
        *MEASURED,
        *CHECKED,
        section.NOTE,
    ),
)
ANSWERS: Table[Analysis] = Table(
    "jobs",
    "one row per command, ranks, nodes and device: the best setting",
    (
        *section.case_columns(("script", "command"), ("ranks", "nodes"), script=SCRIPT, command=COMMAND, ranks=RANKS),
        *section.case_columns(("device",), ()),
        attribute("setting", SETTING, "text", "best.setting"),
        Column(
            "to_run",
            lambda analysis: command_line(analysis.best.points[0].config_as(Resolved)),
            "Command line with this setting.",
            "text",
        ),
        Column("to_write", lambda analysis: _lines(analysis.best.points[0]), TO_WRITE, "text"),
        *(through(column, attrgetter("best")) for column in (*OF_RUNS, *MEASURED, section.RESULTS)),
        *section.decision_columns(REFERENCE),
    ),
)


@dataclass(frozen=True)
class FindingRow:
    row: JobRow
    finding: FoundCause


FINDINGS: Table[FindingRow] = Table(
    "job_findings",
    "one row per setting and cause, in each setting the most worthwhile first",
    (
        attribute("setting", kind="text", read="row.setting", header="setting", style="setting"),
        attribute("cause", kind="text", read="finding.cause", header="cause"),
        attribute("lost_us", read="finding.lost_us", header="lost us", show=as_us),
        attribute("share", read="finding.share", header="share", show=as_share),
        attribute("where", kind="text", read="finding.where", header="where", style="setting", dropped=1),
    ),
)


def findings(analysis: Analysis, diagnosed: int) -> list[Exhibit]:
    """Returns the table of each setting's findings, as recorded when it was measured; empty if none was profiled.
    `diagnosed`: number of settings whose traces the page diagnoses, which says more."""
    found = [FindingRow(row, finding) for row in analysis.rows for finding in row.causes[:MOST_FINDINGS]]
    if not found:
        return []
    settings = {one.row.setting for one in found}
    settings_by_advice: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in found:
        if one.finding.advice:
            settings_by_advice[one.finding.cause, one.finding.advice].append(one.row.setting)
    return [
        Exhibit(
            listing=Listing(
                FINDINGS,
                found,
                "Findings of each setting, as recorded when it was measured.",
                chosen=lambda one: one.row is analysis.best,
                reference=lambda one: one.row is analysis.reference,
                group=lambda one: one.row.setting,
                most_rows=MOST_FOUND_ROWS,
            ),
            heading="Why communication is exposed, by setting",
            on_page=diagnosed < len(settings),
            notes=[
                f"Try for {cause}{f' with {some_of(which)}' if len(settings) > 1 else ''}: {advice}"
                for (cause, advice), which in settings_by_advice.items()
            ],
        )
    ]
