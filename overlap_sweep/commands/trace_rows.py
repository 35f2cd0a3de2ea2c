"""The tables of `analyze.py trace` and their rows: phases, parts of phases, and runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

from overlap_sweep.report.numbers import shortened
from overlap_sweep.report.table import Row, Table, item

if TYPE_CHECKING:
    from overlap_sweep.trace.files import TraceFile

PARTS_BY = ("class", "kernel", "stream")
PART_TIMES = ("busy_us", "total_us", "alone_us")
LONGEST_NAME = 56
"""Most characters of a kernel's name in a table."""


_count, _text = partial(item, kind="count"), partial(item, kind="text")


def _short(name: str) -> str:
    """Returns a kernel's function name, shortened for a table."""
    from overlap_sweep.trace.kernel_classes import function_name

    return shortened(function_name(name) or name, LONGEST_NAME)


FILE, RANK = (
    _text("file"),
    _count("rank", "rank", "Rank that recorded the trace, from the trace or else from its name."),
)
ITERATION = _count("iteration", "iteration")
PHASE = _text(
    "phase",
    "phase",
    "fwd, bwd, recompute (part of bwd: checkpointed layers run forward again), or all (the whole iteration).",
)
STARTUP = item("startup", kind="flag")
LEFT_OUT = _count("startup_iterations")
OF_MEDIANS = {
    "iteration": _count("iterations", "iterations"),
    "startup": LEFT_OUT,
}
"""Columns of the tables of medians, by the column that they replace."""
EXPOSED = item(
    "exposed_comm_us",
    "exposed us",
    "Time in which communication runs while nothing computes, also for no other phase or iteration.",
)
WAITING = item("wait_us", "wait us")
RATIO = item("overlap_ratio", "ratio", "overlap_us / min(gemm_us, comm_us).", show="{:.2f}".format)

PHASES: Table[Row] = Table(
    "phases",
    "one row per iteration and phase",
    (
        FILE,
        RANK,
        ITERATION,
        PHASE,
        item(
            "span_us",
            "span us",
            "Time from the start of the first kernel to the end of the last; of all until the next iteration starts.",
        ),
        item("gemm_us", "GEMM us"),
        item("comm_us", "comm us"),
        WAITING,
        item("overlap_us", "overlap us"),
        EXPOSED,
        item("idle_us", "idle us", "Part of the span in which nothing runs, of no phase and iteration."),
        RATIO,
        _count("num_gemm_events", "GEMMs"),
        _count("num_comm_events", "comms"),
        _count("num_wait_events", "waits"),
        _count("num_compute_events", "others"),
        STARTUP,
    ),
)
PARTS: Table[Row] = Table(
    "parts",
    "one row per iteration, phase and part",
    (
        FILE,
        RANK,
        ITERATION,
        PHASE,
        _text("by"),
        _text(
            "kind", "kind", "Class of the kernels: gemm, comm, wait, compute or memory; for a stream all its classes."
        ),
        _text("library", "library"),
        _text("name", "name", show=_short),
        _count("num_events", "events"),
        item("busy_us", "busy us"),
        item("total_us", "sum us"),
        item("alone_us", "alone us"),
        STARTUP,
    ),
)
RANKS: Table[Row] = Table(
    "runs",
    "one row per run and phase: medians",
    (
        _text("run"),
        *(PHASE, _count("num_ranks", "ranks"), _count("world_size"), _text("missing")),
        *(_count("slowest_rank", "slowest"), item("slowest_us", "span us")),
        *(_count("fastest_rank", "fastest"), item("fastest_us", "span us")),
        *(item("skew_us", "skew us"), EXPOSED, WAITING, RATIO, LEFT_OUT),
    ),
)
TABLES = {"of phases": PHASES, "with --by class, kernel or stream": PARTS, "with --by rank": RANKS}


def of_medians(table: Table[Row]) -> Table[Row]:
    """Returns the table of medians: the number of iterations replaces iteration, and startup_iterations replaces
    startup."""
    return replace(table, columns=tuple(OF_MEDIANS.get(column.name, column) for column in table.columns))


def rows_of(
    files: Sequence[TraceFile], by: str, phases: Sequence[str] = (), top: int | None = None, *, medians: bool
) -> list[Row]:
    """Returns the rows of all files: phases, or parts if `by` is one of PARTS_BY."""
    if by not in PARTS_BY:
        rows_of_file = median_rows if medians else phase_rows
        return [row for file in files for row in rows_of_file(file, phases)]
    parts_of_file = median_part_rows if medians else part_rows
    return [row for file in files for row in parts_of_file(file, by, phases, top)]


def phase_rows(file: TraceFile, phases: Sequence[str] = ()) -> list[Row]:
    """Returns one row per iteration and phase; all phases unless some are given."""
    return _rows(file, file.rows, phases)


def median_rows(file: TraceFile, phases: Sequence[str] = ()) -> list[Row]:
    """Returns one row of medians per phase."""
    from overlap_sweep.trace import summarise

    return _rows(file, summarise(file.steady_rows), phases)


def part_rows(file: TraceFile, by: str, phases: Sequence[str] = (), top: int | None = None) -> list[Row]:
    """Returns one row per iteration, phase and part, sorted by busy time."""
    rows = _rows(file, [part for part in file.parts if part.by == by], phases)
    return [row for _, same in groupby(rows, key=itemgetter("iteration", "phase")) for row in list(same)[:top]]


def median_part_rows(file: TraceFile, by: str, phases: Sequence[str] = (), top: int | None = None) -> list[Row]:
    """Returns one row of medians per phase and part, sorted by busy time.

    Medians are over all iterations that have the phase, without start-up: an iteration that lacks the part counts 0.
    `iterations` is the number of iterations that have the part.
    """
    members: dict[tuple[str, ...], list[Row]] = {}
    for row in part_rows(file, by, phases):
        if not row["startup"]:
            members.setdefault((row["phase"], row["kind"], row["library"], row["name"]), []).append(row)
    iterations = Counter(row.phase for row in file.steady_rows)
    rows = []
    for (phase, *_), same in members.items():
        absent = [0] * (iterations[phase] - len(same))
        # A median may be half a nanosecond; further digits are rounding errors.
        times = {name: round(median([*map(itemgetter(name), same), *absent]), 4) for name in PART_TIMES}
        num_events = median_low([*map(itemgetter("num_events"), same), *absent])
        rows.append({**same[0], "iterations": len(same), "num_events": num_events, **times})
    rows.sort(key=lambda row: -row["busy_us"])
    return [row for phase in iterations for row in [row for row in rows if row["phase"] == phase][:top]]


def _rows(file: TraceFile, rows: Iterable[Any], phases: Sequence[str]) -> list[Row]:
    from msgspec.structs import asdict

    from overlap_sweep.trace.files import rank_of

    # If a trace does not record its rank, the file's name may have it.
    common = {"rank": rank_of(file), "startup_iterations": len(file.startup)}
    found = [{**asdict(row), **common} for row in rows if not phases or row.phase in phases]
    return [{**row, "startup": row.get("iteration") in file.startup} for row in found]
