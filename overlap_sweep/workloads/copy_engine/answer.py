"""GEMMs beside copies: what a copy engine can hide, by direction and size."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from overlap_sweep.report.frame import Row, column_types, common_cells
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import CopyTimes
from overlap_sweep.results.verdict import TYPICAL_SCATTER

WORTH = 0.05
"""Less than this share of what could be saved is nothing to build on, however sure it is."""


class CopyCase(NamedTuple):
    """What is told in one sentence: copies of all sizes that go the same way."""

    direction: str
    device: str

    def __str__(self) -> str:
        return f"{self.direction} on {self.device}"


@dataclass(frozen=True)
class CopyRow:
    """One point. Times are of one iteration: all its GEMMs, all its copies."""

    point: Point
    matrix_size: int
    copy_mb: float
    gemms: int
    copies: int
    dtype: str
    gemm: Estimate
    copy: Estimate
    sequential: Estimate
    overlapped: Estimate
    saving: Estimate
    """Of one after the other against at once, round by round; may be negative."""
    flops: int
    bytes_copied: int
    launch_bound: bool

    @property
    def saving_share(self) -> float:
        """Of the time one after the other."""
        return self.saving.time_us / self.sequential.time_us

    @property
    def ideal_us(self) -> float:
        """What hiding the shorter of the two wholly would save."""
        return min(self.gemm.time_us, self.copy.time_us)

    @property
    def hidden_fraction(self) -> float:
        """The share of the ideal that is saved."""
        return self.saving.time_us / self.ideal_us

    @property
    def slowdown(self) -> float:
        """By how much the two at once take longer than the longer of them alone."""
        return self.overlapped.time_us / max(self.gemm.time_us, self.copy.time_us) - 1

    @property
    def saves(self) -> bool:
        """Beyond the noise, and something worth it."""
        return self.saving.time_us > self.saving.noise_us and self.hidden_fraction >= WORTH

    @property
    def slower(self) -> bool:
        """Beyond the noise: at once they take longer than one after the other."""
        return self.saving.time_us < -self.saving.noise_us

    @property
    def unclear(self) -> bool:
        """Neither faster nor slower beyond the noise, which would hide a saving that is worth it."""
        return abs(self.saving.time_us) <= self.saving.noise_us and self.saving.noise_us > WORTH * self.ideal_us

    @property
    def size(self) -> str:
        """`4 GEMMs of 4096, 4 x 64 MiB`."""
        gemms = f"{self.gemms} GEMMs of" if self.gemms > 1 else "GEMM of"
        copies = f"{self.copies} x " if self.copies > 1 else ""
        return f"{gemms} {self.matrix_size}, {copies}{self.copy_mb:g} MiB"

    def tflops(self, beside: bool) -> float:
        """Of the GEMMs alone, or over the whole time that they and the copies took at once."""
        return self.flops / (self.overlapped if beside else self.gemm).time_us / 1e6

    def gb_per_s(self, beside: bool) -> float:
        """The same of the copies."""
        return self.bytes_copied / (self.overlapped if beside else self.copy).time_us / 1e3


@dataclass(frozen=True)
class CopyAnalysis:
    """One case."""

    case: CopyCase
    rows: list[CopyRow]
    """By size."""

    @property
    def trusted(self) -> list[CopyRow]:
        """Those whose times say something about the device."""
        return [row for row in self.rows if not row.launch_bound]

    @property
    def saves(self) -> bool:
        return any(row.saves for row in self.trusted)

    @property
    def answer(self) -> str:
        """A sentence."""
        rows = self.trusted
        if not rows:
            return f"{self.case.direction}: no answer, the host could not enqueue as fast as the device ran"
        saving = [row for row in rows if row.saves]
        if not saving:
            best = max(rows, key=lambda row: row.hidden_fraction)
            said = f"at best {best.saving.time_us:+.1f} us, noise {best.saving.noise_us:.1f}; {best.size}"
            if all(row.slower for row in rows):
                return f"{self.case.direction}: at once is slower than one after the other ({said})"
            unclear = sum(row.unclear for row in rows)
            if unclear == len(rows):
                return f"{self.case.direction}: cannot tell whether copies hide behind a GEMM ({said})"
            but = f"; {unclear} of {len(rows)} sizes cannot tell" if unclear else ""
            return f"{self.case.direction}: copies hide behind no GEMM ({said}){but}"
        best = max(saving, key=lambda row: row.hidden_fraction)
        typical = statistics.median(row.hidden_fraction for row in rows)
        where = f" at {len(saving)} of {len(rows)} sizes" if len(rows) > 1 else ""
        share = f"{best.saving_share:.0%} of one after the other"
        median = f", {typical:.0%} in the middle" if len(rows) > 2 else ""
        return (
            f"{self.case.direction}: overlap saves time{where}, up to {best.hidden_fraction:.0%} of what hiding all "
            f"would ({best.saving.time_us:,.1f} us, {share}; {best.size}){median}"
        )


COPY_COLUMNS = {
    **column_types("point", "directory", "device", "direction", "dtype", "status", "error", "matrix_size", "copy_mb"),
    **column_types("gemms", "copies", "repeats", "gemm_us", "copy_us", "sequential_us", "overlapped_us"),
    **column_types("saving_us", "saving_noise_us", "saving_share", "ideal_us", "hidden_fraction", "slowdown"),
    **column_types("tflops_alone", "tflops_overlapped", "gb_per_s_alone", "gb_per_s_overlapped", "launch_bound"),
    **dict.fromkeys(("direction", "dtype"), "string"),
    **dict.fromkeys(("matrix_size", "gemms", "copies"), "Int64"),
}
"""Every column in its order, and its pandas type: one row per point. Times are medians in microseconds, of an iteration
with all its GEMMs and copies.

