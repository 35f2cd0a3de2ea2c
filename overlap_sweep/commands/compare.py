from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from overlap_sweep import workloads
from overlap_sweep.commands import output as out
from overlap_sweep.compare import sweep_report, trace_report
from overlap_sweep.errors import UserError
from overlap_sweep.report.charts.figures import left_out
from overlap_sweep.report.comparison import Comparison, write_files
from overlap_sweep.report.console import console_for, print_lines, print_written
from overlap_sweep.report.table import Table
from overlap_sweep.results.run_directory import find_points, find_telemetry
from overlap_sweep.trace.disk import SUFFIXES, find_traces, refused_links
from overlap_sweep.trace.nsight_files import file_of, paths_in

if TYPE_CHECKING:
    from rich.console import Console


class Kind(StrEnum):
    """Kind of content of an operand; only operands of the same kind are compared."""

    results = "results"
    traces = "traces"
    telemetry = "telemetry"


class Operand(NamedTuple):
    """One of the directories or traces to compare."""

    label: str
    path: Path
    kind: Kind
    traces: list[Path]
    """The trace files; empty for other kinds."""


class By(StrEnum):
    point = "point"
    slot = "slot"
    phase = "phase"
    rank = "rank"
    class_ = "class"
    kernel = "kernel"
    stream = "stream"


ALLOWED_BY = {
    Kind.results: (By.point, By.slot),
    Kind.telemetry: (By.point,),
    Kind.traces: (By.phase, By.rank, By.class_, By.kernel, By.stream),
}


def tables() -> dict[str, Table]:
    """Returns the tables of comparisons, by heading."""
    found: dict[str, Table] = {
        "of points": sweep_report.POINTS,
        "with --by slot": sweep_report.SLOTS,
        "of traces by phase or rank": trace_report.QUANTITIES,
        "of traces by class, kernel or stream": trace_report.PARTS,
    }
    for workload in map(workloads.comparing, workloads.names()):
        if workload and workload.telemetry:
            found |= workload.telemetry.tables
    return found


Command = out.with_columns(tables)


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
    format: out.FormatOption = out.TableFormat.table,
    fail_expressions: Annotated[list[str] | None, out.fail_if_option("ratio > 1.05")] = None,
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
    if plots and not output:
        raise typer.BadParameter("--plots requires --output.")
    compared = comparison(operands, reference, candidate, by)
    for warning in compared.warnings:
        out.print_warning(warning)
    frame = compared.frame()
    out.check_fail_if(fail_expressions, frame)

    def show(console: Console) -> None:
        print_lines([*compared.headlines, *compared.cautions], console, indent=0)
        compared.show(console)

    # Before anything is printed: whoever reads that may stop, as `head` does.
    written = write_files(output, compared, frame, plots) if output else []
    out.print_rows(lambda: frame, format, show)
    if written:
        print_written(written, console_for(sys.stdout if format is out.TableFormat.table else sys.stderr))
        for warning in left_out(page=False, images=plots):
            out.print_warning(warning)
    out.fail_for(compared.problems, answered=not frame.empty)
    out.fail_if(fail_expressions, frame, compared.table.name)


def comparison(written: Sequence[str], reference: str | None, candidate: str | None, by: By | None) -> Comparison:
    """Returns the comparison of what is at the paths, `[LABEL=]PATH` each. UserError where they cannot be compared."""
    operands = find_operands(written)
    if len(operands) == 1 and operands[0].kind is not Kind.telemetry:
        raise typer.BadParameter("give at least two paths to compare.", param_hint="[LABEL=]PATH")
    base, wanted = reference_and_candidate(reference, candidate, operands)
    kind = only_kind(operands)
    if by and by not in ALLOWED_BY[kind]:
        raise UserError(f"--by {by.value} is not for {kind}; choose one of {', '.join(ALLOWED_BY[kind])}.")
    if kind is Kind.telemetry:
        comparing = filter(None, map(workloads.comparing, workloads.names()))
        telemetry = next(one.telemetry for one in comparing if one.telemetry)
        paths = [(one.label, one.path) for one in operands]
        return telemetry.compare(paths, base, wanted, all_runs=by is By.point)
    compared = [operand for operand in operands if wanted is None or operand.label in (base, wanted)]
    if kind is Kind.traces:
        return trace_report.compare([(one.label, one.path, one.traces) for one in compared], base, by or By.phase)
    return sweep_report.compare([(one.label, one.path) for one in compared], base, by)


