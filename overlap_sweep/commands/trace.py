from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_sweep.commands.frames import find_traces
from overlap_sweep.commands.output import (
    FormatOption,
    TableFormat,
    check_fail_if,
    fail_for,
    fail_if,
    fail_if_option,
    print_aside,
    print_rows,
    print_warning,
    with_columns,
)
from overlap_sweep.report.numbers import some_of

if TYPE_CHECKING:
    from rich.console import Console

    from overlap_sweep.report.table import Row, Table


class Grouping(StrEnum):
    phase = "phase"
    rank = "rank"
    class_ = "class"
    kernel = "kernel"
    stream = "stream"


WITHOUT_PARTS = (Grouping.phase, Grouping.rank)
RANKS_NAMED = 16


class Phase(StrEnum):
    fwd = "fwd"
    bwd = "bwd"
    recompute = "recompute"
    all = "all"


def _tables() -> dict[str, Table[Any]]:
    from overlap_sweep.commands.trace_rows import TABLES

    return TABLES


TraceCommand = with_columns(_tables)


def trace(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE|DIR", help="Kineto traces, .json or .json.gz, or where to look for them."),
    ],
    by: Annotated[
        Grouping, typer.Option(help="A row for each phase, also of all ranks of a run, or for each of a phase's parts.")
    ] = Grouping.phase,
    phases: Annotated[
        list[Phase] | None, typer.Option("--phase", help="Only this; may be given several times.")
    ] = None,
    medians: Annotated[bool, typer.Option("--median", help="Medians over the iterations instead of each.")] = False,
    top: Annotated[int | None, typer.Option(min=1, help="Of the parts of a phase no more than these.")] = None,
    format: FormatOption = TableFormat.table,
    fail_expressions: Annotated[list[str] | None, fail_if_option("exposed_comm_us > 0.1 * span_us")] = None,
) -> None:
    """GEMM, communication, overlap and exposed time of any Kineto trace, per rank, iteration and phase.

    Times are microseconds. Each is a union of spans: what runs twice at a time counts once. Below a directory all
    traces are read. A table has the medians of the iterations below them, and of several ranks the slowest and the
    fastest at its end; a table of parts has medians only. First iterations that take longer than the later ones vary by
    are `startup`, and in no median. With --by rank there are only the ranks, in any format: of each run with two or
    more the slowest and the fastest by medians, between them skew_us, and whose trace is missing.

    The phases are fwd, bwd, recompute, the part of bwd in which checkpoints run forward again, and all, the whole
    iteration with its optimizer.

    COLUMNS

    With --median `iterations`, how many, takes the place of `iteration`, and `startup_iterations` that of `startup`.
    --fail-if looks at these rows.

    \b
    Examples:
      python analyze.py trace trace_rank0.json.gz --format json
      python analyze.py trace multirun/2026-11-20/21-14-03/llama3_8b_tp4_fc1_bulk_sm4
      python analyze.py trace trace_rank0.json.gz --by kernel --phase bwd --top 10
      python analyze.py trace traces/ --by rank --fail-if 'skew_us > 0.05 * slowest_us or missing.notna()'
      python analyze.py trace traces/ --median --phase all --fail-if 'exposed_comm_us > 0.1 * span_us'

    Exit status: 0 fine, 1 an error, 2 wrong usage, 3 a --fail-if holds.
    """
    from overlap_sweep.commands import trace_rows
    from overlap_sweep.report.table import to_frame
    from overlap_sweep.trace.files import of_startup, ranks_of, read_trace_files

    if top and by in WITHOUT_PARTS:
        raise typer.BadParameter("it needs --by class, kernel or stream.", param_hint="--top")
    found, problems = find_traces(paths)
    files = read_trace_files(found, with_parts=by not in WITHOUT_PARTS)
    problems += [file.problem for file in files if file.problem]
    runs = ranks_of(files)
    several = [run for run in runs if len(run.ranks) > 1]
    alone = [run for run in runs if len(run.ranks) == 1 and (run.world_size or 1) > 1]
    warnings = [*(warning for file in files for warning in file.warnings), *of_startup(files)]
    warnings += [f"{run.name}: nothing of rank {some_of(run.missing, RANKS_NAMED)}." for run in several if run.missing]
    if alone and len(files) > 1:
        which = some_of((f"{run.name}: only rank {run.ranks[0]} of {run.world_size}" for run in alone), 1, "; ")
        warnings.append(f"{which}. Other ranks may be slower, or wait for this one.")
    for warning in warnings:
        print_warning(warning)
    good = [file for file in files if not file.problem]
    asked = [phase.value for phase in phases or []]

    def rows_of(table: Table[Row], medians: bool) -> list[Row]:
        if table is trace_rows.RANKS:
            return [row for run in several for row in run.rows if not asked or row["phase"] in asked]
        return trace_rows.rows_of(good, by.value if table is trace_rows.PARTS else "phase", asked, top, medians=medians)

    table = {Grouping.phase: trace_rows.PHASES, Grouping.rank: trace_rows.RANKS}.get(by, trace_rows.PARTS)
    written = trace_rows.of_medians(table) if medians and by is not Grouping.rank else table
    frame = to_frame(written.records(rows_of(table, medians)), written.types)
    check_fail_if(fail_expressions, frame)
    if good and not several and by is Grouping.rank:
        problems.append("--by rank: no run here has the traces of two ranks; give all of a run's, or use --by phase.")
    elif good and frame.empty:
        print_aside(f"No row: the traces hold nothing in {' or '.join(asked)}.")

    def show(console: Console) -> None:
        if by is Grouping.phase and not medians:
            _print("", table, rows_of(table, medians=False), console)
        if by is not Grouping.rank:
            _print("medians", trace_rows.of_medians(table), rows_of(table, medians=True), console)
        if by in WITHOUT_PARTS:
            _print("medians", trace_rows.RANKS, rows_of(trace_rows.RANKS, medians=True), console)

    if good:
        print_rows(frame, format, show)
    fail_for(problems)
    fail_if(fail_expressions, frame, "rows")


def _print(what: str, table: Table[Row], rows: Sequence[Row], console: Console) -> None:
    """Prints a table for each file or run."""
    from overlap_sweep.report.console import print_table
    from overlap_sweep.report.table import Listing

    def parts_of(row: Row) -> str:
        return str(row["phase"]) if "name" in row else ""

    for name, same in groupby(rows, key=lambda row: row.get("file") or row["run"]):
        of_name = list(same)
        columns = Listing(table, of_name).columns
        title = f"{name}, {what}" if what else name
        print_table(title, columns, of_name, console, group=parts_of, cut_last=True)
