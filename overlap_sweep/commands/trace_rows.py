"""The tables of `analyze.py trace`, of phases, their parts and runs: their rows, and how they are printed."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

from overlap_sweep.report.console import print_table
from overlap_sweep.report.table import Column, Row, Table

if TYPE_CHECKING:
    from rich.console import Console

    from overlap_sweep.trace.files import RunRanks, TraceFile

PART_TIMES = ("busy_us", "total_us", "alone_us")
MEDIAN = "median"
"""In the place of an iteration's number."""
LONGEST_NAME = 56
"""Characters of a kernel's name in a table."""


def _text(name: str, header: str = "", about: str = "") -> Column[Row]:
    return Column(name, itemgetter(name), about, "text", header)


def _count(name: str, header: str = "", about: str = "") -> Column[Row]:
    return Column(name, itemgetter(name), about, "count", header)


def _us(name: str, header: str = "", about: str = "") -> Column[Row]:
    return Column(name, itemgetter(name), about, header=header, show="{:,.1f}".format)


FILE, RANK = _text("file", about="The trace."), _count("rank", "rank", "As the trace tells it, else as its name does.")
ITERATION = _count("iteration", "iteration", "N of ProfilerStep#N; counted from 0 in a trace without.")
PHASE = _text("phase", "phase", "fwd, bwd, recompute (the part of bwd in which checkpoints run again), or all.")
STARTUP: Column[Row] = Column("startup", itemgetter("startup"), "Whether it is left out of medians.", "flag")
LEFT_OUT = _count("startup_iterations", about="How many iterations are left out as start-up.")
OF_MEDIANS = {
    "iteration": _count("iterations", about="How many have it."),
    "startup": LEFT_OUT,
}
"""The columns of medians, by those in whose place they stand."""
EXPOSED = _us("exposed_comm_us", "exposed us", "Communication with no computation beside it.")
WAITING = _us("wait_us", "wait us", "Waiting for other ranks without moving data.")
RATIO: Column[Row] = Column(
    *("overlap_ratio", itemgetter("overlap_ratio"), "overlap_us over the shorter of GEMM and communication."),
    header="ratio",
    show="{:.2f}".format,
)

PHASES: Table[Row] = Table(
    *("phases", "one row per iteration and phase"),
    (
        *(FILE, RANK, ITERATION, PHASE),
        _us("span_us", "span us", "From the first start to the last end."),
        _us("gemm_busy_us", "GEMM us"),
        _us("comm_busy_us", "comm us"),
        WAITING,
        _us("overlap_us", "overlap us", "GEMM and communication at once."),
        EXPOSED,
        _us("idle_us", "idle us", "The part of the span in which nothing runs."),
        RATIO,
        _count("num_gemm_events", "GEMMs"),
        _count("num_comm_events", "comms"),
        _count("num_wait_events", "waits"),
        _count("num_compute_events", "others", "What computes something other than a GEMM."),
        STARTUP,
    ),
)
PARTS: Table[Row] = Table(
    *("parts", "one row per iteration, phase and part"),
    (
        *(FILE, RANK, ITERATION, PHASE, _text("by", about="class, kernel or stream.")),
        _text("kind", "kind", "gemm, comm, wait, compute or memory; of a stream all that it has."),
        *(_text("library", "library", "Whose kernels."), _text("name")),
        _count("num_events", "events"),
        _us("busy_us", "busy us", "The union of its spans: what runs twice at a time counts once."),
        _us("total_us", "sum us", "The sum of its spans."),
        _us("alone_us", "alone us", "The part of busy_us in which no other part runs."),
        STARTUP,
    ),
)
RANKS: Table[Row] = Table(
    *("runs", "one row per run and phase, of medians"),
    (
        _text("run", about="What the names of its traces have in common."),
        *(PHASE, _count("num_ranks", "ranks"), _count("world_size"), _text("missing", about="Ranks without a trace.")),
        *(_count("slowest_rank", "slowest"), _us("slowest_us", "span us", "Its span.")),
        *(_count("fastest_rank", "fastest"), _us("fastest_us", "span us", "Its span.")),
        *(_us("skew_us", "skew us", "Between the two."), EXPOSED, WAITING, RATIO, LEFT_OUT),
    ),
)
TABLES = {"of phases": PHASES, "with --by class, kernel or stream": PARTS, "with --by rank": RANKS}

_PHASE_CELLS = (
    *("rank", "iteration", "phase", "span_us", "gemm_busy_us", "comm_busy_us", "overlap_us", "overlap_ratio"),
    *("exposed_comm_us", "wait_us", "idle_us"),
    *("num_gemm_events", "num_comm_events", "num_wait_events", "num_compute_events"),
)
_PART_CELLS = ("kind", "library", "num_events", "busy_us", "share", "alone_us", "total_us")
_SHARE: Column[Row] = Column("share", itemgetter("share"), header="of span", show="{:.0%}".format)


def of_medians(table: Table[Row]) -> Table[Row]:
    """Returns the table of medians, which tell the number of iterations instead of one's own, and how many are left out
    as start-up instead of whether one is."""
    return replace(table, columns=tuple(OF_MEDIANS.get(column.name, column) for column in table.columns))


def phase_rows(file: TraceFile, phases: Sequence[str] = ()) -> list[Row]:
    """Returns a row per iteration and phase; of all phases unless some are given."""
    return _rows(file, file.rows, phases)


def median_rows(file: TraceFile, phases: Sequence[str] = ()) -> list[Row]:
    """Returns a row per phase, of medians."""
    from overlap_sweep.trace import summarise

    return _rows(file, summarise(file.steady_rows), phases)


