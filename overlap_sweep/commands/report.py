from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overlap_sweep import workloads
from overlap_sweep.commands import output as out
from overlap_sweep.config import analysis_config
from overlap_sweep.errors import UserError
from overlap_sweep.program import analyze_program
from overlap_sweep.report.charts.figures import left_out
from overlap_sweep.report.console import console_for, print_answers, print_written
from overlap_sweep.report.files import write_reports
from overlap_sweep.report.section import Analysis
from overlap_sweep.report.table import Table
from overlap_sweep.trackers.tracking import Tracking, check_is_whole, tracked
from overlap_sweep.workloads import analyse

if TYPE_CHECKING:
    import pandas as pd


def tables() -> dict[str, Table]:
    """Returns the tables of answers by heading: a workload's own one, else its table of points."""
    modules = {name: workloads.section_module(name) for name in workloads.names()}
    return {f"of workload={name}": getattr(module, "ANSWERS", module.TABLE) for name, module in modules.items()}


Command = out.with_columns(tables)


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a date, a sweep or a point.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="analysis.NAME=VALUE", help="Options of the analysis, see above.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the files to this directory instead of DIR.")] = None,
    plots: Annotated[bool, typer.Option("--plots", help="Also write the charts of report.html as PNGs.")] = False,
    format: out.FormatOption = out.TableFormat.table,
    fail_expressions: Annotated[list[str] | None, out.fail_if_option("hidden_fraction < 0.3")] = None,
    track: Annotated[
        str | None, typer.Option(metavar="TRACKER", help="Also log every point as a run: mlflow, wandb.")
    ] = None,
) -> None:
    """Choose the best overlap of every slot; write a report, YAML, JSON and tables.

    \b
    analysis.objective=time              time (default), or overlap_ratio: highest overlap in the traces
    analysis.tp_scaling_tolerance=0.2    a TP size scales if its time is at most (1 + this) x the time of TP=1 / TP size
    analysis.overlap_threshold=0.5       overlap ratio from which an overlap counts as effective
    analysis.unmeasured=off              slots that were not measured: off (default), or default: the library's default

    With --format csv, json or parquet only the answers are printed, one row per TP size and slot. --fail-if checks
    these rows. They are those of the first workload below that was measured.

    \b
    Examples:
      python analyze.py multirun/2026-11-20
      python analyze.py multirun/2026-11-20 --output results --format csv > answers.csv
      python analyze.py multirun/2026-11-20 --fail-if 'hidden_fraction < 0.3' --fail-if 'not proven'

    Exit status: 0 success, 1 error, 2 wrong usage, 3 a --fail-if condition holds.
    """
    config = analysis_config(overrides or [])
    tracking = _tracking(track, directory) if track else None
    analysis = analyse(directory, config, shlex.join([*analyze_program().split(), *sys.argv[1:]]))
    answers = _answers(analysis, format)
    out.check_fail_if(fail_expressions, answers)
    answered, written, not_written = bool(analysis.sources.reading.points), [], []
    if answered:
        # Before anything is printed: whoever reads that may stop, as `head` does.
        try:
            written = write_reports(analysis, output or directory, with_plots=plots)
        except UserError as error:
            not_written.append(str(error))
        out.print_rows(lambda: answers, format, lambda console: print_answers(analysis, console))
    if written:
        console = console_for(sys.stdout if format is out.TableFormat.table else sys.stderr)
        print_written(written, console, analysis.sections)
    if tracking and answered:
        try:
            tracking.log_all(analysis, written)
            out.print_aside(tracked(tracking))
        except UserError as error:
            not_written.append(str(error))
    for warning in (*analysis.warnings, *(left_out(images=plots) if written else [])):
        out.print_warning(warning)
    out.fail_for(analysis.problems, answered=answered)
    out.fail_for(not_written)
    out.fail_if(fail_expressions, answers, "answers")


def _tracking(name: str, directory: Path) -> Tracking:
    check_is_whole(directory)
    return Tracking(name, directory)


def _answers(analysis: Analysis, format: out.TableFormat) -> pd.DataFrame:
    """Returns the answers of the first section as rows; operators come first, then layers, kernels, training runs,
    copies and tensor-parallel stacks."""
    if not analysis.sections:
        return workloads.section_module(workloads.names()[0]).TABLE.frame([])
    first, *others = analysis.sections
    if format is not out.TableFormat.table:
        for other in others:
            out.print_aside(f"These are the answers on {first.what}; those on {other.what} are in {other.file}.")
    return first.answered.frame
