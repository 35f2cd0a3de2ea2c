"""What copies beside GEMMs save, by direction and size: rows, the best, whether splitting the GEMMs pays, and the
report on that."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan, nan
from typing import Any

from overlap_sweep.report import charts
from overlap_sweep.report.comparison import Comparing
from overlap_sweep.report.numbers import as_percent, as_rate, as_us
from overlap_sweep.report.section import Answer, Card, Exhibit, Section, Sources
from overlap_sweep.report.table import (
    DEVICE,
    PRECISION,
    Column,
    Listing,
    PointRow,
    Table,
    asked,
    attribute,
    points_table,
)
from overlap_sweep.results.comparable import WHOLE, Comparable, Sample, key_of_pass, pooled_by_key
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.points import Point, group_points
from overlap_sweep.results.provenance import different_environments, recorded, recorded_warnings, slowed_gpus
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import TYPICAL_SCATTER
from overlap_sweep.study.exhibits import first_bars
from overlap_sweep.study.section import LAUNCH_BOUND_NOTE
from overlap_sweep.study.words import launch_bound_caution
from overlap_sweep.workloads.copy_engine.config import CopyEngine, Resolved
from overlap_sweep.workloads.copy_engine.result import CopyTimes

WORTH = 0.05
"""Smallest share of the possible saving that counts as one."""
_UNKNOWN = Gain(nan, nan)


@dataclass(frozen=True)
class CopyRow:
    """One point. Times are those of one iteration: all its GEMMs and copies."""

    point: Point
    size: str
    """Sizes in words: `4 GEMMs of 4096, 4 x 64 MiB`, or `4 GEMMs of 4096 in 8 chunks, 4 x 64 MiB`."""
    launch_bound: bool
    times: Mapping[str, Estimate]
    overlapped: Estimate
    saved: Estimate
    """Time in sequence minus overlapped, median of the rounds; may be negative."""
    chunk_cost: float = nan
    """Change of the time of the GEMMs alone by chunks, as a fraction; NaN, as what follows, if they are whole."""
    chunk_gain: Gain = _UNKNOWN
    """Gain of chunks over whole GEMMs overlapped with the copies, median of the rounds."""
    whole_us: float = nan
    """Time of whole GEMMs overlapped with the copies."""

    @property
    def hidden_fraction(self) -> float:
        """Returns the time saved as a share of the shorter of GEMMs and copies."""
        return self.saved.time_us / min(self.times["gemm"].time_us, self.times["copy"].time_us)

    @property
    def saves(self) -> bool:
        """Returns whether overlap saves time: beyond the noise, enough to matter, and not launch-bound."""
        return not self.launch_bound and self.hidden_fraction >= WORTH and self.saved.time_us > self.saved.noise_us


@dataclass(frozen=True)
class CopyAnalysis:
    """Copies of all sizes in one direction on one device."""

    direction: str
    device: str
    rows: list[CopyRow]

    @property
    def headline(self) -> str:
        shares = sorted(row.hidden_fraction for row in self.rows if row.saves)
        if shares:
            ends = " to ".join(f"{share:.0%}" for share in dict.fromkeys((shares[0], shares[-1])))
            return f"Overlap saves {ends} of the shorter of GEMMs and copies"
        known = any(not row.launch_bound for row in self.rows)
        return f"Overlap saves less than {WORTH:.0%}, or nothing beyond the noise" if known else "No answer"

    @property
    def sentences(self) -> list[str]:
        """Returns where overlap saves most, and whether it pays to split the GEMMs if some point does."""
        rows = [row for row in self.rows if not row.launch_bound]
        if not rows:
            return ["No answer: all points are launch-bound."]
        saving = [row for row in rows if row.saves]
        found = f"Overlap saves time at {len(saving)} of {len(rows)} sizes"
        if saving:
            best = max(saving, key=lambda row: row.hidden_fraction)
            found += (
                f". Best: {best.size}, {best.saved.time_us:,.1f} us saved (noise {best.saved.noise_us:.1f}), "
                f"{best.hidden_fraction:.0%} of the shorter of GEMMs and copies."
            )
        else:
            found += f": nowhere beyond the noise and {WORTH:.0%} of the shorter of GEMMs and copies."
        split = [row for row in rows if not isnan(row.chunk_cost)]
        if not split:
            return [found]
        paying = [row for row in split if row.chunk_gain.faster]
        best = max(paying or split, key=lambda row: row.chunk_gain.share)
        alone = f"{abs(best.chunk_cost):.1%} {'more' if best.chunk_cost > 0 else 'less'}"
        return [
            found,
            f"Splitting GEMMs pays at {len(paying)} of {len(split)} sizes. {'Best' if paying else 'Closest'}: "
            f"{best.size}, with the copies {best.chunk_gain.in_words('whole')}, alone they take {alone} time.",
        ]


def analyse_copies(points: Iterable[Point]) -> list[CopyAnalysis]:
    """Returns an analysis of the `ok` copy points for each direction and device."""

    def size(row: CopyRow) -> tuple[float, ...]:
        own = _options(row.point)
        return own.matrix_size, own.copy_mb, own.gemms, own.copies, own.chunks or 1, own.device

    cases = group_points(points, "copy_engine", lambda point: (_options(point).direction, point.case.device))
    return [CopyAnalysis(*case, sorted(map(copy_row, cases[case]), key=size)) for case in sorted(cases)]


def _options(point: Point) -> CopyEngine:
    return point.config_as(Resolved).copy_engine


def copy_row(point: Point) -> CopyRow:
    """Returns the row of an `ok` point."""
    options, measured = _options(point), point.measured_as(CopyTimes)
    times = {name: estimate(timing.samples_us) for name, timing in measured.times.items()}
    between = TYPICAL_SCATTER[point.config.runtime.device]

    def less(name: str, than: str) -> Estimate:
        """Returns the median of the rounds of how much less time the variant takes."""
        rounds = zip(measured.times[than].samples_us, measured.times[name].samples_us, strict=True)
        return estimate([more_us - us for more_us, us in rounds]).with_error(between * times[than].time_us)

    in_chunks = f" in {options.chunks} chunks" if options.chunks else ""
    on_gpu = f" on GPU {options.device}" if options.device else ""
    copies = f"{options.copies} x {options.copy_mb:g} MiB{on_gpu}"
    row = CopyRow(
        point,
        size=f"{options.gemms} GEMMs of {options.matrix_size}{in_chunks}, {copies}",
        launch_bound=any(measured.launch_bound.values()),
        times=times,
        overlapped=times[measured.asked],
        saved=less(measured.asked, than="sequential"),
    )
    if not options.chunks:
        return row
    saved, whole_us = less("chunked_overlapped", than="overlapped"), times["overlapped"].time_us
    cost, gain = times["chunked_gemm"].time_us / times["gemm"].time_us - 1, saved.relative_to(whole_us)
    return replace(row, chunk_cost=cost, chunk_gain=Gain(gain.time_us, gain.noise_us), whole_us=whole_us)


C = Column[CopyRow]


def _asked(name: str, option: str = "", **more: Any) -> Column[PointRow[CopyRow]]:
    return asked(name, "copy_engine", option or name, **more)


def _time(name: str, about: str, variant: str, header: str = "") -> C:
    return C(f"{name}_us", lambda row: row.times[variant].time_us, about, header=header or f"{name} us")


def _own(name: str, about: str = "", **more: Any) -> C:
    """Returns the column of an attribute, with its name as header."""
    return attribute(name, about, header=name.replace("_", " "), **more)


def _rate(name: str, about: str, amount: str, variant: str, header: str) -> C:
    """Returns the column of `amount` per time of a variant; `overlapped` may be in chunks."""

    def rate(row: CopyRow) -> float:
        total: int = getattr(row.point.measured_as(CopyTimes), amount)
        time = row.overlapped if variant == "overlapped" else row.times[variant]
        return total / time.time_us / (1e6 if amount == "flops" else 1e3)

    return C(name, rate, about, header=header, show=as_rate, dropped=1, high_first=True)


ASKED = (
    _asked("gpu", "device", about="Number of the GPU, among the visible ones.", kind="count"),
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
    _asked(
        "chunks",
        kind="count",
        header="chunks",
        about="Number of smaller GEMMs that each GEMM is split into; empty if it is whole.",
    ),
)
MEASURED = (
    _time("gemm", "Time of all GEMMs of an iteration, alone.", "gemm", "GEMM us"),
    _time("copy", "Time of all copies of an iteration, alone.", "copy"),
    _time("none", "Time of GEMMs and copies in sequence, with no overlap.", "sequential"),
    _own(
        "time_us",
        "Time of GEMMs (in their chunks) and copies overlapped, on two streams: median of the repeats.",
        read="overlapped.time_us",
    ),
    _own("noise_us", read="overlapped.noise_us", dropped=2),
    C("speedup", lambda row: row.times["sequential"].time_us / row.overlapped.time_us),
    _own(
        "saved_us",
        "Time saved by overlap: none_us - time_us, median of the rounds.",
        read="saved.time_us",
        high_first=True,
    ),
    _own("saved_noise_us", "Half-width of the 95 % confidence interval of saved_us.", read="saved.noise_us", dropped=2),
    attribute(
        "hidden_fraction",
        "saved_us over the shorter of gemm_us and copy_us, the most that overlap can save.",
        header="hidden",
        show=as_percent,
        high_first=True,
    ),
    _own("chunk_cost", "Additional time of all GEMMs alone when they are split, as a fraction.", show="{:+.1%}".format),
    _own("whole_us", "Time of GEMMs and copies overlapped, with whole GEMMs.", dropped=2),
    _own(
        "chunk_gain",
        "Time that chunks save when GEMMs and copies overlap, as a fraction of whole_us; median of the rounds.",
        read="chunk_gain.share",
        show="{:+.1%}".format,
    ),
    _own(
        "chunk_gain_noise",
        "Half-width of the 95 % confidence interval of chunk_gain.",
        read="chunk_gain.noise",
        show="{:.1%}".format,
        dropped=2,
    ),
    _rate("tflops_alone", "Rate of the GEMMs alone.", "flops", "gemm", "TFLOP/s"),
    _rate("tflops_overlapped", "Operations of the GEMMs over time_us.", "flops", "overlapped", "TFLOP/s overlapped"),
    _rate("gb_per_s_alone", "Rate of the copies alone.", "bytes_copied", "copy", "GB/s"),
    _rate("gb_per_s_overlapped", "Bytes copied over time_us.", "bytes_copied", "overlapped", "GB/s overlapped"),
    attribute("launch_bound", kind="flag"),
    LAUNCH_BOUND_NOTE,
)
TABLE = points_table("copies", "one row per point", (DEVICE, *ASKED), MEASURED)
SIZES = Table("copies", "one row per size", (attribute("", kind="text", read="size", header="size"), *MEASURED))
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
    answers = list(map(_answer, analyses))
    row_of = {row.point.directory: row for analysis in analyses for row in analysis.rows}
    rows = [PointRow(point, root, row_of.get(point.directory)) for point in points]
    return Section(
        name="copies",
        what="copies",
        title="GEMMs and copies",
        explained=LEGEND,
        answers=answers,
        points=Listing(TABLE, rows, "Every point of GEMMs and copies."),
        report={
            "copies": [
                {
                    "direction": analysis.direction,
                    "device": analysis.device,
                    **recorded(answer.points),
                    "answer": " ".join(answer.sentences),
                    "warnings": answer.cautions,
                }
                for analysis, answer in zip(analyses, answers, strict=True)
            ],
            "copy_points": TABLE.records(rows),
        },
        topic="GEMMs and copies",
    )


def _answer(analysis: CopyAnalysis) -> Answer:
    brief, points = f"{analysis.direction} on {analysis.device}", [row.point for row in analysis.rows]
    title, sentences = f"GEMMs and copies, {brief}", analysis.sentences
    in_chunks = " In chunks: GEMM, none and whole are of GEMMs that are not split."
    return Answer(
        title=title,
        sentences=sentences,
        card=Card(title, analysis.headline, sentences),
        cautions=[
            *launch_bound_caution([(row.size, row.launch_bound) for row in analysis.rows]),
            *slowed_gpus(points),
            *recorded_warnings(points),
            *different_environments(points),
        ],
        compared=Listing(SIZES, analysis.rows, "Every size, by GEMM size.", chosen=lambda row: row.saves),
        points=points,
        brief=brief,
        legend=LEGEND + in_chunks * (len(sentences) > 1),
        charts=[Exhibit(chart=partial(copies_bars, analysis), name=analysis.direction)],
    )


def copies_bars(analysis: CopyAnalysis) -> charts.Rows:
    """Returns, by size, how much of the shorter of GEMMs and copies is hidden behind the longer, as a share of the
    sequential time, since sizes differ by magnitudes."""
    shown = {column.header for column in Listing(SIZES, analysis.rows).columns}
    first, more = first_bars(analysis.rows)
    rows = []
    for row in first:
        gemm, copy, none = (row.times[name].time_us for name in ("gemm", "copy", "sequential"))
        scale, time_us, noise_us = 100 / none, row.overlapped.time_us, row.overlapped.noise_us
        bar = charts.Row(
            name=row.size,
            ends=[end * scale for end in charts.cut(max(gemm, copy), time_us, none)],
            low=max(0.0, time_us - noise_us) * scale,
            high=(time_us + noise_us) * scale,
            cells=[as_us(time_us), as_percent(row.hidden_fraction)],
            bold=row.saves,
            details={header: text for header, text in SIZES.details(row).items() if header in shown},
        )
        rows.append(bar)
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
        rows=rows,
    )


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns the times that are not launch-bound, pooled over all points of the same direction and size."""
    found = []
    for point in points:
        if point.workload == "copy_engine" and point.status == "ok":
            copies, row = point.measured_as(CopyTimes), copy_row(point)
            operator = f"{_options(point).direction}, {row.size}"
            key = key_of_pass(point.case, 1, operator, WHOLE)._replace(model=None, tokens=None, process_wide="")
            trusted = {name: time for name, time in copies.times.items() if not copies.launch_bound.get(name)}
            found.append((key, point, trusted))
    return Comparable(pooled_by_key(found, TYPICAL_SCATTER))


def _samples(result: Result) -> dict[str, Sample]:
    """Returns the sample of the overlapped GEMMs and copies; empty if the point is launch-bound."""
    copies = result.measured_as(CopyTimes)
    # The rows of the matrices are not tokens of a model.
    sample = Sample((copies.times[copies.asked],), copies.times["sequential"].median_us, WHOLE, tokens=None)
    return {} if result.launch_bound else {"overlapped": sample}


COMPARING = Comparing(measured, _samples, matched=("copy_engine",))
