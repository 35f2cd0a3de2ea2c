"""The report on copy engines: how much of GEMMs or copies overlap hides, by direction and size. Columns, section and
chart."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from overlap_sweep.report import charts
from overlap_sweep.report.numbers import as_percent, as_rate, as_us
from overlap_sweep.report.section import Answer, Exhibit, Section, Sources
from overlap_sweep.report.table import (
    DEVICE,
    DIRECTORY,
    ERROR,
    POINT,
    PRECISION,
    STATUS,
    Column,
    Listing,
    PointRow,
    Table,
    asked,
    attribute,
    points_table,
)
from overlap_sweep.results.provenance import recorded
from overlap_sweep.study.charts import first_bars
from overlap_sweep.study.section import LAUNCH_BOUND_NOTE
from overlap_sweep.workloads.copy_engine.answer import CopyAnalysis, CopyRow, analyse_copies
from overlap_sweep.workloads.copy_engine.result import CopyTimes

C = Column[CopyRow]


def _asked(name: str, **more: Any) -> Column[PointRow[CopyRow]]:
    return asked(name, "copy_engine", name, **more)


def _time(name: str, about: str, read: str, header: str = "", **more: Any) -> C:
    return attribute(f"{name}_us", about, read=read, header=f"{header or name} us", show=as_us, **more)


def _rate(name: str, about: str, amount: str, variant: str, header: str = "") -> C:
    """Returns the column of `amount` per time of `variant`."""

    def rate(row: CopyRow) -> float:
        scale = 1e6 if amount == "flops" else 1e3
        total: int = getattr(row.point.measured_as(CopyTimes), amount)
        return total / float(getattr(row, variant).time_us) / scale

    return C(name, rate, about, header=header, show=as_rate, dropped=1, high_first=True)


def _of_chunks(name: str, about: str, read: str, show: Callable[[Any], str], **more: Any) -> C:
    """Returns a column of points that split their GEMMs; empty for others."""
    get, header = attrgetter(read), name.replace("_", " ")
    return C(name, lambda row: get(row.chunking) if row.chunking else None, about, header=header, show=show, **more)


ASKED = (
    Column[PointRow[CopyRow]](
        "gpu",
        # Results of the first one don't have it.
        lambda row: row.point.recorded["copy_engine"].get("device") or 0,
        "Number of the GPU, among the visible ones.",
        kind="count",
    ),
    _asked("direction", kind="text", header="direction"),
    replace(PRECISION, header=""),
    _asked(
        "matrix_size",
        kind="count",
        header="matrix",
        about="Rows and columns of the square matrices that are multiplied.",
    ),
    _asked("copy_mb", header="copy MiB", show="{:g}".format, about="Size of each copy."),
    _asked("gemms", kind="count", about="Number of GEMMs in an iteration."),
    _asked("copies", kind="count", about="Number of copies in an iteration."),
    Column[PointRow[CopyRow]](
        "chunks",
        # Results of earlier versions don't have it.
        lambda row: row.point.recorded["copy_engine"].get("chunks"),
        "Number of smaller GEMMs that each GEMM is split into; empty if it is whole.",
        kind="count",
        header="chunks",
    ),
)
MEASURED = (
    _time("gemm", "Time of all GEMMs of an iteration, alone.", "gemm.time_us", "GEMM"),
    _time("copy", "Time of all copies of an iteration, alone.", "copy.time_us"),
    _time("none", "Time of GEMMs and copies in sequence, with no overlap.", "none.time_us"),
    _time(
        *("time", "Time of GEMMs (in their chunks) and copies overlapped, on two streams: median of the repeats."),
        "overlapped.time_us",
    ),
    _time("noise", "", "overlapped.noise_us", dropped=2),
    C("speedup", lambda row: row.none.time_us / row.overlapped.time_us),
    _time(
        "saved",
        "Time saved by overlap: none_us - time_us, median of the rounds.",
        "saved.time_us",
        high_first=True,
    ),
    _time(
        "saved_noise",
        "Half-width of the 95 % confidence interval of saved_us.",
        "saved.noise_us",
        "saved noise",
        dropped=2,
    ),
    attribute(
        *("hidden_fraction", "saved_us over the shorter of gemm_us and copy_us, the most that overlap can save."),
        header="hidden",
        show=as_percent,
        high_first=True,
    ),
    _of_chunks(
        "chunk_cost", "Additional time of all GEMMs alone when they are split, as a fraction.", "cost", "{:+.1%}".format
    ),
    _of_chunks("whole_us", "Time of GEMMs and copies overlapped, with whole GEMMs.", "whole.time_us", as_us, dropped=2),
    _of_chunks(
        "chunk_gain",
        "Time that chunks save when GEMMs and copies overlap, as a fraction of whole_us; median of the rounds.",
        *("gain.share", "{:+.1%}".format),
    ),
    _of_chunks(
        *("chunk_gain_noise", "Half-width of the 95 % confidence interval of chunk_gain."),
        *("gain.noise", "{:.1%}".format),
        dropped=2,
    ),
    _rate("tflops_alone", "Rate of the GEMMs alone.", "flops", "gemm", "TFLOP/s"),
    _rate("tflops_overlapped", "Operations of the GEMMs over time_us.", "flops", "overlapped", "TFLOP/s overlapped"),
    _rate("gb_per_s_alone", "Rate of the copies alone.", "bytes_copied", "copy", "GB/s"),
    _rate("gb_per_s_overlapped", "Bytes copied over time_us.", "bytes_copied", "overlapped", "GB/s overlapped"),
    attribute("launch_bound", kind="flag"),
    LAUNCH_BOUND_NOTE,
)
TABLE = points_table("copies", "one row per point", (POINT, DIRECTORY, DEVICE, *ASKED, STATUS, ERROR), MEASURED)
COMPARED = Table("copies", "one row per size", (C("", attrgetter("size"), kind="text", header="size"), *MEASURED))

LEGEND = (
    "Times are per iteration, with all its GEMMs and copies. none: in sequence; time: overlapped; saved: none - time, "
    "median of the rounds; hidden: saved / the shorter of GEMM and copy alone."
)
LEGEND_OF_CHUNKS = " In chunks: GEMM, none and whole are of GEMMs that are not split."


def section(sources: Sources) -> Section | None:
    """Returns the section on copies, with an answer for each direction; None if there are no copy points."""
    points, root = sources.points("copy_engine"), sources.reading.root
    if not points:
        return None
    analyses = analyse_copies(points)
    row_of = {row.point.directory: row for analysis in analyses for row in analysis.rows}
    rows = [PointRow(point, root, row_of.get(point.directory)) for point in points]
    return Section(
        name="copies",
        what="copies",
        title="GEMMs and copies",
        explained=LEGEND,
        answers=list(map(_answer, analyses)),
        points=Listing(TABLE, rows, "Every point of GEMMs and copies."),
        report={
            "copies": [
                {
                    "direction": analysis.direction,
                    "device": analysis.device,
                    **recorded([row.point for row in analysis.rows]),
                    "answer": " ".join([analysis.answer, *analysis.on_chunks]),
                    "warnings": analysis.cautions,
                }
                for analysis in analyses
            ],
            "copy_points": TABLE.records(rows),
        },
        topic="GEMMs and copies",
        launch_bound=sum(row.launch_bound for analysis in analyses for row in analysis.rows),
    )


def _answer(analysis: CopyAnalysis) -> Answer:
    return Answer(
        title=analysis.title,
        sentences=[analysis.answer, *analysis.on_chunks],
        card=analysis.card,
        cautions=analysis.cautions,
        compared=Listing(COMPARED, analysis.rows, "Every size, by GEMM size.", chosen=lambda row: row.saves),
        points=[row.point for row in analysis.rows],
        brief=f"{analysis.direction} on {analysis.device}",
        legend=LEGEND + LEGEND_OF_CHUNKS * bool(analysis.on_chunks),
        charts=[Exhibit(chart=partial(copies_bars, analysis), name=analysis.direction)],
    )


def copies_bars(analysis: CopyAnalysis) -> charts.Rows:
    """Returns, by size, how much of the shorter of GEMMs and copies is hidden behind the longer, as a share of the
    sequential time, since sizes differ by magnitudes."""
    shown = {column.header for column in Listing(COMPARED, analysis.rows).columns}
    rows, more = first_bars(analysis.rows)
    return charts.Rows(
        title=f"{analysis.direction} on {analysis.device}",
        subtitle=f"overlapped time with its noise{more}",
        axis=charts.Axis("time, % of that in sequence"),
        parts=[
            charts.Key("the longer of GEMMs and copies", "gemm"),
            charts.Key("added by the shorter", "comm"),
            charts.Key("saved", "saved"),
            charts.LOST,
        ],
        columns=["time us", "hidden"],
        rows=[_bar(row, shown) for row in rows],
    )


def _bar(row: CopyRow, shown: Collection[str]) -> charts.Row:
    scale = 100 / row.none.time_us
    longer_us = max(row.gemm.time_us, row.copy.time_us)
    time_us, noise_us = row.overlapped.time_us, row.overlapped.noise_us
    return charts.Row(
        name=row.size,
        ends=[end * scale for end in charts.cut(longer_us, time_us, row.none.time_us)],
        low=max(0.0, time_us - noise_us) * scale,
        high=(time_us + noise_us) * scale,
        cells=[as_us(time_us), as_percent(row.hidden_fraction)],
        bold=row.saves,
        details={header: text for header, text in COMPARED.details(row).items() if header in shown},
    )
