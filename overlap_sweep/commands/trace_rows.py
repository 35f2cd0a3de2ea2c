"""The rows of `analyze.py trace`, phases or their parts: as a table, CSV or JSON."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median, median_low
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overlap_sweep.report.console import fits, print_lines
from overlap_sweep.report.csv_text import csv_cell
from overlap_sweep.report.numbers import visible_json
from overlap_sweep.trace.files import TraceFile
from overlap_sweep.trace.kernel_classes import function_name
from overlap_sweep.trace.overlap import PartRow, summarise
from overlap_sweep.trace.ranks import RunRanks, rank_of

Row = dict[str, Any]

FIELDS = (
    "file",
    "rank",
    "iteration",
    "phase",
    "span_us",
    "gemm_busy_us",
    "comm_busy_us",
    "wait_us",
    "overlap_us",
    "exposed_comm_us",
    "idle_us",
    "overlap_ratio",
    "num_gemm_events",
    "num_comm_events",
    "num_wait_events",
    "num_compute_events",
    "startup",
)

PART_FIELDS = (
    *("file", "rank", "iteration", "phase", "by", "kind", "library", "name"),
    *("num_events", "busy_us", "total_us", "alone_us", "startup"),
)
PART_TIMES = ("busy_us", "total_us", "alone_us")

RANK_FIELDS = (
    *("run", "phase", "num_ranks", "world_size", "missing", "slowest_rank", "slowest_us", "fastest_rank", "fastest_us"),
    *("skew_us", "exposed_comm_us", "wait_us", "overlap_ratio", "startup_iterations"),
)

_OF_MEDIAN = {"iteration": "iterations", "startup": "startup_iterations"}

MEDIAN = "median"
"""In the place of an iteration's number."""

LONGEST_NAME = 56
"""Characters of a kernel's name in a table."""


def of_median(fields: Sequence[str]) -> tuple[str, ...]:
    """The fields of medians, which tell the number of iterations instead of one's own, and how many are left out as
    start-up instead of whether one is."""
    return tuple(_OF_MEDIAN.get(name, name) for name in fields)


def phase_rows(file: TraceFile, phases: Sequence[str] = ()) -> list[Row]:
    """One dictionary per iteration and phase, with FIELDS; of all phases unless some are given."""
    return _as_rows(file, file.rows, FIELDS, phases)


def median_rows(file: TraceFile, phases: Sequence[str] = ()) -> list[Row]:
    """One dictionary per phase, with FIELDS as of medians."""
    return _as_rows(file, summarise(file.steady_rows), of_median(FIELDS), phases)


def part_rows(file: TraceFile, by: str, phases: Sequence[str] = (), top: int | None = None) -> list[Row]:
    """One dictionary per iteration, phase and part, the longest busy first, with PART_FIELDS."""
    rows = _as_rows(file, [part for part in file.parts if part.by == by], PART_FIELDS, phases)
    return [
        row for _, same in groupby(rows, key=lambda row: (row["iteration"], row["phase"])) for row in list(same)[:top]
    ]


def median_part_rows(file: TraceFile, by: str, phases: Sequence[str] = (), top: int | None = None) -> list[Row]:
    """One dictionary per phase and part, the longest busy first, with PART_FIELDS as of medians.

    Medians are over all iterations but start-up that have the phase: one that lacks the part counts as 0, and
    `iterations` tells how many have it.
    """
    rows = []
    rank = rank_of(file)
    iterations = Counter(row.phase for row in file.steady_rows)
    parts: dict[tuple[str, str, str, str], list[PartRow]] = {}
    for part in file.steady_parts:
        if part.by == by and (not phases or part.phase in phases):
            parts.setdefault((part.phase, part.kind, part.library, part.name), []).append(part)
    for (phase, kind, library, name), members in parts.items():
        absent = [0] * (iterations[phase] - len(members))
        identity = {"file": str(file.path), "rank": rank, "iterations": len(members), "phase": phase, "by": by}
        # Half nanoseconds, without the noise of floats.
        times = {f: round(median([*(getattr(m, f) for m in members), *absent]), 4) for f in PART_TIMES}
        num_events = median_low([*(member.num_events for member in members), *absent])
        values = {"num_events": num_events, **times, "startup_iterations": len(file.startup)}
        rows.append({**identity, "kind": kind, "library": library, "name": name, **values})
    found = []
    for phase in iterations:
        of_phase = sorted((row for row in rows if row["phase"] == phase), key=lambda row: -row["busy_us"])
        found += of_phase[:top]
    return found


