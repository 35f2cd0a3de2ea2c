"""GEMMs beside copies for people and programs: what a copy engine hides, by direction and size. Columns, section, and
the chart of one direction."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

from overlap_sweep.report import charts
from overlap_sweep.report.numbers import as_percent, as_rate, as_us, some_names
from overlap_sweep.report.section import Answer, Exhibit, Section, Sources
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
    asked,
    attribute,
    points_table,
)
from overlap_sweep.results.provenance import environments, measured_when, slowed_gpus
from overlap_sweep.workloads.copy_engine.answer import CopyAnalysis, CopyRow, analyse_copies, copy_row

C = Column[CopyRow]


def _asked(name: str, **more: Any) -> Column[PointRow[CopyRow]]:
    return asked(name, "copy_engine", name, **more)


def _time(name: str, about: str, header: str, **more: Any) -> C:
    return C(f"{name}_us", attrgetter(f"{name}.time_us"), about, header=f"{header} us", show=as_us, **more)


def _rates(name: str, header: str, of: str, dropped: int) -> tuple[C, C]:
    """Returns the columns of a rate alone and at once; people see both in one."""
    alone, beside = methodcaller(name, beside=False), methodcaller(name, beside=True)

    def words(row: CopyRow) -> str:
        return f"{as_rate(alone(row))} to {as_rate(beside(row))}"

    return (
        C(f"{name}_alone", alone, f"Of the {of} alone.", header=header, words=words, dropped=dropped, high_first=True),
        C(f"{name}_overlapped", beside, f"Of the {of}, over the whole of overlapped_us."),
    )


ASKED = (
    _asked("direction", kind="text", header="direction"),
    _asked("dtype", kind="text", about="Of the GEMM."),
)
SIZES = (
    _asked("matrix_size", kind="count", header="matrix", about="Rows and columns of the GEMM's matrices."),
    _asked("copy_mb", header="copy MiB", show="{:g}".format, about="MiB of each copy."),
    _asked("gemms", kind="count", about="In each iteration."),
    _asked("copies", kind="count", about="In each iteration."),
)
WHICH = (
    C("", attrgetter("direction"), kind="text", header="direction"),
    C("", attrgetter("size"), kind="text", header="size", style="setting"),
)
MEASURED = (
    C("repeats", attrgetter("overlapped.repeats"), kind="count"),
    _time("gemm", "All GEMMs of an iteration, alone.", "GEMM"),
    _time("copy", "All copies of an iteration, alone.", "copy"),
    _time("sequential", "One after the other.", "sequential"),
    _time("overlapped", "At once.", "overlapped"),
    _time("saving", "sequential less overlapped, round by round.", "saved", high_first=True),
    C("saving_noise_us", attrgetter("saving.noise_us"), "95 % of its noise.", header="noise us", show=as_us, dropped=3),
    attribute("saving_share", "Of sequential_us.", header="of sequential", show=as_percent, dropped=5, high_first=True),
    attribute("ideal_us", "The shorter of gemm_us and copy_us."),
    attribute(
        *("hidden_fraction", "The share of the ideal that is saved."),
        header="of the ideal",
        show=as_percent,
        high_first=True,
    ),
    attribute(
        *("slowdown", "overlapped over the longer of the two alone, minus 1."),
        header="slowdown",
        show="{:+.0%}".format,
        dropped=4,
    ),
    *_rates("tflops", "TFLOP/s", "GEMMs", dropped=2),
    *_rates("gb_per_s", "GB/s", "copies", dropped=1),
    attribute("launch_bound", "The times say nothing about the device.", "flag"),
    C("", attrgetter("note"), kind="text", header="note", style="reason"),
)
TABLE = points_table("copies", "one row per point", (POINT, DIRECTORY, DEVICE, *ASKED, STATUS, ERROR, *SIZES), MEASURED)
COMPARED = Table("copies", "one row per size", (*WHICH, *MEASURED))

LEGEND = (
    "An iteration is all its GEMMs and copies. saved: sequential less overlapped, round by round; of the ideal: of the "
    "shorter of the two alone; slowdown: overlapped over the longer. Rates are alone, then over the overlapped time."
)


def section(sources: Sources) -> Section | None:
    """Returns what copies hide, an answer for each device; None where nothing of it is among the points."""
    points, root = sources.points("copy_engine"), sources.reading.root
    if not points:
        return None
    analyses = analyse_copies(points)
    by_device: dict[str, list[CopyAnalysis]] = defaultdict(list)
    for analysis in analyses:
        by_device[analysis.device].append(analysis)
    rows = [PointRow(point, root, copy_row(point) if point.status == "ok" else None) for point in points]
    return Section(
        name="copies",
        what="copies",
        title="GEMMs beside copies",
        explained=LEGEND,
        answers=[_answer(device, analyses) for device, analyses in by_device.items()],
        points=Listing(TABLE, rows, "Every point of GEMMs beside copies."),
        report={"copies": [_report(analysis) for analysis in analyses], "copy_points": TABLE.records(rows)},
        subjects=["GEMMs and copies"],
        launch_bound=sum(row.launch_bound for analysis in analyses for row in analysis.rows),
    )


def _answer(device: str, analyses: list[CopyAnalysis]) -> Answer:
    rows = [row for analysis in analyses for row in analysis.rows]
    return Answer(
        title=f"GEMMs beside copies on {device}",
        sentences=[analysis.answer for analysis in analyses],
        cautions=cautions(rows),
        compared=Listing(
            *(COMPARED, rows, "Every size, by the GEMM's first."),
            chosen=lambda row: row.saves and not row.launch_bound,
            group=lambda row: row.direction,
        ),
        points=[row.point for row in rows],
        legend=LEGEND,
        charts=[Exhibit(chart=partial(copies_bars, analysis), name=analysis.direction) for analysis in analyses],
    )


def cautions(rows: list[CopyRow]) -> list[str]:
    """Returns what to know before believing the answers, a sentence each."""
    bound = [row.point.name for row in rows if row.launch_bound]
    points = [row.point for row in rows]
    told = dict.fromkeys(warning for point in points if point.result for warning in point.result.warnings)
    launch_bound = f"Launch-bound, their times say nothing about the device: {some_names(bound)}."
    return [*([launch_bound] if bound else []), *slowed_gpus(points), *told]


def _report(analysis: CopyAnalysis) -> dict[str, object]:
    points = [row.point for row in analysis.rows]
    return {
        "direction": analysis.direction,
        "device": analysis.device,
        "measured": measured_when(points),
        "environment": environments(points)[0],
        "answer": analysis.answer,
        "warnings": cautions(analysis.rows),
        "points": [point.name for point in points],
    }


MOST_BARS = 40
"""As many as are looked at; the table has all."""

PARTS = [
    charts.Key("the longer of GEMMs and copies", "gemm"),
    charts.Key("added by the other", "comm"),
    charts.Key("saved", "comm", 0.28),
]


def copies_bars(analysis: CopyAnalysis) -> charts.Bars:
    """Returns, by size, what of the shorter of GEMMs and copies is hidden behind the longer; as shares of the time one
    after the other, since sizes differ by magnitudes."""
    rows = analysis.rows[:MOST_BARS]
    more = f"; the first {len(rows)} of {len(analysis.rows)} sizes" if len(rows) < len(analysis.rows) else ""
    return charts.Bars(
        title=f"{analysis.direction} on {analysis.device}",
        subtitle="both at once, with its noise",
        axis=charts.Axis(f"% of the time one after the other{more}"),
        parts=PARTS,
        columns=[charts.Column("at once us"), charts.Column("saved us"), charts.Column("of the ideal")],
        bars=[_bar(row) for row in rows],
    )


def _bar(row: CopyRow) -> charts.Bar:
    scale = 100 / row.sequential.time_us
    longer_us = max(row.gemm.time_us, row.copy.time_us)
    time_us, noise_us = row.overlapped.time_us, row.overlapped.noise_us
    return charts.Bar(
        name=row.size,
        ends=[end * scale for end in charts.cut(longer_us, time_us, row.sequential.time_us)],
        low=max(0.0, time_us - noise_us) * scale,
        high=(time_us + noise_us) * scale,
        cells=[as_us(time_us), as_us(row.saving.time_us), f"{row.hidden_fraction:.0%}"],
        bold=row.saves,
        details={
            "size": row.size,
            "GEMMs alone": f"{as_us(row.gemm.time_us)} us",
            "copies alone": f"{as_us(row.copy.time_us)} us",
            "one after the other": f"{as_us(row.sequential.time_us)} us",
            "at once": f"{as_us(time_us)} us, noise {as_us(noise_us)}",
            "saved": f"{as_us(row.saving.time_us)} us, noise {as_us(row.saving.noise_us)}",
            "note": row.note,
        },
    )
