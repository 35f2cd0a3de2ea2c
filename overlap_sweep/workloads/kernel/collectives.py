"""Collectives beside a GEMM: what each moves with how many thread blocks, and what the GEMM loses to them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from statistics import median
from typing import NamedTuple

from overlap_sweep.overlap.models import COLLECTIVES, COMM_ONLY, GEMM_ONLY, SEQUENTIAL, bus_bytes
from overlap_sweep.report.numbers import as_rate
from overlap_sweep.report.section import Answer
from overlap_sweep.report.table import Column, Listing, Table, attribute
from overlap_sweep.results.estimate import estimate
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import different_environments, measured_on, recorded_warnings
from overlap_sweep.results.traces import on_nodes
from overlap_sweep.study.words import LAUNCH_BOUND
from overlap_sweep.workloads.kernel.answer import ImplementationRow
from overlap_sweep.workloads.kernel.config import Resolved
from overlap_sweep.workloads.kernel.result import ImplementationTimes, KernelTimes

as_change = "{:+.0%}".format

ENOUGH = 0.9
"""Share of the highest rate that is enough: more thread blocks move little more, and cost GEMMs more."""


SIZE_MB = attribute("size_mb", "Buffer of a collective alone, in MiB.", header="MiB", show="{:g}".format)
BESIDE = (
    attribute("beside_us", "Time of a collective alone while GEMMs run: median, slowest rank.", header="beside us"),
    attribute("comm_slowdown", "What a collective alone takes longer beside GEMMs.", header="slowed", show=as_change),
    attribute("gemm_slowdown", "What GEMMs take longer beside it.", header="GEMM slowed", show=as_change),
)


class CollectivesCase(NamedTuple):
    """Properties that must be equal for collectives to be compared."""

    m: int
    n: int
    k: int
    ranks: int
    precision: str
    device: str
    nodes: int

    @property
    def brief(self) -> str:
        gemm = f"{self.m}x{self.n}x{self.k}"
        return f"collectives beside a GEMM of {gemm} on {self.ranks} ranks, {self.precision}{on_nodes(self.nodes)}"


TABLE = Table(
    "collectives",
    "one row per collective, size and number of thread blocks",
    (
        attribute("collective", "Collective.", "text", header="collective"),
        SIZE_MB,
        Column("num_sm", lambda row: blocks_of(row), "Thread blocks of the collective.", "count", "SMs"),
        attribute("time_us", "Time of the collective alone: median, slowest rank.", header="alone us"),
        attribute("noise_us", read="estimate.noise_us", header="noise us", dropped=1),
        attribute("gb_per_s", "Bus bandwidth alone.", read="link_gb_per_s", header="GB/s", show=as_rate),
        *BESIDE,
    ),
)
LEGEND = (
    "alone and beside: of one call, alone and while the other runs all the time; GB/s: bus bandwidth as nccl-tests "
    "count it; slowed: beside / alone - 1, median of the rounds."
)


@dataclass(frozen=True)
class CollectivesAnalysis:
    case: CollectivesCase
    points: list[Point]
    rows: list[ImplementationRow]
    """By collective, size and thread blocks."""

    @property
    def sentences(self) -> list[str]:
        """Returns of each collective's largest size the fewest thread blocks that move nearly as much as any."""
        return [_in_words(largest_of(rows)) for rows in by_collective(self.rows).values()]


def analyse_collectives(points: Iterable[Point]) -> list[CollectivesAnalysis]:
    """Returns an analysis of the `ok` points of collectives for each case."""
    cases: dict[CollectivesCase, list[Point]] = defaultdict(list)
    for point in points:
        if point.status == "ok" and point.config_as(Resolved).kernel in COLLECTIVES:
            cases[_case(point)].append(point)
    return [CollectivesAnalysis(case, cases[case], collective_rows(cases[case])) for case in sorted(cases)]


def _case(point: Point) -> CollectivesCase:
    config, case = point.config_as(Resolved), point.case
    return CollectivesCase(config.m, config.n, config.k, config.tp_size, config.precision, case.device, case.nodes)


def collective_rows(points: Sequence[Point]) -> list[ImplementationRow]:
    """Returns the rows of `ok` points of one case, with repetitions pooled."""
    found: dict[tuple[int, float, int], list[tuple[Point, ImplementationTimes]]] = defaultdict(list)
    for point in points:
        config = point.config_as(Resolved)
        for name, times in point.measured_as(KernelTimes).implementations.items():
            if name != GEMM_ONLY:
                place = COLLECTIVES.index(config.kernel), config.size_mb or 0.0, int(str(times.setting["num_sm"]))
                found[place].append((point, times))
    return [_row(same) for _, same in sorted(found.items(), key=lambda item: item[0])]


