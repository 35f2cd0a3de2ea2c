from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from overlap_sweep.errors import UserError
from overlap_sweep.report.commands.failing import fail_for


class TraceFormat(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"


def trace(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Kineto traces, .json or .json.gz.")],
    format: Annotated[TraceFormat, typer.Option(help="How to print the rows.")] = TraceFormat.table,
) -> None:
    """GEMM, communication, overlap and exposed time of any Kineto trace, per rank, iteration and phase.

    Times are microseconds. Each is a union of spans: what runs twice at a time counts once.
    """
    from overlap_sweep.report import trace_rows
    from overlap_sweep.report.console import console_for
    from overlap_sweep.trace.overlap import analyse_trace

    rows, problems = [], []
    for path in files:
        try:
            rows += analyse_trace(path)
        except UserError as error:
            problems.append(str(error))
    if rows and format is TraceFormat.table:
        trace_rows.print_table(rows, console_for(sys.stdout))
    elif rows:
        typer.echo(trace_rows.as_json(rows) if format is TraceFormat.json else trace_rows.as_csv(rows))
    fail_for(problems)
