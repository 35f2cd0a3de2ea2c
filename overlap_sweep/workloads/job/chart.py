"""Charts of jobs: the settings, and the streams of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isnan

from overlap_sweep.report import causes
from overlap_sweep.report.charts import Axis, Form, Key, Row, Rows
from overlap_sweep.report.iterations import stream_timeline
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.section import Exhibit
from overlap_sweep.results.run_directory import trace_file
from overlap_sweep.results.traces import listed_trace
from overlap_sweep.workloads.job.answer import JobAnalysis
from overlap_sweep.workloads.job.rows import JobRow

RANK = 0
"""Rank whose trace the timeline shows."""
MOST_BARS = 30
"""Bars in the chart; the table has all settings."""
MOST_DIAGNOSED = 6
"""Settings whose traces are diagnosed on the page: all ranks' traces of each are read."""
PARTS = [Key("other", "gemm"), Key("exposed communication", "comm")]
NOT_PROFILED = [Key("time, not profiled", "gemm")]


def settings_bars(analysis: JobAnalysis, details: Callable[[JobRow], dict[str, str]]) -> Rows:
    """Returns the settings from fast to slow, with the exposed communication's share of the profiled step. `details`:
    the tooltip of a setting."""
    rows = [row for i, row in enumerate(analysis.rows) if i < MOST_BARS or row in _kept(analysis)]
    more = f"; {len(rows)} of {len(analysis.rows)} settings" if len(rows) < len(analysis.rows) else ""
    profiled = any(row.exposed_fraction is not None for row in rows)
    exposed = ["exposed"] if profiled else []
    return Rows(
        title=analysis.title,
        subtitle="mean of the runs, slowest rank, with its noise",
        axis=Axis(f"time {analysis.per}, us{more}"),
        parts=PARTS if profiled else NOT_PROFILED,
        columns=["time us", *exposed, "speedup", "rate"],
        rows=[replace(_bar(analysis, row, profiled), details=details(row)) for row in rows],
    )


def _bar(analysis: JobAnalysis, row: JobRow, profiled: bool) -> Row:
    time = row.per(analysis.work)
    share = row.exposed_fraction
    exposed = [f"{share:.0%}" if share is not None else "-"] if profiled else []
    return Row(
        name=row.setting,
        ends=[time.time_us * (1 - (share or 0.0)), time.time_us] if profiled else [time.time_us],
        low=None if isnan(time.noise_us) else max(0.0, time.time_us - time.noise_us),
        high=None if isnan(time.noise_us) else time.time_us + time.noise_us,
        cells=[as_us(row.time_us), *exposed, f"{analysis.speedup(row):.3f}x", row.rate],
        bold=row is analysis.best,
    )


def _kept(analysis: JobAnalysis) -> tuple[JobRow, JobRow]:
    """Returns the rows that are shown however slow they are."""
    return analysis.best, analysis.reference


def sides(analysis: JobAnalysis) -> dict[str, causes.Side | None]:
    """Returns the traces of each setting, of the best and the reference first."""
    rows = {row.setting: row for row in (*_kept(analysis), *analysis.rows)}
    found = {setting: side_of(row) for setting, row in rows.items()}
    return dict([(setting, side) for setting, side in found.items() if side][:MOST_DIAGNOSED])


def side_of(row: JobRow) -> causes.Side | None:
    """Returns the traces of a setting's first run that has some; None if none has."""
    own = (causes.Side(point, time_us=None if row.unit else row.time_us) for point in row.points)
    return next((side for side in own if side.traces), None)


def timeline(analysis: JobAnalysis) -> Exhibit:
    """Returns the streams in a step of the best setting, below those of the reference."""
    found = {
        row.setting: path
        for row in reversed(_kept(analysis))
        for point in row.points[::-1]
        if (path := listed_trace(point, trace_file(RANK)))
    }

    def drawn() -> Form | None:
        shown = stream_timeline(f"Streams of a step, {analysis.case.brief}", dict(found))
        return shown.chart if shown else None

    return Exhibit(
        chart=drawn if found else None,
        name="timeline",
        heading="Streams of a step",
        brief="Timeline",
        drawn="A typical profiled step: see what runs concurrently, but take times from the table, as profiling slows "
        "the step down. Blue: GEMMs; green: other computation; orange: communication; exposed: communication with no "
        "concurrent computation.",
    )


def exhibits(analysis: JobAnalysis, details: Callable[[JobRow], dict[str, str]]) -> list[Exhibit]:
    """Returns the charts of an answer, and why communication is exposed in the traces. `details`: the tooltip of a
    setting."""
    return [
        Exhibit(chart=partial(settings_bars, analysis, details)),
        timeline(analysis),
        causes.exhibit(sides(analysis)),
    ]
