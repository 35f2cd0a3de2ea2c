from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from overlap_sweep.commands.output import (
    FormatOption,
    TableFormat,
    check_fail_if,
    fail_for,
    fail_if,
    fail_if_option,
    print_rows,
    print_warning,
    with_columns,
)
from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from overlap_sweep.compare.operands import Kind, Operand
    from overlap_sweep.report.comparison import Comparison
    from overlap_sweep.report.table import Table


class By(StrEnum):
    point = "point"
    slot = "slot"
    phase = "phase"
    rank = "rank"
    class_ = "class"
    kernel = "kernel"
    stream = "stream"


BY_OF_SWEEPS = (By.point, By.slot)
BY_OF_TELEMETRY = (By.point,)
BY_OF_TRACES = (By.phase, By.rank, By.class_, By.kernel, By.stream)


def tables() -> dict[str, Table]:
    """Returns the tables of comparisons, by heading."""
    from overlap_sweep import workloads
    from overlap_sweep.compare.sweep_report import POINTS, SLOTS
    from overlap_sweep.compare.traces import PARTS, QUANTITIES

    found: dict[str, Table] = {
        "of points": POINTS,
        "with --by slot": SLOTS,
        "of traces by phase or rank": QUANTITIES,
        "of traces by class, kernel or stream": PARTS,
    }
    for workload in map(workloads.comparing, workloads.names()):
        if workload and workload.telemetry:
            found |= workload.telemetry.tables
    return found


CompareCommand = with_columns(tables)


def compare(
    operands: Annotated[
        list[str],
        typer.Argument(
            metavar="[LABEL=]PATH...",
            help="Two or more directories with results, or one or more with telemetry of training runs "
            "(rank_<r>_metrics.jsonl, also AORTA's), or two or more trace files or directories with traces only.",
        ),
    ],
    reference: Annotated[
        str | None, typer.Option(metavar="LABEL|PATH", help="What the others are compared with; default: the first.")
    ] = None,
    candidate: Annotated[
        str | None,
        typer.Option(metavar="LABEL|PATH", help="Compare only this one with the reference; default: all others."),
    ] = None,
    by: Annotated[
        By | None,
        typer.Option(
            help="One row per point (default) or slot of results; per phase (default), rank, class, kernel or stream "
            "of traces. With telemetry, point prints all quantities of every run."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write JSON and tables to this directory.")
    ] = None,
    plots: Annotated[bool, typer.Option("--plots", help="Also write charts (PNG) to --output.")] = False,
    format: FormatOption = TableFormat.table,
    fail_expressions: Annotated[list[str] | None, fail_if_option("ratio > 1.05")] = None,
) -> None:
    """Compare sweeps, training runs, machines, backends or traces: what is faster or slower, and what else changed.

    A ratio is a value divided by the reference's: below 1 is faster for times, above 1 is better for samples/s and
    hidden fractions. "same" means within the noise of both, "unknown" that there are too few runs to tell.

    Results match if model, tokens, precision, TP size, operator, pass and setting are equal; repetitions are pooled.
    Backend and device are compared. If nothing matches, fields that differ throughout, such as the precision, are
    compared too. Layers match by variant, kernels by size (m is tokens) and implementation, copies by direction and
    size. The implementation of a tensor-parallel stack counts as its backend. Traces match by rank; values are medians
    over the iterations.

    Training runs match by the names of their run directories; single runs always match; if no name is in common, runs
    match by the swept options. If runs do different work, such as another batch size, only samples/s gets a verdict of
    better or worse. For training runs --output writes summary.json and <label>_steps.csv, and --plots
    <label>_timeline.png; a single directory is reported alone. --candidate leaves other results and traces out; other
    telemetry is still summarised.

    \b
    Quantities of telemetry:
      step_ms compute_ms comm_ms hidden_comm_ms exposed_comm_ms hidden_comm_fraction overlap_ratio
      all_reduce_ms reduce_scatter_ms auxiliary_ms compute_allreduce_ms compute_reducescatter_ms
      compute_auxiliary_ms samples_per_s sm_clock_mhz power_w temperature_c final_loss
      time_us none_us floor_us speedup hidden_fraction peak_memory_gb

    \b
    Examples:
      python analyze.py compare multirun/2026-11-20 multirun/2026-11-21
      python analyze.py compare te=results/te torch=results/torch --reference torch --output report
      python analyze.py compare old=multirun/2026-11-20 new=multirun/2026-11-21 --fail-if 'ratio > 1.05'
      python analyze.py compare old=a/trace_rank0.json.gz new=b/trace_rank0.json.gz --by kernel
      python analyze.py compare rocm=logs/a cuda=logs/b --reference cuda --candidate rocm --output report
      python analyze.py compare old=a new=b --fail-if "quantity == 'step_ms' and verdict == 'worse'"

    Exit status: 0 success, 1 error, 2 wrong usage, 3 a --fail-if condition holds.
    """
    from overlap_sweep.compare.operands import Kind, find_operands, only_kind, reference_and_candidate
    from overlap_sweep.report.console import print_lines

    if plots and not output:
        raise typer.BadParameter("--plots requires --output.")
    found = find_operands(operands)
    if len(found) == 1 and found[0].kind is not Kind.telemetry:
        raise typer.BadParameter("give at least two paths to compare.", param_hint="[LABEL=]PATH")
    base, wanted = reference_and_candidate(reference, candidate, found)
    kind = only_kind(found)
    allowed = {Kind.traces: BY_OF_TRACES, Kind.results: BY_OF_SWEEPS, Kind.telemetry: BY_OF_TELEMETRY}[kind]
    if by and by not in allowed:
        raise UserError(f"--by {by.value} is not for {kind}; choose one of {', '.join(allowed)}.")
    compared = _compared(kind, found, base, wanted, by)
    for warning in compared.warnings:
        print_warning(warning)
    frame = compared.frame()
    check_fail_if(fail_expressions, frame)
    written = []

    def show(console: Console) -> None:
        print_lines(compared.headlines, console, indent=0)
        compared.show(console)

    if output:
        from overlap_sweep.report.comparison import write_files

        # Before anything is printed: whoever reads that may stop, as `head` does.
        written = write_files(output, compared, frame, plots)
    print_rows(frame, format, print_table=show)
    if written:
        from overlap_sweep.report.charts.renderer import left_out
        from overlap_sweep.report.console import console_for
        from overlap_sweep.report.terminal import print_written

        print_written(written, console_for(sys.stdout if format is TableFormat.table else sys.stderr))
        for warning in left_out(page=False, images=plots):
            print_warning(warning)
    fail_for(compared.problems, answered=not frame.empty)
    fail_if(fail_expressions, frame, compared.table.name)


def _compared(kind: Kind, operands: Sequence[Operand], base: str, wanted: str | None, by: By | None) -> Comparison:
    from overlap_sweep import workloads
    from overlap_sweep.compare import sweep_report, traces
    from overlap_sweep.compare.operands import Kind

    if kind is Kind.telemetry:
        comparing = filter(None, map(workloads.comparing, workloads.names()))
        telemetry = next(one.telemetry for one in comparing if one.telemetry)
        paths = [(one.label, one.path) for one in operands]
        return telemetry.compare(paths, base, wanted, all_runs=by is By.point)
    compared = [operand for operand in operands if wanted is None or operand.label in (base, wanted)]
    if kind is Kind.traces:
        return traces.compare([(one.label, one.path, one.traces) for one in compared], base, by or By.phase)
    return sweep_report.compare([(one.label, one.path) for one in compared], base, by)
