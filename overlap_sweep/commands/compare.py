from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_sweep.commands.failing import fail_for, print_warning
from overlap_sweep.commands.output import FormatOption, TableFormat, check_fail_if, fail_if, fail_if_option, print_rows
from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from overlap_sweep.compare.charts import Chart
    from overlap_sweep.compare.operands import Kind, Operand
    from overlap_sweep.compare.traces import TraceComparison


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


def compare(
    operands: Annotated[
        list[str],
        typer.Argument(
            metavar="[LABEL=]PATH...",
            help="Two or more directories with results, or with telemetry of training runs (rank_<r>_metrics.jsonl), "
            "or traces: files, or directories that hold only traces.",
        ),
    ],
    reference: Annotated[
        str | None, typer.Option(metavar="LABEL|PATH", help="What the others are compared with; the first by default.")
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(metavar="LABEL|PATH", help="Compare only this one with it; all others by default.")
    ] = None,
    by: Annotated[
        By | None,
        typer.Option(
            help="A row for each; point or slot of results, the others of traces. Default: point, phase. Of telemetry "
            "point prints every quantity of each run, however many."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Write JSON and tables there, too.")] = None,
    plots: Annotated[bool, typer.Option("--plots", help="Write charts (PNG) to --output, too.")] = False,
    format: FormatOption = TableFormat.table,
    fail_expressions: Annotated[list[str] | None, fail_if_option("ratio > 1.05")] = None,
) -> None:
    """Compare sweeps, training runs, machines, backends or traces: what is faster, what slower, and what else changed.

    Ratios are over the reference's: of times below 1 is faster, of samples/s and of what is hidden above 1. Results
    match where model, tokens, precision, TP size, operator, pass and setting are the same; backend and device are
    compared, and so is what else differs throughout, such as the precision, if nothing matches otherwise. Repetitions
    are pooled, and what is inside the noise of both is the same. Layers match by the names of their variants, kernels
    by their sizes (m is in tokens) and implementations, copies by their direction and sizes. Of
    tensor-parallel stacks the implementation is the backend. Traces match by rank,
    medians over the iterations. Training runs match by the names of their run directories, one run of each whatever it
    is called, and where no name is in both by what was swept, whatever differs throughout; where they don't do
    the same work, as with another batch size, nothing but samples/s is better or worse.
    For them --output writes summary.json, --plots <label>_timeline.png. Telemetry that is not the --candidate's is
    still summarised; results and traces that are not are left out.

    \b
    Columns of points and of slots (--by slot, the best of each):
      model backend device precision tokens tp_size operator pass setting reference_setting dataset reference
      time_us noise_us reference_us reference_noise_us ratio verdict hidden_fraction reference_hidden_fraction
      none_us reference_none_us none_ratio floor_us reference_floor_us floor_ratio
    and of slots also: slot phase changed reference_choice_us regret
    Columns of traces by phase or rank:
      dataset reference rank phase quantity value reference_value difference ratio
    and by class, kernel or stream:
      dataset reference phase by kind library name busy_us reference_busy_us difference_us ratio change
      total_us reference_total_us num_events reference_num_events
    Columns of telemetry (values are medians over the steps; verdict: better, worse, lower, higher, or same):
      dataset reference run reference_run quantity value noise reference_value reference_noise difference ratio
      ratio_noise verdict count reference_count
    with the quantities
      step_ms compute_ms comm_ms hidden_comm_ms exposed_comm_ms hidden_share overlap_ratio
      kernels_exposed_comm_ms kernels_hidden_share all_reduce_ms reduce_scatter_ms auxiliary_ms
      compute_allreduce_ms compute_reducescatter_ms compute_auxiliary_ms utilisation_compute
      utilisation_all_reduce utilisation_reduce_scatter utilisation_auxiliary mean_concurrency max_concurrency
      samples_per_s sm_clock_mhz power_w temperature_c dips grad_norm final_loss point_ms none_ms floor_ms speedup
      hidden_fraction peak_memory_gb

    \b
    Examples:
      python analyze.py compare multirun/2026-11-20 multirun/2026-11-21
      python analyze.py compare te=results/te torch=results/torch --reference torch --output report
      python analyze.py compare old=multirun/2026-11-20 new=multirun/2026-11-21 --fail-if 'ratio > 1.05'
      python analyze.py compare old=a/trace_rank0.json.gz new=b/trace_rank0.json.gz --by kernel
      python analyze.py compare rocm=logs/a cuda=logs/b --reference cuda --candidate rocm --output report
      python analyze.py compare old=a new=b --fail-if "quantity == 'step_ms' and verdict == 'worse'"

    Exit status: 0 fine, 1 an error, 2 wrong usage, 3 a --fail-if holds.
    """
    from overlap_sweep.compare.operands import Kind, find_operands, reference_and_candidate

    if plots and not output:
        raise typer.BadParameter("--plots requires --output.")
    if len(operands) < 2:
        raise typer.BadParameter("give at least two to compare.", param_hint="[LABEL=]PATH")
    found = find_operands(operands)
    base, wanted = reference_and_candidate(reference, candidate, found)
    kind = _only_kind(found)
    allowed = {Kind.traces: BY_OF_TRACES, Kind.results: BY_OF_SWEEPS, Kind.telemetry: BY_OF_TELEMETRY}[kind]
    if by and by not in allowed:
        raise UserError(f"--by {by.value} is not for {kind}; choose among {', '.join(allowed)}.")
    if kind is Kind.telemetry:
        _compare_telemetry(found, base, wanted, by, output, plots, format, fail_expressions)
        return
    compared = [operand for operand in found if wanted is None or operand.label in (base, wanted)]
    if kind is Kind.traces:
        _compare_traces(compared, base, by or By.phase, output, plots, format, fail_expressions)
    else:
        _compare_sweeps(compared, base, by, output, plots, format, fail_expressions)


def _only_kind(operands: Sequence[Operand]) -> Kind:
    """UserError where they are of several."""
    from overlap_sweep.compare.operands import Kind, is_trace

    first = {operand.kind: operand for operand in reversed(operands)}
    if len(first) == 1:
        return operands[0].kind
    other = next(operand for kind, operand in first.items() if kind is not Kind.traces)
    for operand in operands:
        if operand.path.is_file() and not is_trace(operand.path):
            raise UserError(
                f"{operand.path} is neither {other.kind} nor a trace; give {other.kind}, as {other.path} is."
            )
    if Kind.traces in first:
        traces = first[Kind.traces].path
        raise UserError(
            f"{traces} is traces and {other.path} is {other.kind}; compare traces with traces: give files of it."
        )
    raise UserError(
        f"{first[Kind.telemetry].path} is telemetry of training runs and {first[Kind.results].path} is results without "
        "any; compare like with like. Of training runs, copy the rank_<r>_metrics.jsonl, too."
    )


def _compare_sweeps(
    operands: Sequence[Operand],
    reference: str,
    by: By | None,
    output: Path | None,
    plots: bool,
    format: TableFormat,
    fail_expressions: Sequence[str] | None,
) -> None:
    from overlap_sweep.compare import rows, sweep_text
    from overlap_sweep.compare.datasets import read_dataset
    from overlap_sweep.compare.summary import summary
    from overlap_sweep.compare.sweeps import compare_sweeps
    from overlap_sweep.report.frame import to_frame
    from overlap_sweep.results.provenance import launch_commands

    compared = compare_sweeps([read_dataset(operand.label, operand.path) for operand in operands], reference)
    if by is By.slot:
        frame = to_frame(rows.slot_rows(compared), rows.SLOT_COLUMNS)
    else:
        frame = to_frame(rows.point_rows(compared), rows.POINT_COLUMNS)

    check_fail_if(fail_expressions, frame)

    def print_table(console: Console) -> None:
        if by is By.slot:
            sweep_text.print_slots_only(compared, console)
        else:
            sweep_text.print_sweeps(compared, console, all_points=by is By.point)

    print_rows(frame, format, print_table=print_table)
    if output:
        from overlap_sweep.compare.charts import sweep_charts

        commands = {dataset.label: launch_commands(dataset.points) for dataset in compared.datasets}
        _write(
            output, {**summary(compared), "commands": commands}, frame, sweep_charts(compared) if plots else [], format
        )
    fail_for(compared.problems)
    fail_if(fail_expressions, frame, "slots" if by is By.slot else "points")


def _compare_telemetry(
    operands: Sequence[Operand],
    reference: str,
    candidate: str | None,
    by: By | None,
    output: Path | None,
    plots: bool,
    format: TableFormat,
    fail_expressions: Sequence[str] | None,
) -> None:
    from overlap_sweep.report.frame import to_frame
    from overlap_sweep.workloads.fsdp import compare_rows as telemetry_rows
    from overlap_sweep.workloads.fsdp.compare import compare_telemetry, read_telemetry_dataset
    from overlap_sweep.workloads.fsdp.compare_text import print_telemetry

    datasets = [read_telemetry_dataset(operand.label, operand.path) for operand in operands]
    compared = compare_telemetry(datasets, reference, candidate)
    for warning in compared.warnings:
        print_warning(warning)
    frame = to_frame(telemetry_rows.quantity_rows(compared), telemetry_rows.COLUMNS)
    check_fail_if(fail_expressions, frame)
    print_rows(frame, format, print_table=lambda console: print_telemetry(compared, console, by is By.point))
    if output:
        from overlap_sweep.workloads.fsdp.compare_charts import telemetry_charts

        charts = telemetry_charts(compared) if plots else []
        summary = telemetry_rows.telemetry_summary(compared)
        _write(output, summary, frame, charts, format, telemetry_rows.SUMMARY_FILE)
    fail_for(compared.problems)
    fail_if(fail_expressions, frame, "rows")


def _compare_traces(
    operands: Sequence[Operand],
    reference: str,
    by: By,
    output: Path | None,
    plots: bool,
    format: TableFormat,
    fail_expressions: Sequence[str] | None,
) -> None:
    from overlap_sweep.compare.trace_pairs import read_trace_dataset
    from overlap_sweep.compare.trace_rows import trace_summary
    from overlap_sweep.compare.trace_text import print_traces
    from overlap_sweep.compare.traces import compare_traces

    datasets = [read_trace_dataset(operand.label, operand.path, operand.traces) for operand in operands]
    compared = compare_traces(datasets, reference)
    for warning in compared.warnings:
        print_warning(warning)
    frame = _trace_frame(compared, by)
    check_fail_if(fail_expressions, frame)
    print_rows(frame, format, print_table=lambda console: print_traces(compared, console, by.value))
    if output:
        from overlap_sweep.compare.charts import trace_charts

        _write(output, trace_summary(compared), frame, trace_charts(compared) if plots else [], format)
    fail_for(compared.problems)
    fail_if(fail_expressions, frame, "rows")


def _trace_frame(compared: TraceComparison, by: By) -> pd.DataFrame:
    from overlap_sweep.compare import trace_rows
    from overlap_sweep.report.frame import to_frame

    if by in (By.phase, By.rank):
        rows = trace_rows.quantity_rows(compared, by_rank=by is By.rank)
        if not rows:
            raise UserError("--by rank: the traces don't tell their ranks, or are of different ones; use --by phase.")
        return to_frame(rows, trace_rows.QUANTITY_COLUMNS)
    grouping: Any = by.value
    return to_frame(trace_rows.part_rows(compared, grouping), trace_rows.PART_COLUMNS)


def _write(
    directory: Path,
    summary: dict[str, Any],
    frame: pd.DataFrame,
    charts: Sequence[Chart],
    format: TableFormat,
    summary_file: str | None = None,
) -> None:
    from overlap_sweep.compare.files import SUMMARY_FILE, write_files
    from overlap_sweep.report.console import console_for
    from overlap_sweep.report.text import print_written

    written = write_files(directory, summary, frame, charts, summary_file or SUMMARY_FILE)
    print_written(written, console_for(sys.stdout if format is TableFormat.table else sys.stderr))