def find_operands(written: Sequence[str]) -> list[Operand]:
    """Returns the operands. UserError where one is missing, not results, telemetry or traces, or repeats a label."""
    parsed = [label_and_path(one) for one in written]
    short = iter(short_names([path for label, path in parsed if not label]))
    named: dict[str, Path] = {}
    for given, path in parsed:
        label = given or next(short)
        if label in named:
            first = named[label]
            raise UserError(f"{first} and {path} are both called {label}; give them labels, as in a={first} b={path}.")
        named[label] = path
    return [Operand(label, path, *_content(path)) for label, path in named.items()]


def label_and_path(written: str) -> tuple[str | None, Path]:
    """Returns an operand's label, if any, and path: run directories may have `=` in their names."""
    label, equals, path = written.partition("=")
    # Path.exists raises for a label that is longer than any path.
    if os.path.exists(written) or not equals or "/" in label:  # noqa: PTH110
        return None, Path(written)
    if not label or not path:
        raise UserError(f"{written} is not LABEL=PATH; write it as in new=multirun/2026-11-21.")
    return label, Path(path)


def short_names(paths: Sequence[Path]) -> list[str]:
    """Returns the part of each path that distinguishes it: its name, or the folder where they part, such as `r4` and
    `r6` for `/a/r4/tp4` and `/a/r6/tp4`."""
    whole = [path.resolve() for path in paths]
    names = [path.name.removesuffix(".gz").removesuffix(".json") for path in whole]
    levels = zip(*(path.parts for path in whole), strict=False)
    return next((list(level) for level in (names, *levels) if len(set(level)) == len(level)), names)


def _content(path: Path) -> tuple[Kind, list[Path]]:
    """Returns the kind of a path's content, and its traces. A file is a trace; a directory is telemetry of training
    runs if it has any, else results, else traces. UserError where there is neither."""
    if not file_of(path).exists():
        raise UserError(f"{path} does not exist; give a directory with results or traces.")
    if not path.is_dir():
        if path.name.endswith("_metrics.jsonl"):
            raise UserError(f"{path} is the telemetry of one rank; give its directory: {path.parent}.")
        if not file_of(path).name.endswith(SUFFIXES):
            raise UserError(f"{path} is neither results nor a trace; give a directory, or {', '.join(SUFFIXES)} files.")
        return Kind.traces, paths_in(path)
    if find_telemetry(path):
        return Kind.telemetry, []
    if find_points(path):
        return Kind.results, []
    if refused := refused_links(path):
        raise UserError(refused[0])
    if found := find_traces(path):
        return Kind.traces, found
    raise UserError(f"{path} holds neither results nor traces; give a directory that launch.py wrote, or traces.")


def only_kind(operands: Sequence[Operand]) -> Kind:
    """Returns the kind of all operands. UserError where they are of several kinds."""
    first = operands[0]
    for other in operands:
        if other.kind != first.kind:
            found = f"{first.path} holds {first.kind} and {other.path} holds {other.kind}"
            both_may_be_runs = Kind.traces not in (first.kind, other.kind)
            hint = ", and copy the rank_<r>_metrics.jsonl files too" if both_may_be_runs else ""
            raise UserError(f"{found}; compare like with like{hint}.")
    return first.kind


def reference_and_candidate(
    reference: str | None, candidate: str | None, operands: Sequence[Operand]
) -> tuple[str, str | None]:
    """Returns the labels of both, each named by its label or path. The default reference is the first that is not the
    candidate; no candidate means all others. UserError for an unknown name, or the same name for both."""
    candidate_label = None if candidate is None else _label_of("--candidate", candidate, operands)
    others = (operand.label for operand in operands if operand.label != candidate_label)
    default = next(others, operands[0].label)
    reference_label = default if reference is None else _label_of("--reference", reference, operands)
    if reference_label == candidate_label:
        raise UserError(f"--candidate {candidate} is also the reference; choose another.")
    return reference_label, candidate_label


def _label_of(option: str, wanted: str, operands: Sequence[Operand]) -> str:
    for operand in operands:
        if wanted in (operand.label, str(operand.path)) or Path(wanted).resolve() == operand.path.resolve():
            return operand.label
    labels = ", ".join(operand.label for operand in operands)
    raise UserError(f"{option} {wanted} is not among the operands; choose one of {labels}.")
