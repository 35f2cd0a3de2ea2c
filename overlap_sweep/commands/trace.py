from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overlap_sweep.commands import frames, output
from overlap_sweep.report.console import print_table
from overlap_sweep.report.numbers import some_of
from overlap_sweep.report.table import Listing, Row, Table

if TYPE_CHECKING:
    from rich.console import Console


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


Command = output.with_columns(lambda: frames.TRACE_TABLES)


def trace(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|DIR",
            help="Kineto traces or rocprofv3's JSON, .json or .json.gz; Nsight Systems' .sqlite or .nsys-rep; or their "
            "directories.",
        ),
    ],
    by: Annotated[
        Grouping, typer.Option(help="One row per phase, per run and phase (rank), or per part of a phase.")
    ] = Grouping.phase,
    phases: Annotated[list[Phase] | None, typer.Option("--phase", help="Only this phase. Repeatable.")] = None,
    medians: Annotated[
        bool, typer.Option("--median", help="Medians over the iterations instead of every iteration.")
    ] = False,
    top: Annotated[int | None, typer.Option(min=1, help="At most this many parts per phase.")] = None,
    format: output.FormatOption = output.TableFormat.table,
    fail_expressions: Annotated[list[str] | None, output.fail_if_option("exposed_comm_us > 0.1 * span_us")] = None,
) -> None:
    """GEMM, communication, overlap and exposed time of any trace, per rank, iteration and phase.

    Times are in microseconds, as unions of spans: kernels that run at the same time count once. All traces at or below
    a directory are read. The table shows iterations, then medians, then the slowest and fastest rank of each run;
    tables of parts show medians only. First iterations that are clearly slower than the others are marked `startup` and
    left out of medians. --by rank prints one row per run with at least two ranks and phase: the slowest and fastest
    rank by their medians, the skew_us between them, and the missing ranks. A file of rocprofv3 is one iteration without
    fwd and bwd. A file of Nsight Systems may hold several ranks: `report.sqlite/gpu1` is one of them.

    Phases: fwd; bwd; recompute, the part of bwd in which checkpointed layers run forward again; all, the whole
    iteration with the optimizer.

    With --median the number of `iterations` replaces `iteration`, and `startup_iterations` replaces `startup`.
    --fail-if checks the printed rows.

    \b
    Examples:
      python analyze.py trace trace_rank0.json.gz --format json
      python analyze.py trace multirun/2026-11-20/21-14-03/llama3_8b_tp4_fc1_bulk_sm4
      python analyze.py trace report.nsys-rep --by rank
      python analyze.py trace trace_rank0.json.gz --by kernel --phase bwd --top 10
      python analyze.py trace traces/ --by rank --fail-if 'skew_us > 0.05 * slowest_us or missing.notna()'
      python analyze.py trace traces/ --median --phase all --fail-if 'exposed_comm_us > 0.1 * span_us'

    Exit status: 0 success, 1 error, 2 wrong usage, 3 a --fail-if condition holds.
    """
    from overlap_sweep.trace.files import ranks_of, startup_warnings

    if top and by in WITHOUT_PARTS:
        raise typer.BadParameter("requires --by class, kernel or stream.", param_hint="--top")
    files, problems = frames.read_files(paths, with_parts=by not in WITHOUT_PARTS)
    runs = ranks_of(files)
    several = [run for run in runs if len(run.ranks) > 1]
    alone = [run for run in runs if len(run.ranks) == 1 and (run.world_size or 1) > 1]
    warnings = [*(warning for file in files for warning in file.warnings), *startup_warnings(files)]
    warnings += [f"{run.name}: no trace of rank {some_of(run.missing, RANKS_NAMED)}." for run in several if run.missing]
    if alone and len(files) > 1:
        first = some_of((f"{run.name}: only rank {run.ranks[0]} of {run.world_size}" for run in alone), 1, "; ")
        warnings.append(f"{first}. Other ranks may be slower, or wait for this one.")
    for warning in warnings:
        output.print_warning(warning)
    good = [file for file in files if not file.problem]
    wanted = [phase.value for phase in phases or []]

    of_runs = [row for run in several for row in run.rows if not wanted or row["phase"] in wanted]
    if by is Grouping.rank:
        frame = frames.RANKS.frame(of_runs)
    else:
        table, rows = frames.trace_table(by, medians=medians), frames.trace_rows(good, by, wanted, top, medians=medians)
        frame = table.frame(rows)
    if good and not several and by is Grouping.rank:
        problems.append("--by rank: no run has traces of two ranks; give those of all its ranks, or use --by phase.")
    elif good and frame.empty:
        output.print_aside(f"No rows: the traces have no events in {' or '.join(wanted)}.")

    def show(console: Console) -> None:
        if by is Grouping.phase and not medians:
            _print("", table, rows, console)
        if by is not Grouping.rank:
            of_medians = frames.trace_rows(good, by, wanted, top, medians=True)
            _print("medians", frames.trace_table(by, medians=True), of_medians, console)
        if by in WITHOUT_PARTS:
            _print("medians", frames.RANKS, of_runs, console)

    output.check_fail_if(fail_expressions, frame)
    if good:
        output.print_rows(lambda: frame, format, show)
    output.fail_for(problems)
    output.fail_if(fail_expressions, frame)


def _print(kind: str, table: Table[Row], rows: Sequence[Row], console: Console) -> None:
    """Prints a table for each file or run; `kind` follows its name in the title."""

    def parts_of(row: Row) -> str:
        return str(row["phase"]) if "name" in row else ""

    for name, same in groupby(rows, key=lambda row: row.get("file") or row["run"]):
        own = list(same)
        columns = Listing(table, own).columns
        title = f"{name}, {kind}" if kind else name
        print_table(title, columns, own, console, group=parts_of, cut_last=True)
