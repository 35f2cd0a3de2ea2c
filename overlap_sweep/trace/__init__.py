"""Reads profiler traces. This module: the rows of a trace, their medians and parts, and start-up iterations."""

import math
from collections.abc import Iterable, Sequence
from statistics import median, median_low
from typing import Literal

import msgspec

NOTABLE, NOTABLE_BESIDE_ONE = 1.1, 1.5
"""A first iteration is start-up only if it exceeds this times the longest of the others; the second, with a single
other iteration, where the variation is unknown."""

MOST_RANKS = 1 << 20
"""More than any run has; a trace with a higher rank is damaged."""

Grouping = Literal["class", "kernel", "stream"]


class Overlap(msgspec.Struct, kw_only=True):
    """Times in microseconds, exact to the nanosecond. They are unions: kernels that run at the same time count once."""

    span_us: float
    """Of a pass from its first start to its last end; of an iteration until the next one starts."""
    gemm_us: float
    comm_us: float
    wait_us: float
    """Time spent waiting for other ranks without moving data."""
    overlap_us: float
    """Time in which GEMM and communication run at the same time."""
    exposed_comm_us: float
    """Communication while nothing computes, not even for another iteration; copies and waits are not computation."""
    idle_us: float
    """Part of the span in which nothing runs, not even waits, copies or what belongs to another iteration."""
    overlap_ratio: float | None
    """overlap / min(GEMM, communication); None without GEMMs or without communication."""
    num_gemm_events: int
    num_comm_events: int
    num_wait_events: int
    num_compute_events: int
    """Kernels, or outermost operators on the CPU, that compute something other than a GEMM."""


class TraceRow(Overlap):
    """One iteration and phase of one trace."""

    file: str
    rank: int | None
    """None if the trace does not record it."""
    iteration: int
    """N of ProfilerStep#N; counted from 0 in a trace without such steps."""
    phase: str
    """`fwd`; `bwd`; `recompute`, the part of `bwd` in which checkpoints run forward again; or `all` for the whole
    iteration, optimizer included."""
    pause_us: float = 0.0
    """Part of idle_us at the end: of an iteration, until the next one starts. The last one has none."""

    @property
    def active_us(self) -> float:
        """Returns the time from the first start to the last end."""
        return self.span_us - self.pause_us


class PhaseSummary(Overlap):
    """One phase of one trace: the median of every quantity over the iterations (lower median of counts), and the ratio
    of these medians."""

    file: str
    rank: int | None
    phase: str
    iterations: int
    """Number of iterations that have the phase."""


def summarise(rows: Iterable[TraceRow]) -> list[PhaseSummary]:
    """Returns medians over the iterations of one file's rows, one summary per phase."""
    phases: dict[str, list[TraceRow]] = {}
    for row in rows:
        phases.setdefault(row.phase, []).append(row)
    quantities = [name for name in Overlap.__struct_fields__ if name != "overlap_ratio"]
    summaries = []
    for phase, members in phases.items():
        medians = {name: _median([getattr(row, name) for row in members]) for name in quantities}
        shorter_us = min(medians["gemm_us"], medians["comm_us"])
        ratio = medians["overlap_us"] / shorter_us if shorter_us else None
        own = {"file": members[0].file, "rank": members[0].rank, "phase": phase, "iterations": len(members)}
        summaries.append(msgspec.convert({**own, **medians, "overlap_ratio": ratio}, PhaseSummary))
    return summaries


def _median(values: list[float]) -> float:
    # The mean of two floats may end in digits that neither of them has.
    return median_low(values) if isinstance(values[0], int) else round(median(values), 9)


def smallest_period(values: Sequence[object]) -> int:
    """Returns the smallest p with values[i] == values[i - p] for all i; their number if they do not repeat.

    By the failure function of Knuth, Morris and Pratt.
    """
    border = [0] * len(values)
    for i in range(1, len(values)):
        length = border[i - 1]
        while length and values[i] != values[length]:
            length = border[length - 1]
        border[i] = length + (values[i] == values[length])
    return len(values) - border[-1]


def startup_iterations(rows: Iterable[TraceRow]) -> list[int]:
    """Returns the first iterations of a trace that are clearly slower than the later ones; at most half of all.

    Clearly slower: longer than the longest later one by more than the spread of the later ones. Later iterations with
    fewer GEMMs, such as the last one of a truncated trace, are not compared.
    """
    whole = sorted((row for row in rows if row.phase == "all"), key=lambda row: row.iteration)
    found: list[int] = []
    for number, row in enumerate(whole[: len(whole) // 2]):
        others = [other.active_us for other in whole[number + 1 :] if other.num_gemm_events >= row.num_gemm_events]
        longest = max(others, default=math.inf)
        least_us = NOTABLE_BESIDE_ONE * longest
        if len(others) > 1:
            least_us = max(NOTABLE * longest, longest + (longest - min(others)))
        if row.active_us <= least_us:
            break
        found.append(row.iteration)
    return found


def startup_sentence(name: str, rows: Iterable[TraceRow], iterations: Sequence[int]) -> str:
    """Returns a sentence on the start-up `iterations`, at least one, of the named trace or point."""
    times = [(row.active_us, row.iteration in iterations) for row in rows if row.phase == "all"]
    longest, usual = (max(active_us for active_us, startup in times if startup is kind) for kind in (True, False))
    numbers = f"iteration{'s' if len(iterations) > 1 else ''} {', '.join(map(str, iterations))}"
    return (
        f"{name}: start-up {numbers} left out of medians and choices: up to {longest:,.1f} us, later iterations at "
        f"most {usual:,.1f} us."
    )


class PartRow(msgspec.Struct, kw_only=True):
    """A part of one iteration and phase of one trace."""

    file: str
    rank: int | None
    iteration: int
    phase: str
    by: Grouping
    kind: str
    """gemm, comm, wait, compute or memory; for a stream all its classes, joined by `+`."""
    library: str
    """Library of the kernels; for a stream all its libraries, joined by `+`."""
    name: str
    """Kernel: its name in the trace; stream: its process and number; class: its kind and library."""
    num_events: int
    busy_us: float
    """Length of the union of its spans: kernels that run at the same time count once."""
    total_us: float
    """Sum of its spans."""
    alone_us: float
    """Part of busy_us in which no other part of this grouping runs."""
