"""GEMMs beside copies for people and programs: what a copy engine hides, by direction and size."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

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
    points_table,
)
from overlap_sweep.results.conditions import slowed_gpus
from overlap_sweep.results.provenance import environments, measured_when
from overlap_sweep.workloads.copy_engine.answer import CopyAnalysis, CopyRow, analyse_copies, copy_row
from overlap_sweep.workloads.copy_engine.chart import copies_bars

C = Column[CopyRow]


def _asked(name: str, **more: object) -> Column[PointRow[CopyRow]]:
    return asked(name, "copy_engine", name, **more)


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
    C("", lambda row: row.direction, kind="text", header="direction"),
    C("", lambda row: row.size, kind="text", header="size", style="setting"),
)
MEASURED = (
    C("repeats", lambda row: row.overlapped.repeats, kind="count"),
    C("gemm_us", lambda row: row.gemm.time_us, "All GEMMs of an iteration, alone.", header="GEMM us", show=as_us),
    C("copy_us", lambda row: row.copy.time_us, "All copies of an iteration, alone.", header="copy us", show=as_us),
    C("sequential_us", lambda row: row.sequential.time_us, "One after the other.", header="sequential us", show=as_us),
    C("overlapped_us", lambda row: row.overlapped.time_us, "At once.", header="overlapped us", show=as_us),
    C(
        *("saving_us", lambda row: row.saving.time_us, "sequential less overlapped, round by round."),
        header="saved us",
        show=as_us,
        high_first=True,
    ),
    C(
        *("saving_noise_us", lambda row: row.saving.noise_us, "95 % of its noise."),
        header="noise us",
        show=as_us,
        dropped=3,
    ),
    C(
        *("saving_share", lambda row: row.saving_share, "Of sequential_us."),
        header="of sequential",
        show=as_percent,
        dropped=5,
        high_first=True,
    ),
    C("ideal_us", lambda row: row.ideal_us, "The shorter of gemm_us and copy_us."),
    C(
        *("hidden_fraction", lambda row: row.hidden_fraction, "The share of the ideal that is saved."),
        header="of the ideal",
        show=as_percent,
        high_first=True,
    ),
    C(
        *("slowdown", lambda row: row.slowdown, "overlapped over the longer of the two alone, minus 1."),
        header="slowdown",
        show="{:+.0%}".format,
        dropped=4,
    ),
    C(
        *("tflops_alone", lambda row: row.tflops(beside=False), "Of the GEMMs alone."),
        header="TFLOP/s",
        words=lambda row: f"{as_rate(row.tflops(beside=False))} to {as_rate(row.tflops(beside=True))}",
        dropped=2,
        high_first=True,
    ),
    C("tflops_overlapped", lambda row: row.tflops(beside=True), "Of the GEMMs, over the whole of overlapped_us."),
    C(
        *("gb_per_s_alone", lambda row: row.gb_per_s(beside=False), "Of the copies alone."),
        header="GB/s",
        words=lambda row: f"{as_rate(row.gb_per_s(beside=False))} to {as_rate(row.gb_per_s(beside=True))}",
        dropped=1,
        high_first=True,
    ),
    C("gb_per_s_overlapped", lambda row: row.gb_per_s(beside=True), "Of the copies, over the whole of overlapped_us."),
    C("launch_bound", lambda row: row.launch_bound, "The times say nothing about the device.", "flag"),
    C("", lambda row: row.note, kind="text", header="note", style="reason"),
)
TABLE = points_table("copies", "one row per point", (POINT, DIRECTORY, DEVICE, *ASKED, STATUS, ERROR, *SIZES), MEASURED)
COMPARED = Table("copies", "one row per size", (*WHICH, *MEASURED))

LEGEND = (
    "An iteration is all its GEMMs and copies. saved: sequential less overlapped, round by round; of the ideal: of the "
    "shorter of the two alone; slowdown: overlapped over the longer. Rates are alone, then over the overlapped time."
)


def section(sources: Sources) -> Section | None:
    """Returns what copies hide, an answer for each device; None where nothing of it is among the points."""
    points = sources.points("copy_engine")
    analyses = analyse_copies(points)
    by_device: dict[str, list[CopyAnalysis]] = defaultdict(list)
    for analysis in analyses:
        by_device[analysis.case.device].append(analysis)
    rows = [
        PointRow(point, sources.reading.root, copy_row(point) if point.status == "ok" else None) for point in points
    ]
    if not points:
        return None
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
        charts=[Exhibit(chart=partial(copies_bars, analysis), name=analysis.case.direction) for analysis in analyses],
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
        **analysis.case._asdict(),
        "measured": measured_when(points),
        "environment": environments(points)[0],
        "answer": analysis.answer,
        "warnings": cautions(analysis.rows),
        "points": [point.name for point in points],
    }
