"""The report on copy engines: how much of GEMMs or copies overlap hides, by direction and size. Rows, columns, section
and chart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from overlap_sweep.report import charts
from overlap_sweep.report.numbers import as_percent, as_rate, as_us, some_of
from overlap_sweep.report.section import Answer, Card, Exhibit, Section, Sources
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
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import recorded, recorded_warnings, slowed_gpus
from overlap_sweep.results.verdict import TYPICAL_SCATTER
from overlap_sweep.workloads.copy_engine.result import VARIANTS, CopyTimes

WORTH = 0.05
"""Smallest share of the possible saving that counts as one."""


@dataclass(frozen=True)
class CopyRow:
    """One point. Times are those of one iteration: all its GEMMs and copies."""

    point: Point
    size: str
    """Sizes in words: `4 GEMMs of 4096, 4 x 64 MiB`."""
    launch_bound: bool
    gemm: Estimate
    copy: Estimate
    none: Estimate
    """Time in sequence."""
    overlapped: Estimate
    saved: Estimate
    """Time in sequence minus overlapped, median of the rounds; may be negative."""

    @property
    def hidden_fraction(self) -> float:
        """Returns the time saved as a share of the shorter of GEMMs and copies."""
        return self.saved.time_us / min(self.gemm.time_us, self.copy.time_us)

    @property
    def saves(self) -> bool:
        """Returns whether overlap saves time: beyond the noise, enough to matter, and not launch-bound."""
        clear = self.saved.time_us > self.saved.noise_us and self.hidden_fraction >= WORTH
        return clear and not self.launch_bound


@dataclass(frozen=True)
class CopyAnalysis:
    """Copies of all sizes in one direction on one device."""

    direction: str
    device: str
    rows: list[CopyRow]
    """Rows by size, ascending."""

    @property
    def title(self) -> str:
        return f"GEMMs and copies, {self.direction} on {self.device}"

    @property
    def answer(self) -> str:
        """Returns a sentence on where overlap saves most."""
        rows = [row for row in self.rows if not row.launch_bound]
        if not rows:
            return "No answer: all points are launch-bound."
        saving = [row for row in rows if row.saves]
        best = max(saving or rows, key=lambda row: row.hidden_fraction)
        return (
            f"Overlap saves time at {len(saving)} of {len(rows)} sizes. Best: {best.size}, "
            f"{best.saved.time_us:,.1f} us saved (noise {best.saved.noise_us:.1f}), {best.hidden_fraction:.0%} of the "
            "shorter of GEMMs and copies."
        )

    @property
    def card(self) -> Card:
        """Returns whether overlapping copies with GEMMs pays, at a glance."""
        saving = [row for row in self.rows if row.saves]
        if not saving:
            known = any(not row.launch_bound for row in self.rows)
            return Card(self.title, "Overlap saves nothing beyond the noise" if known else "No answer", [self.answer])
        most, least = (pick(saving, key=lambda row: row.hidden_fraction) for pick in (max, min))
        shares = f"{least.hidden_fraction:.0%} to {most.hidden_fraction:.0%}" if least is not most else ""
        headline = f"Overlap saves {shares or f'{most.hidden_fraction:.0%}'} of the shorter of GEMMs and copies"
        best = f"{as_us(most.saved.time_us)} us (noise {as_us(most.saved.noise_us)})"
        sentences = [f"It saves time at {len(saving)} of {len(self.rows)} sizes. Most at {most.size}: {best}."]
        if least is not most:
            sentences.append(f"Least at {least.size}.")
        return Card(self.title, headline, sentences)

    @property
    def cautions(self) -> list[str]:
        """Returns the caveats of the answer, a sentence each."""
        points, bound = [row.point for row in self.rows], [row.size for row in self.rows if row.launch_bound]
        launch_bound = f"Launch-bound, so the times say nothing about the GPU: {some_of(bound, separator='; ')}."
        return [*([launch_bound] if bound else []), *slowed_gpus(points), *recorded_warnings(points)]


def analyse_copies(points: Iterable[Point]) -> list[CopyAnalysis]:
    """Returns an analysis of the `ok` copy points for each direction and device."""
    cases: dict[tuple[str, str], list[CopyRow]] = defaultdict(list)
    for point in points:
        if point.workload == "copy_engine" and point.status == "ok":
            cases[point.config["copy_engine"]["direction"], point.case.device].append(copy_row(point))
    sizes = itemgetter("matrix_size", "copy_mb", "gemms", "copies")
    return [
        CopyAnalysis(*case, sorted(cases[case], key=lambda row: sizes(row.point.config["copy_engine"])))
        for case in sorted(cases)
    ]


def copy_row(point: Point) -> CopyRow:
    """Returns the row of an `ok` point."""
    options, measured = point.config["copy_engine"], point.measured_as(CopyTimes)
    gemm, copy, none, overlapped = (estimate(measured.times[name].samples_us) for name in VARIANTS)
    rounds = zip(measured.times["sequential"].samples_us, measured.times["overlapped"].samples_us, strict=True)
    saved = estimate([none_us - time_us for none_us, time_us in rounds])
    between = TYPICAL_SCATTER[point.config["runtime"]["device"]]
    return CopyRow(
        point,
        size="{gemms} GEMMs of {matrix_size}, {copies} x {copy_mb:g} MiB".format(**options),
        launch_bound=any(measured.launch_bound.values()),
        gemm=gemm,
        copy=copy,
        none=none,
        overlapped=overlapped,
        saved=saved.with_error(between * none.time_us),
    )


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


ASKED = (
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
)
MEASURED = (
    _time("gemm", "Time of all GEMMs of an iteration, alone.", "gemm.time_us", "GEMM"),
    _time("copy", "Time of all copies of an iteration, alone.", "copy.time_us"),
    _time("none", "Time of GEMMs and copies in sequence, with no overlap.", "none.time_us"),
    _time("time", "Time of GEMMs and copies overlapped, on two streams: median of the repeats.", "overlapped.time_us"),
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
    _rate("tflops_alone", "Rate of the GEMMs alone.", "flops", "gemm", "TFLOP/s"),
    _rate("tflops_overlapped", "Operations of the GEMMs over time_us.", "flops", "overlapped", "TFLOP/s overlapped"),
    _rate("gb_per_s_alone", "Rate of the copies alone.", "bytes_copied", "copy", "GB/s"),
    _rate("gb_per_s_overlapped", "Bytes copied over time_us.", "bytes_copied", "overlapped", "GB/s overlapped"),
    attribute("launch_bound", kind="flag"),
    C("", lambda row: "launch-bound" if row.launch_bound else "", kind="text", header="note", style="reason"),
)
TABLE = points_table("copies", "one row per point", (POINT, DIRECTORY, DEVICE, *ASKED, STATUS, ERROR), MEASURED)
COMPARED = Table("copies", "one row per size", (C("", attrgetter("size"), kind="text", header="size"), *MEASURED))

LEGEND = (
    "Times are per iteration, with all its GEMMs and copies. none: in sequence; time: overlapped; saved: none - time, "
    "median of the rounds; hidden: saved / the shorter of GEMM and copy alone."
)


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
        answers=[_answer(analysis) for analysis in analyses],
        points=Listing(TABLE, rows, "Every point of GEMMs and copies."),
        report={
            "copies": [
                {
                    "direction": analysis.direction,
                    "device": analysis.device,
                    **recorded([row.point for row in analysis.rows]),
                    "answer": analysis.answer,
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
        sentences=[analysis.answer],
        card=analysis.card,
        cautions=analysis.cautions,
        compared=Listing(COMPARED, analysis.rows, "Every size, by GEMM size.", chosen=lambda row: row.saves),
        points=[row.point for row in analysis.rows],
        brief=f"{analysis.direction} on {analysis.device}",
        legend=LEGEND,
        charts=[Exhibit(chart=partial(copies_bars, analysis), name=analysis.direction)],
    )


MOST_BARS = 40
"""Bars in the chart; the table has all sizes."""


def copies_bars(analysis: CopyAnalysis) -> charts.Rows:
    """Returns, by size, how much of the shorter of GEMMs and copies is hidden behind the longer, as a share of the
    sequential time, since sizes differ by magnitudes."""
    return charts.Rows(
        title=f"{analysis.direction} on {analysis.device}",
        subtitle=f"overlapped time with its noise; at most the first {MOST_BARS} sizes",
        axis=charts.Axis("% of the sequential time"),
        parts=[
            charts.Key("the longer of GEMMs and copies", "gemm"),
            charts.Key("added by the shorter", "comm"),
            charts.Key("saved", "saved"),
        ],
        columns=["time us", "hidden"],
        rows=[_bar(row) for row in analysis.rows[:MOST_BARS]],
    )


def _bar(row: CopyRow) -> charts.Row:
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
        details=COMPARED.details(row),
    )
