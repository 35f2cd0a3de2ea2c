"""GEMMs beside copies: what a copy engine hides, by direction and size. Rows, columns, section, and the chart of one
direction."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

from overlap_sweep.report import charts
from overlap_sweep.report.numbers import as_percent, as_rate, as_us, some_of
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
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import recorded, recorded_warnings, slowed_gpus
from overlap_sweep.results.verdict import TYPICAL_SCATTER
from overlap_sweep.workloads.copy_engine.result import VARIANTS, CopyTimes

WORTH = 0.05
"""Less than this share of what could be saved is nothing to build on, however sure it is."""


@dataclass(frozen=True)
class CopyRow:
    """One point. Times are of one iteration: all its GEMMs, all its copies."""

    point: Point
    gemm: Estimate
    copy: Estimate
    sequential: Estimate
    overlapped: Estimate
    saving: Estimate
    """Of one after the other against at once, round by round; may be negative."""

    @property
    def measured(self) -> CopyTimes:
        return self.point.measured_as(CopyTimes)

    @property
    def direction(self) -> str:
        """Where the copies go, such as `device_to_host`."""
        return str(self.point.config["copy_engine"]["direction"])

    @property
    def size(self) -> str:
        """`4 GEMMs of 4096, 4 x 64 MiB`."""
        asked = self.point.config["copy_engine"]
        gemms = f"{asked['gemms']} GEMMs of" if asked["gemms"] > 1 else "GEMM of"
        copies = f"{asked['copies']} x " if asked["copies"] > 1 else ""
        return f"{gemms} {asked['matrix_size']}, {copies}{asked['copy_mb']:g} MiB"

    @property
    def launch_bound(self) -> bool:
        result = self.point.result
        return bool(result and result.launch_bound) or any(self.measured.launch_bound.values())

    @property
    def ideal_us(self) -> float:
        """What hiding the shorter of the two wholly would save."""
        return min(self.gemm.time_us, self.copy.time_us)

    @property
    def hidden_fraction(self) -> float:
        """The share of the ideal that is saved."""
        return self.saving.time_us / self.ideal_us

    @property
    def saves(self) -> bool:
        """Beyond the noise, and something worth it."""
        return self.saving.time_us > self.saving.noise_us and self.hidden_fraction >= WORTH

    @property
    def note(self) -> str:
        """What tells it from the others."""
        if self.launch_bound:
            return "launch-bound"
        if self.saves:
            return "hides all" if self.hidden_fraction > 0.95 else ""
        if self.saving.time_us < -self.saving.noise_us:
            return "slower"
        # Noise that would hide a saving that is worth it.
        unclear = self.saving.time_us <= self.saving.noise_us and self.saving.noise_us > WORTH * self.ideal_us
        return "cannot tell" if unclear else "hides nothing"

    def tflops(self, beside: bool) -> float:
        """Returns the GEMMs' rate, alone or over the whole time that they and the copies took at once."""
        return self.measured.flops / (self.overlapped if beside else self.gemm).time_us / 1e6

    def gb_per_s(self, beside: bool) -> float:
        """Returns the copies' rate in the same way."""
        return self.measured.bytes_copied / (self.overlapped if beside else self.copy).time_us / 1e3


@dataclass(frozen=True)
class CopyAnalysis:
    """Copies of all sizes that go the same way, which are told in one sentence."""

    direction: str
    device: str
    rows: list[CopyRow]
    """By size."""

    @property
    def trusted(self) -> list[CopyRow]:
        """Those whose times say something about the device."""
        return [row for row in self.rows if not row.launch_bound]

    @property
    def answer(self) -> str:
        """A sentence."""
        rows = self.trusted
        if not rows:
            return f"{self.direction}: no answer, the host could not enqueue as fast as the device ran"
        saving = [row for row in rows if row.saves]
        if not saving:
            best = max(rows, key=lambda row: row.hidden_fraction)
            notes = Counter(row.note for row in rows)
            sizes = ", ".join(f"{note} at {count} of {len(rows)} sizes" for note, count in notes.items())
            said = next(iter(notes)) if len(notes) == 1 else sizes
            gain = f"at best {best.saving.time_us:+.1f} us, noise {best.saving.noise_us:.1f}; {best.size}"
            return f"{self.direction}: no clear saving: {said} ({gain})"
        best = max(saving, key=lambda row: row.hidden_fraction)
        typical = statistics.median(row.hidden_fraction for row in rows)
        where = f" at {len(saving)} of {len(rows)} sizes" if len(rows) > 1 else ""
        share = f"{best.saving.time_us / best.sequential.time_us:.0%} of one after the other"
        median = f", {typical:.0%} in the middle" if len(rows) > 2 else ""
        return (
            f"{self.direction}: overlap saves time{where}, up to {best.hidden_fraction:.0%} of what hiding all "
            f"would ({best.saving.time_us:,.1f} us, {share}; {best.size}){median}"
        )


