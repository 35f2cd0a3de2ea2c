from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from overlap_sweep.errors import UserError
from overlap_sweep.report.commands.failing import fail_for


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
    fail_for(analysis.problems)
