from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    from overlap_sweep.report.table import Table
    from overlap_sweep.trace.files import RunRanks


class Grouping(StrEnum):
    phase = "phase"
    rank = "rank"
    class_ = "class"
    kernel = "kernel"
    stream = "stream"


WITHOUT_PARTS = (Grouping.phase, Grouping.rank)
RANKS_NAMED = 16
OTHERS = "other ranks may be slower, or wait for this one."


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
    traces are read. A table has the medians of several iterations below them, and of several ranks the slowest and the
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
    from overlap_sweep.report.console import console_for, print_lines
    from overlap_sweep.report.table import to_frame
    from overlap_sweep.trace.files import of_startup, ranks_of, read_trace_files

    if top and by in WITHOUT_PARTS:
        raise typer.BadParameter("it needs --by class, kernel or stream.", param_hint="--top")
    found, problems = _find(paths)
    files = read_trace_files(found, with_parts=by not in WITHOUT_PARTS)
    problems += [file.problem for file in files if file.problem]
    runs = ranks_of(files)
    several = [run for run in runs if len(run.ranks) > 1]
    alone = [run for run in runs if len(run.ranks) == 1 and (run.world_size or 1) > 1]
    is_one_file = len(paths) == 1 and paths[0].is_file()
    for warning in (
        *(warning for file in files for warning in file.warnings),
        *of_startup(files),
        *(f"{run.name}: nothing of rank {some_of(run.missing, RANKS_NAMED)}." for run in several if run.missing),
        *([] if is_one_file else _of_alone(alone)),
    ):
        print_warning(warning)
    good = [file for file in files if not file.problem]
    asked = [phase.value for phase in phases or []]

    if by is Grouping.rank:
        table = trace_rows.RANKS
        rows = [row for run in several for row in trace_rows.rank_rows(run, asked)]
        if good and not several:
            problems.append(
                "--by rank: no run here has the traces of two ranks; give all of a run's, or use --by phase."
            )
    elif by is Grouping.phase:
        table = trace_rows.PHASES
        of_file = trace_rows.median_rows if medians else trace_rows.phase_rows
        rows = [row for file in good for row in of_file(file, asked)]
    else:
        table = trace_rows.PARTS
        of_part = trace_rows.median_part_rows if medians else trace_rows.part_rows
        rows = [row for file in good for row in of_part(file, by.value, asked, top)]
    if medians and by is not Grouping.rank:
        table = trace_rows.of_medians(table)
    rows = table.records(rows)
    if fail_expressions:
        check_fail_if(fail_expressions, to_frame(rows, table.types))
    if good and not rows and (several or by is not Grouping.rank):
        print_aside(f"No row: the traces hold nothing in {' or '.join(asked)}.")
    if good and format is TableFormat.table:
        console = console_for(sys.stdout)
        summaries = [row for file in good for row in trace_rows.median_rows(file, asked)]
        if by is Grouping.phase:
            trace_rows.print_phases([] if medians else rows, summaries, console)
        if by in WITHOUT_PARTS:
            for run in several:
                trace_rows.print_ranks(run, asked, console)
        else:
            # Every iteration's would be too many to look at.
            parts = [row for file in good for row in trace_rows.median_part_rows(file, by.value, asked, top)]
            trace_rows.print_parts(parts, summaries, console)
        if is_one_file and alone:
            print_lines([f"Only rank {alone[0].ranks[0]} of {alone[0].world_size}; {OTHERS}"], console, 0, 0)
    elif good and format is TableFormat.json:
        typer.echo(trace_rows.as_json(rows))
    elif good and format is TableFormat.csv:
        typer.echo(trace_rows.as_csv(rows, table.types))
    elif good:
        print_rows(to_frame(rows, table.types), format)
    fail_for(problems)
    if fail_expressions:
        fail_if(fail_expressions, to_frame(rows, table.types), "rows")


def _of_alone(runs: Sequence[RunRanks]) -> list[str]:
    """Returns at most one sentence: sweeps that profile one rank have hundreds of runs of which it alone is there."""
    if not runs:
        return []
    first, count = runs[0], len(runs) - 1
    which = f"{first.name}: only rank {first.ranks[0]} of {first.world_size}, {(first.world_size or 1) - 1} missing"
    more = f"; the same of {count} other run{'s' if count > 1 else ''}" if count else ""
    return [f"{which}{more}. {OTHERS.capitalize()}"]


def _find(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Returns the traces, each once, and a sentence for each directory that has none."""
    from overlap_sweep.trace.disk import find_traces, refused_links

    found: dict[Path, Path] = {}
    problems = []
    for path in paths:
        below = find_traces(path) if path.is_dir() else [path]
        refused = refused_links(path) if path.is_dir() else []
        problems += refused
        if not below and not refused:
            problems.append(f"{path} holds no traces; give a directory with .json or .json.gz files of torch.profiler.")
        for one in below:
            found.setdefault(one.resolve(), one)
    return list(found.values()), problems