def analyse_copies(points: Iterable[Point]) -> list[CopyAnalysis]:
    """Returns the `ok` copy points by direction and device."""
    cases: dict[tuple[str, str], list[CopyRow]] = defaultdict(list)
    for point in points:
        if point.workload == "copy_engine" and point.status == "ok":
            cases[point.config["copy_engine"]["direction"], point.case.device].append(copy_row(point))
    return [CopyAnalysis(*case, sorted(cases[case], key=_place)) for case in sorted(cases)]


def copy_row(point: Point) -> CopyRow:
    """Returns what a point that is ok measured."""
    times = point.measured_as(CopyTimes).times
    estimates = {name: estimate(times[name].samples_us) for name in VARIANTS}
    rounds = zip(times["sequential"].samples_us, times["overlapped"].samples_us, strict=True)
    saving = estimate([sequential_us - overlapped_us for sequential_us, overlapped_us in rounds])
    between = TYPICAL_SCATTER[point.config["runtime"]["device"]]
    return CopyRow(point, **estimates, saving=saving.with_error(between * estimates["sequential"].time_us))


def _place(row: CopyRow) -> tuple[Any, ...]:
    asked = row.point.config["copy_engine"]
    return *(asked[name] for name in ("matrix_size", "copy_mb", "gemms", "copies", "dtype")), row.point.name


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
    C(
        *("saving_share", lambda row: row.saving.time_us / row.sequential.time_us, "Of sequential_us."),
        header="of sequential",
        show=as_percent,
        dropped=5,
        high_first=True,
    ),
    attribute("ideal_us", "The shorter of gemm_us and copy_us."),
    attribute(
        *("hidden_fraction", "The share of the ideal that is saved."),
        header="of the ideal",
        show=as_percent,
        high_first=True,
    ),
    C(
        "slowdown",
        lambda row: row.overlapped.time_us / max(row.gemm.time_us, row.copy.time_us) - 1,
        "overlapped over the longer of the two alone, minus 1.",
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
    row_of = {row.point.directory: row for analysis in analyses for row in analysis.rows}
    rows = [PointRow(point, root, row_of.get(point.directory)) for point in points]
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
    launch_bound = f"Launch-bound, their times say nothing about the device: {some_of(bound, separator='; ')}."
    return [*([launch_bound] if bound else []), *slowed_gpus(points), *recorded_warnings(points)]


def _report(analysis: CopyAnalysis) -> dict[str, object]:
    points = [row.point for row in analysis.rows]
    return {
        "direction": analysis.direction,
        "device": analysis.device,
        **recorded(points),
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


def copies_bars(analysis: CopyAnalysis) -> charts.Rows:
    """Returns, by size, what of the shorter of GEMMs and copies is hidden behind the longer; as shares of the time one
    after the other, since sizes differ by magnitudes."""
    rows = analysis.rows[:MOST_BARS]
    more = f"; the first {len(rows)} of {len(analysis.rows)} sizes" if len(rows) < len(analysis.rows) else ""
    return charts.Rows(
        title=f"{analysis.direction} on {analysis.device}",
        subtitle="both at once, with its noise",
        axis=charts.Axis(f"% of the time one after the other{more}"),
        parts=PARTS,
        columns=["at once us", "saved us", "of the ideal"],
        rows=[_bar(row) for row in rows],
    )


def _bar(row: CopyRow) -> charts.Row:
    scale = 100 / row.sequential.time_us
    longer_us = max(row.gemm.time_us, row.copy.time_us)
    time_us, noise_us = row.overlapped.time_us, row.overlapped.noise_us
    return charts.Row(
        name=row.size,
        ends=[end * scale for end in charts.cut(longer_us, time_us, row.sequential.time_us)],
        low=max(0.0, time_us - noise_us) * scale,
        high=(time_us + noise_us) * scale,
        cells=[as_us(time_us), as_us(row.saving.time_us), f"{row.hidden_fraction:.0%}"],
        bold=row.saves,
        details=COMPARED.details(row),
    )