def part_rows(file: TraceFile, by: str, phases: Sequence[str] = (), top: int | None = None) -> list[Row]:
    """Returns a row per iteration, phase and part, the longest busy first."""
    rows = _rows(file, [part for part in file.parts if part.by == by], phases)
    return [row for _, same in groupby(rows, key=itemgetter("iteration", "phase")) for row in list(same)[:top]]


def median_part_rows(file: TraceFile, by: str, phases: Sequence[str] = (), top: int | None = None) -> list[Row]:
    """Returns a row per phase and part, of medians, the longest busy first.

    Medians are over all iterations but start-up that have the phase: one that lacks the part counts as 0, and
    `iterations` tells how many have it.
    """
    members: dict[tuple[str, ...], list[Row]] = {}
    for row in part_rows(file, by, phases):
        if not row["startup"]:
            members.setdefault((row["phase"], row["kind"], row["library"], row["name"]), []).append(row)
    iterations = Counter(row.phase for row in file.steady_rows)
    rows = []
    for (phase, *_), same in members.items():
        absent = [0] * (iterations[phase] - len(same))
        # Half nanoseconds, without the noise of floats.
        times = {name: round(median([*map(itemgetter(name), same), *absent]), 4) for name in PART_TIMES}
        num_events = median_low([*map(itemgetter("num_events"), same), *absent])
        rows.append({**same[0], "iterations": len(same), "num_events": num_events, **times})
    rows.sort(key=lambda row: -row["busy_us"])
    return [row for phase in iterations for row in [row for row in rows if row["phase"] == phase][:top]]


def rank_rows(run: RunRanks, phases: Sequence[str] = ()) -> list[Row]:
    """Returns a row per phase; none of a run with fewer than two ranks."""
    return [row for row in run.rows if not phases or row["phase"] in phases]


def _rows(file: TraceFile, rows: Iterable[Any], phases: Sequence[str]) -> list[Row]:
    from msgspec.structs import asdict

    from overlap_sweep.trace.files import rank_of

    # Of a trace that doesn't say it, the file's name may tell the rank.
    of_file = {"rank": rank_of(file), "startup_iterations": len(file.startup)}
    found = [{**asdict(row), **of_file} for row in rows if not phases or row.phase in phases]
    return [{**row, "startup": row.get("iteration") in file.startup} for row in found]


def as_json(rows: Sequence[Row]) -> str:
    import msgspec

    from overlap_sweep.report.numbers import visible_json

    return visible_json(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())


def as_csv(rows: Sequence[Row], fields: Iterable[str]) -> str:
    from overlap_sweep.report.table import csv_cell

    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return stream.getvalue().rstrip("\n")


def print_phases(rows: Sequence[Row], medians: Sequence[Row], console: Console) -> None:
    """Prints one table for each file, its medians below its iterations where there are several."""
    columns = {column.name: column for column in PHASES.columns}
    by_file: dict[str, list[Row]] = {}
    for row in rows:
        by_file.setdefault(row["file"], []).append(row)
    for row in medians:
        if row["file"] not in by_file or row["iterations"] + row["startup_iterations"] > 1:
            by_file.setdefault(row["file"], []).append({**row, "iteration": MEDIAN})
    for file, shown in by_file.items():
        cells = [columns[name] for name in _PHASE_CELLS]
        print_table(file, cells, shown, console, group=lambda row: row["iteration"] == MEDIAN)


def print_ranks(run: RunRanks, phases: Sequence[str], console: Console) -> None:
    """Prints the slowest and the fastest rank of every phase, by their medians; of all phases unless some are given."""
    if rows := rank_rows(run, phases):
        title = f"Ranks of {run.name}, medians; exposed, wait and ratio are the slowest's"
        print_table(title, RANKS.columns, rows, console)


def print_parts(rows: Sequence[Row], summaries: Sequence[Row], console: Console) -> None:
    """Prints one table for each file and phase, of medians; `summaries` are `median_rows` of the same files."""
    columns = {column.name: column for column in (*PARTS.columns, _SHARE)}
    summary_of = {(row["file"], row["phase"]): row for row in summaries}
    for (file, phase), same in groupby(rows, key=itemgetter("file", "phase")):
        of_phase = list(same)
        summary, by = summary_of[file, phase], of_phase[0]["by"]
        span_us = summary["span_us"]
        names = short_names([row["name"] for row in of_phase]) if by == "kernel" else {}
        rank = "" if summary["rank"] is None else f", rank {summary['rank']}"
        over = f", medians over {summary['iterations']} iterations" if summary["iterations"] > 1 else ""
        shown = [
            {**row, "name": names.get(row["name"], row["name"]), "share": row["busy_us"] / span_us if span_us else None}
            for row in of_phase
        ]
        # A class has no name beside its kind and library.
        named = [] if by == "class" else [_text("name", by)]
        title = f"{file}{rank}, {phase}: {span_us:,.1f} us{over}"
        print_table(title, [*named, *(columns[name] for name in _PART_CELLS)], shown, console)


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Returns the long ones of kernels' names by their functions, or where that names several, without their middle."""
    from overlap_sweep.trace.kernel_classes import function_name

    functions = Counter(function_name(name) for name in set(names))
    short = {}
    for name in names:
        if len(name) > LONGEST_NAME:
            function = function_name(name)
            short[name] = _without_middle(function if function and functions[function] == 1 else name)
    return short


def _without_middle(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    kept = LONGEST_NAME - len("...")
    return f"{name[: kept - kept // 2]}...{name[-(kept // 2) :]}"
