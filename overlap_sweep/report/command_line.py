"""The commands of analyze.py. One function each; what a command needs is imported when it runs.

`analyze.py DIR` is short for `analyze.py report DIR`.
"""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from overlap_sweep.errors import UserError

DEFAULT_COMMAND = "report"

EXAMPLES = """
Choose the best overlap of every slot from measured points, or analyse profiler traces.

\b
Examples:
  python analyze.py multirun/2026-11-20                 all sweeps of a day
  python analyze.py multirun/2026-11-20/21-14-03        one sweep
  python analyze.py multirun/2026-11-20 analysis.objective=overlap_ratio
  python analyze.py trace trace_rank0.json.gz --format json

DIR without a command is short for `report DIR`. Results are read, never changed.
"""


class _CommandOrDirectory(TyperGroup):
    """A first argument that is no command is the directory of the default one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_CommandOrDirectory,
    help=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class TraceFormat(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"


@app.command(name=DEFAULT_COMMAND)
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A date's, a sweep's or one point's directory.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="analysis.NAME=VALUE", help="objective, tp_scaling_tolerance, overlap_threshold."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the files there instead of into DIR.")] = None,
) -> None:
    """Choose the best overlap of every slot; write YAML, JSON, text and tables.

    \b
    analysis.objective=time              time (default), or overlap_ratio: highest overlap in the traces
    analysis.tp_scaling_tolerance=0.2    a TP size scales up to (1 + this) x the time of TP=1 / TP size
    analysis.overlap_threshold=0.5       from this overlap ratio on an overlap is called effective
    """
    from overlap_sweep.analysis.options import analysis_config
    from overlap_sweep.analysis.sweep import analyse
    from overlap_sweep.report import text
    from overlap_sweep.report.console import console_for
    from overlap_sweep.report.files import write_reports

    try:
        config = analysis_config(overrides or [])
    except UserError as error:
        raise typer.BadParameter(str(error)) from None
    analysis = analyse(directory, config)
    if analysis.reading.points:
        command = shlex.join(["python", "analyze.py", *sys.argv[1:]])
        written = write_reports(analysis, output or directory, command)
        console = console_for(sys.stdout)
        text.print_answers(analysis, console)
        text.print_written(written, console)
    _fail_for(analysis.problems)


@app.command()
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
    _fail_for(problems)


def _fail_for(problems: list[str]) -> None:
    """What could be read has been reported by now; the rest is named, and the exit status says so."""
    for problem in problems:
        _print_error(problem)
    if problems:
        raise typer.Exit(1)


def _print_error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)


def main() -> None:
    try:
        app()
    except UserError as error:
        _print_error(str(error))
        sys.exit(1)