saving_us is sequential less overlapped, round by round; saving_share is of sequential_us. ideal_us is the shorter of
gemm_us and copy_us, hidden_fraction the share of it that is saved; slowdown is overlapped_us over the longer, minus 1.
Rates overlapped are over the whole of overlapped_us.
"""


def analyse_copies(points: Iterable[Point]) -> list[CopyAnalysis]:
    """The `ok` copy points by direction."""
    cases: dict[CopyCase, list[CopyRow]] = defaultdict(list)
    for point in points:
        if point.is_copy and point.status == "ok":
            cases[CopyCase(point.config["copy_engine"]["direction"], point.case.device)].append(copy_row(point))
    return [CopyAnalysis(case, sorted(cases[case], key=_place)) for case in sorted(cases)]


def copy_row(point: Point) -> CopyRow:
    """Of a point that is ok."""
    assert point.result
    assert point.result.copies
    measured, asked = point.result.copies, point.config["copy_engine"]
    estimates = {name: estimate(timing.samples_us) for name, timing in measured.times.items()}
    between = TYPICAL_SCATTER[point.config["runtime"]["device"]]
    return CopyRow(
        point=point,
        matrix_size=asked["matrix_size"],
        copy_mb=asked["copy_mb"],
        gemms=asked["gemms"],
        copies=asked["copies"],
        dtype=asked["dtype"],
        gemm=estimates["gemm"],
        copy=estimates["copy"],
        sequential=estimates["sequential"],
        overlapped=estimates["overlapped"],
        saving=estimate(_savings_us(measured)).with_error(between * estimates["sequential"].time_us),
        flops=measured.flops,
        bytes_copied=measured.bytes_copied,
        launch_bound=point.result.launch_bound or any(measured.launch_bound.values()),
    )


def copy_rows(points: Iterable[Point], root: Path) -> list[Row]:
    """With exactly the keys of COPY_COLUMNS; what does not apply is None."""
    rows = []
    for point in points:
        if point.is_copy:
            asked = point.config["copy_engine"]
            sizes = {name: asked[name] for name in ("direction", "dtype", "matrix_size", "copy_mb", "gemms", "copies")}
            common = {**common_cells(point, root), **sizes}
            rows.append({**common, **copy_cells(copy_row(point))} if point.status == "ok" else common)
    return [{column: row.get(column) for column in COPY_COLUMNS} for row in rows]


def copy_cells(row: CopyRow) -> Row:
    """The columns of what was measured."""
    return {
        "repeats": row.overlapped.repeats,
        "gemm_us": row.gemm.time_us,
        "copy_us": row.copy.time_us,
        "sequential_us": row.sequential.time_us,
        "overlapped_us": row.overlapped.time_us,
        "saving_us": row.saving.time_us,
        "saving_noise_us": row.saving.noise_us,
        "saving_share": row.saving_share,
        "ideal_us": row.ideal_us,
        "hidden_fraction": row.hidden_fraction,
        "slowdown": row.slowdown,
        "tflops_alone": row.tflops(beside=False),
        "tflops_overlapped": row.tflops(beside=True),
        "gb_per_s_alone": row.gb_per_s(beside=False),
        "gb_per_s_overlapped": row.gb_per_s(beside=True),
        "launch_bound": row.launch_bound,
    }


def _savings_us(measured: CopyTimes) -> Sequence[float]:
    rounds = zip(measured.times["sequential"].samples_us, measured.times["overlapped"].samples_us, strict=True)
    return [sequential_us - overlapped_us for sequential_us, overlapped_us in rounds]


def _place(row: CopyRow) -> tuple[Any, ...]:
    return row.matrix_size, row.copy_mb, row.gemms, row.copies, row.dtype, row.point.name
