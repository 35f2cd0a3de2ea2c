"""Kernels for people: which implementation to use at which m, and the table that this comes from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Console

from overlap_sweep.overlap.kernel_shape import COMM_ONLY, GEMM_ONLY, KERNELS, SEQUENTIAL
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import as_percent, as_rate, as_us
from overlap_sweep.report.plain_table import PlainRow, print_table
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import environments
from overlap_sweep.workloads.kernel.answer import (
    DONT_OVERLAP,
    ImplementationRow,
    KernelAnalysis,
    ShapeAnalysis,
    analyse_kernels,
    answers_in_words,
)
from overlap_sweep.workloads.kernel.warnings import warnings

LEFT = ("implementation", "backend", "note")
OPTIONAL = ("error", "noise us", "GB/s", "hidden")
"""What a narrow terminal does without, the first of them first."""


def print_kernels(points: Iterable[Point], console: Console) -> None:
    """Those among them that are kernels, the points of a case together: of a single case heading, answer, table and
    warnings, of several no tables, which would not be read at once."""
    print_analyses(analyse_kernels(points), console, most_tables=1)


def print_analyses(analyses: Sequence[KernelAnalysis], console: Console, most_tables: int | None = None) -> None:
    """The answers of all cases first; then each with its reasons, its table and its warnings. Where there are more than
    `most_tables`, only what to know before believing the answers follows them."""
    if len(analyses) > 1:
        _print_all_answers(analyses, console)
    if most_tables is None or len(analyses) <= most_tables:
        for analysis in analyses:
            print_analysis(analysis, console)
    else:
        print_lines(_warnings_of_all(analyses), console, indent=0)


def print_analysis(analysis: KernelAnalysis, console: Console) -> None:
    """The answer first."""
    console.print(f"\n{title(analysis)}", style="bold")
    print_lines([answers_in_words(analysis)], console)
    print_lines([answer(shape) for shape in analysis.shapes], console, indent=4)
    print_details(analysis, console)
    print_lines(cautions(analysis), console, indent=0)


def _print_all_answers(analyses: Sequence[KernelAnalysis], console: Console) -> None:
    console.print("\nKernels: what to use", style="bold")
    rows = [(shape, answer_cells(analysis, shape, analyses)) for analysis in analyses for shape in analysis.shapes]
    shown = [header for header in rows[0][1] if any(cells[header] for _, cells in rows)]
    table = [PlainRow([cells[header] for header in shown], "green" if overlaps(shape) else "") for shape, cells in rows]
    if not print_table(
        shown, table, ("kernel", "operator", "use"), console, optional=("operator", "time us", "vs bound")
    ):
        for shape, cells in rows:
            chosen = shape.chosen
            gains = [f"{cells['speedup']} {SEQUENTIAL}", f"{as_over(chosen.over_bound)} the bound"] if chosen else []
            told = ", ".join([cells["use"], *gains])
            print_lines([f"{cells['kernel']} m={cells['m']}: {told}"], console)


def answer_cells(analysis: KernelAnalysis, shape: ShapeAnalysis, among: Sequence[KernelAnalysis]) -> dict[str, str]:
    """One m of one of several cases, by header; an empty cell is unknown."""
    chosen, several = shape.chosen, len({one.case.device for one in among}) > 1
    return {
        "kernel": str(analysis.case) if several else analysis.case.brief,
        "operator": ", ".join(analysis.subjects),
        "m": str(shape.m),
        "use": chosen.advice if chosen else "no answer",
        "time us": as_us(chosen.time_us) if chosen else "",
        "speedup": f"{chosen.speedup:.2f}x" if chosen else "",
        "vs bound": f"{chosen.over_bound:+.0%}" if chosen else "",
    }


def overlaps(shape: ShapeAnalysis) -> bool:
    """Whether that is the answer."""
    return shape.chosen is not None and shape.chosen.name != SEQUENTIAL


def _warnings_of_all(analyses: Sequence[KernelAnalysis]) -> list[str]:
    """Each once, with the cases that it is about."""
    found: dict[str, list[str]] = {}
    for analysis in analyses:
        for warning in warnings(analysis):
            found.setdefault(warning, []).append(analysis.case.brief)
    return [f"{', '.join(briefs)}: {warning}" for warning, briefs in found.items()]


def title(analysis: KernelAnalysis) -> str:
    """What was measured, and on what."""
    subjects = f" ({', '.join(analysis.subjects)})" if analysis.subjects else ""
    return f"{analysis.case}{subjects}: {KERNELS[analysis.case.kernel]}"


def answer(shape: ShapeAnalysis) -> str:
    """Of one m, with what it comes from."""
    chosen = shape.chosen
    if chosen is None:
        return f"m={shape.m}: no answer, {shape.reason}"
    if chosen.name == SEQUENTIAL:
        return f"m={shape.m}: {DONT_OVERLAP}, {as_us(chosen.time_us)} us; {shape.reason}"
    return (
        f"m={shape.m}: {chosen.label}, {as_us(chosen.time_us)} us, {chosen.speedup:.2f}x {SEQUENTIAL}, "
        f"hidden {as_percent(chosen.hidden_fraction)}, {as_over(chosen.over_bound)} the bound; {shape.reason}"
    )


def cautions(analysis: KernelAnalysis) -> list[str]:
    """What to know before believing the answers, and what was left out: a sentence each."""
    lines = warnings(analysis)
    if _environments(analysis.points) > 1:
        # Flux's wheels exist for old versions of torch only.
        lines.append(
            "The points were measured in different environments, each beside a sequential of its own; see "
            "tuning_report.json for what differs."
        )
    return [*lines, *_left_out(analysis)]


def _environments(points: Sequence[Point]) -> int:
    """How many, not counting what backends set for themselves, each as it is trained with."""
    found = []
    for environment in environments(points):
        variables = {**environment.get("variables", {}), "CUDA_DEVICE_MAX_CONNECTIONS": None}
        if (alike := {**environment, "variables": variables}) not in found:
            found.append(alike)
    return len(found)


def _left_out(analysis: KernelAnalysis) -> list[str]:
    """What was not timed, but for wrong numbers: a sentence for each reason."""
    found: dict[tuple[str, str], list[int]] = {}
    for shape in analysis.shapes:
        for label, reason in shape.left_out.items():
            if label not in shape.wrong:
                first_line = next(iter(reason.splitlines()), "no reason given")
                found.setdefault((label, first_line), []).append(shape.m)
    return [
        f"Left out: {label} at m={', '.join(map(str, ms))}: {reason.removesuffix('.')}."
        for (label, reason), ms in found.items()
    ]


def note(row: ImplementationRow, shape: ShapeAnalysis) -> str:
    """What tells a row from those that are simply slower."""
    notes = [
        *(["use this"] if row is shape.chosen else []),
        *(["the bound"] if row is shape.binding else []),
        *(["independent"] if row.independent else []),
        *(["launch-bound"] if row.launch_bound else []),
        *(["wrong numbers in another point"] if row.label in shape.wrong else []),
    ]
    return ", ".join(notes)


def as_over(over_bound: float) -> str:
    """`8% above`, `3% below`; of the rows without one `-`."""
    if math.isnan(over_bound):
        return "-"
    return f"{abs(over_bound):.0%} {'above' if over_bound >= 0 else 'below'}"


def print_details(analysis: KernelAnalysis, console: Console) -> None:
    """A row for each implementation at each m, baselines first; on a terminal that is too narrow without some columns,
    or else stacked."""
    rows = [(shape, row, cells(row, shape)) for shape in analysis.shapes for row in shape.rows]
    shown = [header for header in rows[0][2] if any(of_row[header] for _, _, of_row in rows)]
    table = [
        PlainRow(
            [str(shape.m) if row is shape.rows[0] else "", *(of_row[header] for header in shown)],
            "green" if row is shape.chosen else "dim" if row.backend is None else "",
            ends_section=row is shape.rows[-1],
        )
        for shape, row, of_row in rows
    ]
    if not print_table(["m", *shown], table, LEFT, console, OPTIONAL):
        _print_stacked(analysis.shapes, console)
    print_lines([_legend(analysis)], console, indent=0)
    console.print()


def cells(row: ImplementationRow, shape: ShapeAnalysis) -> dict[str, str]:
    """By header; an empty cell is not applicable."""
    is_part = row.name in (GEMM_ONLY, COMM_ONLY) and row.backend is None
    return {
        "implementation": row.name,
        "backend": row.backend or "",
        "time us": as_us(row.time_us),
        "noise us": as_us(row.estimate.noise_us),
        "TFLOP/s": as_rate(row.tflops),
        "GB/s": as_rate(row.link_gb_per_s),
        "hidden": "" if is_part else as_percent(row.hidden_fraction),
        "speedup": "" if is_part else f"{row.speedup:.2f}x",
        "vs bound": "" if is_part else f"{row.over_bound:+.0%}",
        "error": "" if row.relative_error is None else as_error(row.relative_error),
        "note": note(row, shape),
    }


def as_error(relative_error: float) -> str:
    return f"{relative_error:.0e}" if relative_error else "0"


def _legend(analysis: KernelAnalysis) -> str:
    told = (
        "Times are relative to the sequential beside them; TFLOP/s and GB/s (received) are of one rank. The bound is "
        "the longer of the GEMM alone and the communication alone; hidden is (sequential - time) / (sequential - GEMM)."
    )
    if any(row.independent for shape in analysis.shapes for row in shape.rows):
        told += " independent: its GEMM does not wait for its communication, so it is no way to compute this kernel."
    return told


def _print_stacked(shapes: Sequence[ShapeAnalysis], console: Console) -> None:
    for shape in shapes:
        console.print(f"\nm={shape.m}", style="bold")
        for row in shape.rows:
            of_row = cells(row, shape)
            told = f" ({of_row['note']})" if of_row["note"] else ""
            print_lines([f"{row.label}{told}: {of_row['time us']} us, noise {of_row['noise us']}"], console)
            rates = [f"{of_row[unit]} {unit}" for unit in ("TFLOP/s", "GB/s") if of_row[unit]]
            named = [f"{name} {of_row[name]}" for name in ("hidden", "speedup", "vs bound", "error") if of_row[name]]
            print_lines([", ".join([*rates, *named])], console, indent=4)
    console.print()