def rank_rows(run: RunRanks, phases: Sequence[str] = ()) -> list[Row]:
    """One dictionary per phase, with RANK_FIELDS; none of a run with fewer than two ranks."""
    missing = ",".join(map(str, run.missing)) or None
    of_run = {"world_size": run.world_size, "missing": missing}
    rows = [{**msgspec.structs.asdict(row), **of_run} for row in run.rows if not phases or row.phase in phases]
    return [{name: row[name] for name in RANK_FIELDS} for row in rows]


def _as_rows(file: TraceFile, rows: Iterable[Any], fields: Sequence[str], phases: Sequence[str]) -> list[Row]:
    # Of a trace that doesn't say it, the file's name may tell the rank.
    rank = rank_of(file)
    of_file = {"rank": rank, "startup_iterations": len(file.startup)}
    found = []
    for row in rows:
        if not phases or row.phase in phases:
            values = {**msgspec.structs.asdict(row), **of_file}
            values["startup"] = values.get("iteration") in file.startup
            found.append({name: values[name] for name in fields})
    return found


def as_json(rows: Sequence[Row]) -> str:
    return visible_json(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())


def as_csv(rows: Sequence[Row], fields: Sequence[str]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return stream.getvalue().rstrip("\n")


def types_of(fields: Sequence[str]) -> dict[str, str]:
    """The pandas type of each column."""
    texts = ("run", "missing", "file", "phase", "by", "kind", "library", "name")
    numbers = {name: "float64" if name.endswith(("_us", "_ratio")) else "Int64" for name in fields}
    types = {name: "string" if name in texts else numbers[name] for name in fields}
    return {**types, "startup": "boolean"} if "startup" in types else types


HEADERS = {
    "rank": "rank",
    "iteration": "iteration",
    "phase": "phase",
    "span_us": "span us",
    "gemm_busy_us": "GEMM us",
    "comm_busy_us": "comm us",
    "overlap_us": "overlap us",
    "overlap_ratio": "ratio",
    "exposed_comm_us": "exposed us",
    "wait_us": "wait us",
    "idle_us": "idle us",
    "num_gemm_events": "GEMMs",
    "num_comm_events": "comms",
    "num_wait_events": "waits",
    "num_compute_events": "others",
}


def print_table(rows: Sequence[Row], medians: Sequence[Row], console: Console) -> None:
    """One table for each file, its medians below its iterations where there are several; lines instead where the
    terminal is too narrow for it."""
    of_file = _by_file(rows)
    medians_of = _by_file(medians)
    for file in dict.fromkeys(row["file"] for row in (*rows, *medians)):
        iterations = of_file.get(file, [])
        several = not iterations or any(
            row["iterations"] + row["startup_iterations"] > 1 for row in medians_of.get(file, [])
        )
        below = [{**row, "iteration": MEDIAN} for row in medians_of.get(file, [])] if several else []
        cells = [{h: _cell(name, row[name]) for name, h in HEADERS.items()} for row in (*iterations, *below)]
        head, *lines = _laid_out(cells)
        console.print(f"\n{file}", style="bold")
        if len(head) <= console.width:
            if iterations and below:
                lines.insert(len(iterations), "")
            console.print(f"\n{head}", style="bold")
            console.print("\n".join([f" {'─' * (len(head) - 2)}", *lines, ""]))
        else:
            for row in cells:
                rank, iteration, phase, *times = (f"{header} {value}" for header, value in row.items())
                console.print(f"{rank}, {iteration}, {phase}")
                print_lines([", ".join(times)], console, indent=0, hanging=0)
                console.print()


def _by_file(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["file"], []).append(row)
    return found


def _laid_out(cells: Sequence[Mapping[str, str]]) -> list[str]:
    """The headers and the rows, looking as in the other tables: with hundreds of traces, rich takes seconds."""
    rows = [{header: header for header in cells[0]}, *cells]
    widths = {header: max(len(row[header]) for row in rows) for header in cells[0]}
    return [
        f" {'   '.join(t.ljust(widths[h]) if h == 'phase' else t.rjust(widths[h]) for h, t in row.items())} "
        for row in rows
    ]


RANK_HEADERS = {
    "phase": "phase",
    "num_ranks": "ranks",
    "slowest_rank": "slowest",
    "slowest_us": "span us",
    "fastest_rank": "fastest",
    "fastest_us": "span us",
    "skew_us": "skew us",
    "exposed_comm_us": "exposed us",
    "wait_us": "wait us",
    "overlap_ratio": "ratio",
}


def print_ranks(run: RunRanks, phases: Sequence[str], console: Console) -> None:
    """The slowest and the fastest rank of every phase, by their medians; of all phases unless some are given."""
    rows = [row for row in run.rows if not phases or row.phase in phases]
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for field, header in RANK_HEADERS.items():
        table.add_column(header, justify="left" if field == "phase" else "right", no_wrap=True)
    cells = [[_cell(field, getattr(row, field)) for field in RANK_HEADERS] for row in rows]
    for row_cells in cells:
        table.add_row(*row_cells)
    console.print(f"\nRanks of {run.name}, medians; exposed, wait and ratio are the slowest's", style="bold")
    if fits(table, console):
        console.print(table)
        return
    for phase, ranks, slowest, slowest_us, fastest, fastest_us, skew_us, exposed_us, wait_us, ratio in cells:
        print_lines(
            [
                f"{phase} of {ranks} ranks: slowest {slowest}, {slowest_us} us; fastest {fastest}, {fastest_us} us; "
                f"skew {skew_us} us; exposed {exposed_us} us, wait {wait_us} us, ratio {ratio}"
            ],
            console,
        )


PART_HEADERS = {
    "kind": "kind",
    "library": "library",
    "num_events": "events",
    "busy_us": "busy us",
    "share": "of span",
    "alone_us": "alone us",
    "total_us": "sum us",
}


def print_parts(rows: Sequence[Row], summaries: Sequence[Row], console: Console) -> None:
    """One table for each file and phase, of medians; `summaries` are `median_rows` of the same files."""
    summary_of: Mapping[tuple[str, str], Row] = {(row["file"], row["phase"]): row for row in summaries}
    for (file, phase), same in groupby(rows, key=lambda row: (row["file"], row["phase"])):
        of_phase = list(same)
        summary = summary_of[file, phase]
        span_us = summary["span_us"]
        names = short_names([row["name"] for row in of_phase]) if of_phase[0]["by"] == "kernel" else {}
        by = of_phase[0]["by"]
        # A class has no name beside its kind and library.
        headers = {**({} if by == "class" else {"name": by}), **PART_HEADERS}
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for field, header in headers.items():
            table.add_column(header, justify="left" if field in ("name", "kind", "library") else "right", no_wrap=True)
        cells = []
        for row in of_phase:
            shown = {**row, "name": names.get(row["name"], row["name"])}
            shown["share"] = f"{row['busy_us'] / span_us:.0%}" if span_us else None
            cells.append([_cell(field, shown[field]) for field in headers])
        for row_cells in cells:
            table.add_row(*map(Text, row_cells))
        rank = "" if summary["rank"] is None else f", rank {summary['rank']}"
        over = f", medians over {summary['iterations']} iterations" if summary["iterations"] > 1 else ""
        console.print(f"\n{file}{rank}, {phase}: {span_us:,.1f} us{over}", style="bold")
        if fits(table, console):
            console.print(table)
            continue
        numbers = list(headers.values())[-5:]
        for row_cells in cells:
            print_lines([" ".join(row_cells[:-5])], console, indent=0)
            pairs = zip(numbers, row_cells[-5:], strict=True)
            print_lines([", ".join(f"{header} {value}" for header, value in pairs)], console)
        console.print()


def short_names(names: Sequence[str]) -> dict[str, str]:
    """By kernel: the long ones by their functions, or where that names several of them, without their middle."""
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


def _cell(name: str, value: Any) -> str:
    """What is unknown, such as the rank of some traces, or undefined is `-`."""
    if value is None:
        return "-"
    if name.endswith("_us"):
        return f"{value:,.1f}"
    return f"{value:.2f}" if name == "overlap_ratio" else str(value)
