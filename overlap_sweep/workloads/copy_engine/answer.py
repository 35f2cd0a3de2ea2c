"""GEMMs beside copies: what a copy engine can hide, by direction and size."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.points import Point
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
        """Returns where the copies go, such as `device_to_host`."""
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
    def saving_share(self) -> float:
        """Returns the saving as a share of the time one after the other."""
        return self.saving.time_us / self.sequential.time_us

    @property
    def ideal_us(self) -> float:
        """Returns what hiding the shorter of the two wholly would save."""
        return min(self.gemm.time_us, self.copy.time_us)

    @property
    def hidden_fraction(self) -> float:
        """The share of the ideal that is saved."""
        return self.saving.time_us / self.ideal_us

    @property
    def slowdown(self) -> float:
        """Returns by how much the two at once take longer than the longer of them alone."""
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
    def note(self) -> str:
        """Returns what tells it from the others."""
        if self.launch_bound:
            return "launch-bound"
        if self.saves:
            return "hides all" if self.hidden_fraction > 0.95 else ""
        if self.slower:
            return "slower"
        return "cannot tell" if self.unclear else "hides nothing"

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
        """Returns the rows whose times say something about the device."""
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
            said = f"at best {best.saving.time_us:+.1f} us, noise {best.saving.noise_us:.1f}; {best.size}"
            if all(row.slower for row in rows):
                return f"{self.direction}: at once is slower than one after the other ({said})"
            unclear = sum(row.unclear for row in rows)
            if unclear == len(rows):
                return f"{self.direction}: cannot tell whether copies hide behind a GEMM ({said})"
            but = f"; {unclear} of {len(rows)} sizes cannot tell" if unclear else ""
            return f"{self.direction}: copies hide behind no GEMM ({said}){but}"
        best = max(saving, key=lambda row: row.hidden_fraction)
        typical = statistics.median(row.hidden_fraction for row in rows)
        where = f" at {len(saving)} of {len(rows)} sizes" if len(rows) > 1 else ""
        share = f"{best.saving_share:.0%} of one after the other"
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
