"""Reading profiler traces. Here: the rows of one, their medians and parts, and which are start-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median, median_low
from typing import Any, Literal

import msgspec

NOTABLE = 1.1
"""A first iteration that takes no longer than this times the longest of the others is one of them."""

NOTABLE_BESIDE_ONE = 1.5
"""The same where only one other is there: by how much iterations vary is then unknown."""

Grouping = Literal["class", "kernel", "stream"]


class Overlap(msgspec.Struct, kw_only=True):
    """Times are unions: two kernels side by side count once. Microseconds, exact to the nanosecond."""

    span_us: float
    """From the first start to the last end."""
    gemm_us: float
    comm_us: float
    wait_us: float
    """Waiting for other ranks without moving data."""
    overlap_us: float
    """GEMM and communication at once."""
    exposed_comm_us: float
    """Communication with no computation beside it; copies and waits are none."""
    idle_us: float
    """The part of the span in which nothing runs, neither waits nor copies."""
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
    """None when the trace doesn't say."""
    iteration: int
    """N of the trace's ProfilerStep#N; counted from 0 in a trace without."""
    phase: str
    """`fwd`; `bwd`; `recompute`, the part of `bwd` in which checkpoints run forward again; or `all` for the whole
    iteration, optimizer included."""


class PhaseSummary(Overlap):
    """One phase of one trace: of every quantity the median over the iterations (of the counts the lower median), and
    the ratio of these."""

    file: str
    rank: int | None
    phase: str
    iterations: int
    """How many iterations have the phase."""


def summarise(rows: Iterable[TraceRow]) -> list[PhaseSummary]:
    """Returns medians over the iterations of one file's rows, one summary per phase."""
    phases: dict[str, list[TraceRow]] = {}
    for row in rows:
        phases.setdefault(row.phase, []).append(row)
    summaries = []
    for phase, members in phases.items():
        quantities = [name for name in Overlap.__struct_fields__ if name != "overlap_ratio"]
        medians = {name: _median([getattr(row, name) for row in members]) for name in quantities}
        shorter_us = min(medians["gemm_us"], medians["comm_us"])
        medians["overlap_ratio"] = medians["overlap_us"] / shorter_us if shorter_us else None
        summaries.append(PhaseSummary(members[0].file, members[0].rank, phase, len(members), **medians))
    return summaries


def _median(values: list[Any]) -> Any:
    # The mean of two floats may end in digits that neither of them has.
    return median_low(values) if isinstance(values[0], int) else round(median(values), 9)


def startup_iterations(rows: Iterable[TraceRow]) -> list[int]:
    """Returns the first iterations of a trace that take longer than the later ones vary by; never more than half.

    That is: longer than the longest of the later ones by more than what these lie apart. A later one that has fewer
    GEMMs, such as the last of a trace that breaks off, says nothing about an earlier one.
    """
    whole = sorted((row for row in rows if row.phase == "all"), key=lambda row: row.iteration)
    found: list[int] = []
    for number, row in enumerate(whole[: len(whole) // 2]):
        others = [other.span_us for other in whole[number + 1 :] if other.num_gemm_events >= row.num_gemm_events]
        if not others or not _stands_out(row.span_us, others):
            break
        found.append(row.iteration)
    return found


def _stands_out(span_us: float, others_us: Sequence[float]) -> bool:
    longest, shortest = max(others_us), min(others_us)
    if len(others_us) == 1:
        return span_us > NOTABLE_BESIDE_ONE * longest
    return span_us > max(NOTABLE * longest, longest + (longest - shortest))


def in_words(name: str, rows: Iterable[TraceRow], iterations: Sequence[int]) -> str:
    """Returns a sentence about the start-up `iterations`, at least one, of the trace or point of that name."""
    spans = [(row.span_us, row.iteration in iterations) for row in rows if row.phase == "all"]
    longest, usual = (max(span_us for span_us, startup in spans if startup is which) for which in (True, False))
    which = f"iteration{'s' if len(iterations) > 1 else ''} {', '.join(map(str, iterations))}"
    return (
        f"{name}: {which} took up to {longest:,.1f} us, the later ones at most {usual:,.1f}: start-up, left out of "
        "medians and of what is chosen by them."
    )


class PartRow(msgspec.Struct, kw_only=True):
    """A part of one iteration and phase of one trace. Microseconds, exact to the nanosecond."""

    file: str
    rank: int | None
    iteration: int
    phase: str
    by: Grouping
    kind: str
    """gemm, comm, wait, compute or memory; of a stream all that it has, joined by `+`."""
    library: str
    """Whose kernels; of a stream all of them, joined by `+`."""
    name: str
    """Of a kernel as it is in the trace; of a stream its process and number; of a class its kind and library."""
    num_events: int
    busy_us: float
    """The union of its spans: what runs twice at a time counts once."""
    total_us: float
    """The sum of its spans."""
    alone_us: float
    """The part of busy in which no other part of this grouping runs."""