def _row(same: Sequence[tuple[Point, ImplementationTimes]]) -> ImplementationRow:
    """Returns the row of a collective of one size with so many thread blocks: medians over the rounds of all points."""
    config, times = same[0][0].config_as(Resolved), same[0][1]
    assert config.size_mb
    alone, beside, gemm_beside = (
        [timing for _, one in same if (timing := getattr(one, name))] for name in ("time", "beside", "gemm_beside")
    )
    gemm = [point.measured_as(KernelTimes).implementations[GEMM_ONLY].time for point, _ in same]
    pooled = estimate(*(one.samples_us for one in alone))
    moved = bus_bytes(config.kernel, config.size_mb * 2**20, config.tp_size)
    return ImplementationRow(
        backend=config.backend,
        name=f"bulk_sm{times.setting['num_sm']}",
        m=config.m,
        points=tuple(point.name for point, _ in same),
        setting=times.setting,
        estimate=pooled,
        baselines_us={SEQUENTIAL: nan, GEMM_ONLY: _median(gemm), COMM_ONLY: pooled.time_us},
        bound_us=nan,
        tflops=nan,
        link_gb_per_s=moved / pooled.time_us / 1e3,
        hidden_fraction=nan,
        speedup=nan,
        over_bound=nan,
        relative_error=None,
        independent=True,
        launch_bound=all(one.launch_bound for _, one in same),
        wrong=False,
        collective=config.kernel,
        size_mb=config.size_mb,
        beside_us=_median(beside),
        comm_slowdown=_slowed(alone, beside),
        gemm_slowdown=_slowed(gemm, gemm_beside),
    )


def _median(timings: Iterable[Timing]) -> float:
    return median(us for one in timings for us in one.samples_us)


def _slowed(alone: Iterable[Timing], beside: Iterable[Timing]) -> float:
    pairs = zip(alone, beside, strict=True)
    rounds = (both for one, other in pairs for both in zip(one.samples_us, other.samples_us, strict=True))
    return median(beside_us / alone_us - 1 for alone_us, beside_us in rounds)


def by_collective(rows: Iterable[ImplementationRow]) -> dict[str, list[ImplementationRow]]:
    found: dict[str, list[ImplementationRow]] = defaultdict(list)
    for row in rows:
        found[row.collective].append(row)
    return found


def largest_of(rows: Sequence[ImplementationRow]) -> list[ImplementationRow]:
    """Returns those of the largest buffer."""
    most = max(row.size_mb for row in rows)
    return [row for row in rows if row.size_mb == most]


def blocks_of(row: ImplementationRow) -> int:
    return int(str(row.setting["num_sm"]))


def _in_words(rows: Sequence[ImplementationRow]) -> str:
    fastest = max(rows, key=lambda row: row.link_gb_per_s)
    enough = next(row for row in rows if row.link_gb_per_s >= ENOUGH * fastest.link_gb_per_s)
    words = f"{enough.collective} of {enough.size_mb:g} MiB: {_moves(enough)}"
    return f"{words}." if enough is fastest else f"{words}; {_moves(fastest)}."


def _moves(row: ImplementationRow) -> str:
    one, alone = blocks_of(row) == 1, row.link_gb_per_s
    moves = "1 CTA moves" if one else f"{blocks_of(row)} CTAs move"
    beside, slow = as_rate(alone * row.time_us / row.beside_us), "slows" if one else "slow"
    return f"{moves} {as_rate(alone)} GB/s alone, {beside} beside GEMMs, and {slow} them by {row.gemm_slowdown:.0%}"


def collectives_answer(analysis: CollectivesAnalysis, offers: Sequence[str]) -> Answer:
    """Returns the report on one case. `offers`: sentences on what it is of use for."""
    case = analysis.case
    bound = [f"{row.collective} {row.size_mb:g} MiB {blocks_of(row)}" for row in analysis.rows if row.launch_bound]
    return Answer(
        title=f"{case.brief} on {case.device}",
        brief=case.brief,
        sentences=[*analysis.sentences, *offers],
        cautions=[
            *([f"{LAUNCH_BOUND}: {', '.join(bound)}."] if bound else []),
            *recorded_warnings(analysis.points),
            *different_environments(analysis.points),
        ],
        compared=Listing(
            TABLE,
            analysis.rows,
            "Collectives alone and beside GEMMs, by thread blocks.",
            group=lambda row: (row.collective, row.size_mb),
        ),
        points=analysis.points,
        legend=LEGEND,
        details=[measured_on(analysis.points)],
    )
