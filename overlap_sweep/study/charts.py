"""Charts of the settings of one case: their times, and the streams of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import isnan
from typing import TypeVar

from overlap_sweep.report import causes
from overlap_sweep.report.charts import Axis, Form, Row, Rows
from overlap_sweep.report.iterations import timeline
from overlap_sweep.report.section import Exhibit
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.study import C, CaseAnalysis, R, Study

T = TypeVar("T")

MOST_BARS = 30
"""Bars in a chart; the table has all settings."""


def exhibits(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> list[Exhibit]:
    """Returns the charts of an answer, and why communication is exposed in the traces."""
    return [
        Exhibit(chart=partial(settings_bars, study, analysis)),
        *study.charts(analysis),
        *_streams(study, analysis),
        causes.exhibit(sides(study, analysis)),
    ]


def first_bars(rows: Sequence[T]) -> tuple[Sequence[T], str]:
    """Returns the rows that a chart shows, and words for its title if it leaves some out."""
    shown = rows[:MOST_BARS]
    return shown, f"; the first {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""


def settings_bars(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> Rows:
    """Returns the settings from fast to slow, by the time per unit of work."""
    rows = [row for i, row in enumerate(analysis.rows) if i < MOST_BARS or row in analysis.shown_first]
    more = f"; {len(rows)} of {len(analysis.rows)} settings" if len(rows) < len(analysis.rows) else ""
    bars = [study.bar(analysis, row) for row in rows]
    drawn = [i for i in range(len(study.bar_columns)) if any(bar.cells[i] for bar in bars)]
    return Rows(
        title=analysis.title,
        subtitle=study.bars_subtitle,
        axis=Axis(f"time {analysis.per}, us{more}"),
        parts=study.parts(analysis),
        columns=[study.bar_columns[i] for i in drawn],
        rows=[
            Row(
                name=row.setting,
                ends=bar.ends,
                low=low,
                high=high,
                cells=[bar.cells[i] for i in drawn],
                bold=row is analysis.best,
                details=study.compared.details(row),
            )
            for row, bar in zip(rows, bars, strict=True)
            for low, high in [_interval(row.per(analysis.work))]
        ],
    )


def _interval(time: Estimate) -> tuple[float | None, float | None]:
    """Returns the ends of a time's interval; None if its noise is unknown."""
    if isnan(time.noise_us):
        return None, None
    return max(0.0, time.time_us - time.noise_us), time.time_us + time.noise_us


def sides(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> Mapping[str, causes.Side | None]:
    """Returns the traces of the settings, of the best and the reference first."""
    others = analysis.rows if study.most_diagnosed else []
    rows = {row.setting: row for row in (*analysis.shown_first, *others)}
    found = [(name, side) for name, row in rows.items() if (side := study.side(row))]
    return dict(found[: study.most_diagnosed or None])


def _streams(study: Study[C, R], analysis: CaseAnalysis[C, R]) -> list[Exhibit]:
    """Returns the streams in a step of the best setting, below those of another."""
    traces = study.streams(analysis)
    if not traces:
        return []

    def drawn() -> Form | None:
        shown = timeline(f"Streams of a step, {analysis.case.brief}", dict(traces), by_stream=True)
        return shown.chart if shown else None

    return [
        Exhibit(
            chart=drawn,
            name="timeline",
            heading="Streams of a step",
            brief="Timeline",
            drawn="A typical profiled step: see what runs concurrently, but take times from the table, as profiling "
            "slows the step down. Blue: GEMMs; green: other computation; orange: communication; exposed: communication "
            "with no concurrent computation.",
        )
    ]
