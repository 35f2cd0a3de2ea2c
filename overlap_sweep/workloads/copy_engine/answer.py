"""What copies beside GEMMs save, by direction and size: rows, the best, and whether splitting the GEMMs pays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from overlap_sweep.report.section import Card
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.points import Point, group_points
from overlap_sweep.results.provenance import different_environments, recorded_warnings, slowed_gpus
from overlap_sweep.results.verdict import TYPICAL_SCATTER
from overlap_sweep.study.words import launch_bound_caution
from overlap_sweep.workloads.copy_engine.config import CopyEngine, Resolved
from overlap_sweep.workloads.copy_engine.result import CopyTimes

WORTH = 0.05
"""Smallest share of the possible saving that counts as one."""


@dataclass(frozen=True)
class Chunking:
    """GEMMs in chunks against whole ones, measured in turns."""

    chunks: int
    gemm: Estimate
    """Time of the GEMMs in chunks, alone."""
    whole: Estimate
    """Time of whole GEMMs overlapped with the copies."""
    cost: float
    """Change of the GEMMs' time alone, as a fraction."""
    gain: Gain
    """Gain over whole GEMMs overlapped with the copies, median of the rounds."""

    @property
    def in_words(self) -> str:
        """Returns `with the copies 2.0% faster than whole (1.7 to 2.3%), alone they take 3.1% more time`."""
        alone = f"{abs(self.cost):.1%} {'more' if self.cost > 0 else 'less'}"
        return f"with the copies {self.gain.in_words('whole')}, alone they take {alone} time"


@dataclass(frozen=True)
class CopyRow:
    """One point. Times are those of one iteration: all its GEMMs and copies."""

    point: Point
    size: str
    """Sizes in words: `4 GEMMs of 4096, 4 x 64 MiB`, or `4 GEMMs of 4096 in 8 chunks, 4 x 64 MiB`."""
    launch_bound: bool
    gemm: Estimate
    copy: Estimate
    none: Estimate
    """Time in sequence."""
    overlapped: Estimate
    saved: Estimate
    """Time in sequence minus overlapped, median of the rounds; may be negative."""
    chunking: Chunking | None = None
    """What splitting the GEMMs changed; None if they are whole."""

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
        if not saving:
            enough = f"beyond the noise and {WORTH:.0%} of the shorter of GEMMs and copies"
            return f"Overlap saves time at 0 of {len(rows)} sizes: nowhere {enough}."
        best = max(saving, key=lambda row: row.hidden_fraction)
        return (
            f"Overlap saves time at {len(saving)} of {len(rows)} sizes. Best: {best.size}, "
            f"{best.saved.time_us:,.1f} us saved (noise {best.saved.noise_us:.1f}), {best.hidden_fraction:.0%} of the "
            "shorter of GEMMs and copies."
        )

    @property
    def on_chunks(self) -> list[str]:
        """Returns sentences on whether it pays to split the GEMMs; none if no point does."""
        split = [(row.chunking, row.size) for row in self.rows if row.chunking and not row.launch_bound]
        if not split:
            return []
        paying = [one for one in split if one[0].gain.faster]
        best, size = max(paying or split, key=lambda one: one[0].gain.share)
        which = "Best" if paying else "Closest"
        return [f"Splitting GEMMs pays at {len(paying)} of {len(split)} sizes. {which}: {size}, {best.in_words}."]

    @property
    def card(self) -> Card:
        """Returns whether overlapping copies with GEMMs pays, at a glance."""
        saving = [row for row in self.rows if row.saves]
        if not saving:
            known = any(not row.launch_bound for row in self.rows)
            headline = f"Overlap saves less than {WORTH:.0%}, or nothing beyond the noise" if known else "No answer"
            return Card(self.title, headline, [self.answer, *self.on_chunks])
        shares = sorted(row.hidden_fraction for row in saving)
        ends = " to ".join(f"{share:.0%}" for share in (shares if len(shares) == 1 else (shares[0], shares[-1])))
        headline = f"Overlap saves {ends} of the shorter of GEMMs and copies"
        return Card(self.title, headline, [self.answer, *self.on_chunks])

    @property
    def cautions(self) -> list[str]:
        """Returns the caveats of the answer, a sentence each."""
        points = [row.point for row in self.rows]
        return [
            *launch_bound_caution([(row.size, row.launch_bound) for row in self.rows]),
            *slowed_gpus(points),
            *recorded_warnings(points),
            *different_environments(points),
        ]


def analyse_copies(points: Iterable[Point]) -> list[CopyAnalysis]:
    """Returns an analysis of the `ok` copy points for each direction and device."""
    cases = group_points(points, "copy_engine", lambda point: (options_of(point).direction, point.case.device))
    return [CopyAnalysis(*case, sorted(map(copy_row, cases[case]), key=_order)) for case in sorted(cases)]


def options_of(point: Point) -> CopyEngine:
    """Returns the options of a point with a result."""
    return point.config_as(Resolved).copy_engine


def _order(row: CopyRow) -> tuple[float, ...]:
    asked = options_of(row.point)
    return asked.matrix_size, asked.copy_mb, asked.gemms, asked.copies, asked.chunks or 1, asked.device


def copy_row(point: Point) -> CopyRow:
    """Returns the row of an `ok` point."""
    options, measured = options_of(point), point.measured_as(CopyTimes)
    times = {name: estimate(timing.samples_us) for name, timing in measured.times.items()}
    between = TYPICAL_SCATTER[point.config.runtime.device]

    def less(name: str, than: str) -> Estimate:
        """Returns the median of the rounds of how much less time the variant takes."""
        rounds = zip(measured.times[than].samples_us, measured.times[name].samples_us, strict=True)
        return estimate([more_us - us for more_us, us in rounds]).with_error(between * times[than].time_us)

    chunks, chunking = options.chunks, None
    if chunks:
        saved, whole_us = less("chunked_overlapped", than="overlapped"), times["overlapped"].time_us
        chunking = Chunking(
            chunks,
            gemm=times["chunked_gemm"],
            whole=times["overlapped"],
            cost=times["chunked_gemm"].time_us / times["gemm"].time_us - 1,
            gain=Gain(saved.time_us / whole_us, saved.noise_us / whole_us),
        )
    in_chunks = f" in {chunks} chunks" if chunks else ""
    on_gpu = f" on GPU {options.device}" if options.device else ""
    copies = f"{options.copies} x {options.copy_mb:g} MiB{on_gpu}"
    return CopyRow(
        point,
        size=f"{options.gemms} GEMMs of {options.matrix_size}{in_chunks}, {copies}",
        launch_bound=any(measured.launch_bound.values()),
        gemm=times["gemm"],
        copy=times["copy"],
        none=times["sequential"],
        overlapped=times[measured.asked],
        saved=less(measured.asked, than="sequential"),
        chunking=chunking,
    )
