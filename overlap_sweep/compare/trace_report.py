"""Comparisons of traces as they are shown and written: the times of every phase, and what they went to."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from overlap_sweep.compare.traces import (
    PHASES,
    PartMatch,
    QuantityMatch,
    TraceComparison,
    TraceDataset,
    compare_traces,
    own_medians,
    read_trace_dataset,
)
from overlap_sweep.errors import UserError
from overlap_sweep.report import charts
from overlap_sweep.report.charts import Axis, Dot, DotRow, Dots, Key, Line, LinePoint, Lines
from overlap_sweep.report.comparison import (
    Chart,
    Comparison,
    ratio_column,
    ratios_file,
    timeline_file,
    verdict_style,
)
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import PASS_WORDS, as_sentence, as_us, counted
from overlap_sweep.report.table import Column, Table, attribute
from overlap_sweep.trace import TraceRow

FEW_KERNELS = 15
PHASE_NAMES = {**PASS_WORDS, "recompute": "recomputation", "all": "whole iteration"}
CHART_NAMES = {
    "span_us": "whole span",
    "gemm_busy_us": "GEMM",
    "comm_busy_us": "communication",
    "overlap_us": "both at once",
    "exposed_comm_us": "exposed communication",
    "wait_us": "waiting",
    "idle_us": "idle",
}
LINES = {"gemm_busy_us": "gemm", "comm_busy_us": "comm", "overlap_us": "series4", "exposed_comm_us": "bad"}
"""The colours of a timeline by quantity."""


def _of_both(name: str) -> tuple[Column[PartMatch], Column[PartMatch]]:
    return attribute(name, read=f"ours.{name}"), attribute(f"reference_{name}", read=f"theirs.{name}")


RATIO: Column[Any] = ratio_column("ratio", lambda match: match.ratio, "ratio", dropped=2)
CHANGE = attribute("change", kind="text", header="change")
_WHO = (attribute("dataset", kind="text"), attribute("reference", kind="text"))
QUANTITIES: Table[QuantityMatch] = Table(
    "rows",
    "one row per quantity, phase and dataset, of each rank or over the ranks",
    (
        *_WHO,
        *(attribute("rank", kind="count"), attribute("phase", kind="text"), attribute("quantity", kind="text")),
        *(attribute("value"), attribute("reference_value"), attribute("difference"), RATIO),
    ),
)
PARTS: Table[PartMatch] = Table(
    "rows",
    "one row per class of kernels, kernel or stream, phase and dataset",
    (
        *_WHO,
        *(attribute(name, kind="text") for name in ("phase", "by", "kind", "library", "name")),
        *(
            *_of_both("busy_us"),
            attribute("difference_us"),
            RATIO,
            CHANGE,
            *_of_both("total_us"),
            *_of_both("num_events"),
        ),
    ),
)


def compare(operands: Sequence[tuple[str, Path, Sequence[Path]]], reference: str, by: str) -> Comparison:
    """Compares traces: labels, directories or files, and the traces that these have. UserError where no rank is in
    both. Rows are `by` phase, rank, class, kernel or stream."""
    compared = compare_traces([read_trace_dataset(*operand) for operand in operands], reference)
    rows: Sequence[Any]
    if by in ("phase", "rank"):
        table, rows = QUANTITIES, [match for match in compared.quantities if (match.rank is not None) == (by == "rank")]
    else:
        table, rows = PARTS, [part for part in compared.parts if part.by == by]  # type: ignore[assignment]
    if by == "rank" and not rows:
        raise UserError("--by rank: the traces don't tell their ranks, or are of different ones; use --by phase.")
    return Comparison(
        table=table,
        rows=rows,
        show=lambda console: _print(compared, console, by, rows),
        summary=lambda: _summary(compared),
        charts=lambda: _charts(compared),
        problems=compared.problems,
        warnings=compared.warnings,
    )


def _summary(compared: TraceComparison) -> dict[str, Any]:
    """Each dataset's medians by phase, and how they relate."""
    datasets: dict[str, Any] = {
        dataset.label: {
            "path": str(dataset.path),
            "files": [str(file.path) for file in dataset.files],
            "ranks": [file.rank for file in dataset.files],
            "iterations": max(len({row.iteration for row in file.steady_rows}) for file in dataset.files),
            "startup_iterations": max(len(file.startup) for file in dataset.files),
            "phases": own_medians(dataset),
            "ratios": {},
        }
        for dataset in compared.datasets
    }
    for match in compared.quantities:
        if match.rank is None:
            datasets[match.dataset]["ratios"].setdefault(match.phase, {})[match.quantity] = match.ratio
    classes = [part for part in compared.parts if part.by == "class"]
    return {
        "kind": "traces",
        "reference": compared.reference,
        "datasets": datasets,
        "classes": [
            {**row, "iterations_apart": part.apart} for row, part in zip(PARTS.records(classes), classes, strict=True)
        ],
        "unmatched": compared.unmatched,
    }


def _print(compared: TraceComparison, console: Console, by: str, rows: Sequence[Any]) -> None:
    """The quantities of every phase over the ranks or of each, and what the time went to: by class, and by `by`."""
    reference = compared.reference
    for label, pairs in compared.pairs.items():
        console.print(f"\n{label} against {reference}", style="bold")
        ranks = [pair.rank for pair in pairs]
        pairing = "one trace of each" if len(ranks) == 1 else f"{len(ranks)} traces of each, matched by their order"
        if all(rank is not None for rank in ranks):
            pairing = f"matched by rank: {', '.join(map(str, ranks))}"
        datasets = [dataset for dataset in compared.datasets if dataset.label in (label, reference)]
        print_lines([pairing, *map(_trace_line, datasets)], console)
        if by in ("phase", "rank"):
            _print_quantities([match for match in rows if match.dataset == label], reference, label, console)
        parts = [part for part in compared.parts if part.dataset == label and part.phase == "all"]
        _print_parts("Classes of kernels", [part for part in parts if part.by == "class"], None, console)
        if by in ("kernel", "stream"):
            _print_parts(f"{by.capitalize()}s", [part for part in parts if part.by == by], None, console)
        else:
            kernels = [part for part in parts if part.by == "kernel" and part.change != "same"]
            _print_parts("Kernels that changed most", kernels, FEW_KERNELS, console)
    print_lines(compared.unmatched, console)
    console.print()
    notes = [
        f"Medians over iterations{' and ranks' if by != 'rank' else ''}; ratio: over {reference}'s.",
        "same: the iterations of both overlap.",
    ]
    print_lines(notes, console, indent=0)


def _trace_line(dataset: TraceDataset) -> str:
    iterations = {len({row.iteration for row in file.steady_rows}) for file in dataset.files}
    counts = " to ".join(map(str, sorted({min(iterations), max(iterations)})))
    noun = "iteration" if iterations == {1} else "iterations"
    return f"{dataset.label}: {dataset.path}, {counted(len(dataset.files), 'trace')}, {counts} {noun}"


def _print_quantities(matches: Sequence[QuantityMatch], theirs: str, ours: str, console: Console) -> None:
    columns: tuple[Column[QuantityMatch], ...] = (
        Column("", lambda match: match.quantity.replace("_us", " us"), kind="text", header="quantity"),
        Column("", lambda match: _number(match.quantity, match.reference_value), header=theirs),
        Column("", lambda match: _number(match.quantity, match.value), header=ours),
        Column("", lambda match: _number(match.quantity, match.difference, sign="+"), header="difference"),
        ratio_column("", lambda match: match.ratio, "ratio"),
    )
    groups: dict[tuple[int | None, str], list[QuantityMatch]] = defaultdict(list)
    for match in matches:
        groups[match.rank, match.phase].append(match)
    for (rank, phase), group in groups.items():
        title = f"{'' if rank is None else f'Rank {rank}, '}{PHASE_NAMES[phase]}"
        print_table(as_sentence(title), columns, group, console)


def _number(quantity: str, value: float | None, sign: str = "") -> str:
    if value is None or math.isnan(value):
        return "-"
    if quantity.endswith("_us"):
        return f"{value:{sign},.1f}"
    return f"{value:{sign}.2f}" if quantity.endswith("ratio") else f"{value:{sign}g}"


def _print_parts(title: str, parts: Sequence[PartMatch], most: int | None, console: Console) -> None:
    """Of the whole iteration. Kernels' names are longer than any terminal is wide, so they are last and the only ones
    to be cut."""
    if not parts:
        return
    what, shown = parts[0].by, parts[:most]
    columns: tuple[Column[PartMatch], ...] = (
        attribute("", read="theirs.busy_us", header=f"{parts[0].reference} us", show=as_us),
        attribute("", read="ours.busy_us", header=f"{parts[0].dataset} us", show=as_us),
        Column("", lambda part: f"{part.difference_us:+,.1f}", header="difference"),
        RATIO,
        Column("", lambda part: f"{part.theirs.num_events:g} to {part.ours.num_events:g}", header="runs", dropped=1),
        CHANGE,
        attribute("", read="name", kind="text", header=what),
    )

    def style(part: PartMatch) -> str:
        return verdict_style(part.change)

    print_table(f"{title}, whole iteration", columns, shown, console, style=style, cut_last=True)
    if len(shown) < len(parts):
        print_lines([f"... and {len(parts) - len(shown)} more; --by {what} prints all of them"], console)


def _charts(compared: TraceComparison) -> list[Chart]:
    """Returns the times of each dataset beside the reference's, and the iterations of each one by one."""
    labels = list(compared.pairs)
    ratios = [
        Chart(ratios_file(label, labels), [_quantity_dots(compared.quantities, label, compared.reference)])
        for label in labels
    ]
    whole = {dataset.label: _whole_iterations(dataset) for dataset in compared.datasets}
    most_us = max(getattr(row, name) for rows in whole.values() for row in rows for name in LINES)
    timelines = [
        Chart(timeline_file(dataset.label), [_iteration_lines(dataset, whole[dataset.label], most_us)])
        for dataset in compared.datasets
    ]
    return [*ratios, *timelines]


def _quantity_dots(quantities: Sequence[QuantityMatch], label: str, reference: str) -> Dots:
    """Returns for each phase the times of both, and their ratios."""
    found = {(m.phase, m.quantity): m for m in quantities if m.dataset == label and m.rank is None}
    rows: list[DotRow] = []
    for phase in PHASES:
        of_phase = [(name, found[phase, key]) for key, name in CHART_NAMES.items() if (phase, key) in found]
        if of_phase:
            rows.append(DotRow(name=PHASE_NAMES[phase], bold=True))
        rows += [_quantity_row(name, match) for name, match in of_phase if match.value or match.reference_value]
    most_ms = max(dot.at for row in rows for dot in row.dots)
    return Dots(
        title=f"{label} against {reference}",
        subtitle="medians over iterations and ranks; number: ratio of the two",
        axis=Axis("ms", domain=(0.0, most_ms * 1.05)),
        columns=[charts.Column("ratio")],
        rows=rows,
        legend=[
            Key(reference, "ink", shape="ring"),
            Key(f"{label}, better", "good", shape="dot"),
            Key(f"{label}, worse", "bad", shape="dot"),
            Key(f"{label}, the same", "wait", shape="dot"),
        ],
        connected=True,
    )


def _quantity_row(name: str, match: QuantityMatch) -> DotRow:
    ours, theirs = (match.value or 0.0) / 1000, (match.reference_value or 0.0) / 1000
    worse = ours > theirs if match.quantity != "overlap_us" else ours < theirs
    own = "wait" if ours == theirs else "bad" if worse else "good"
    ratio = "new" if math.isnan(match.ratio) else f"{match.ratio:.2f}x"
    dots = [Dot(theirs, colour="ink", shape="ring"), Dot(ours, colour=own)]
    return DotRow(name=name, dots=dots, cells=[ratio])


def _whole_iterations(dataset: TraceDataset) -> list[TraceRow]:
    return [row for file in dataset.files for row in file.rows if row.phase == "all"]


def _iteration_lines(dataset: TraceDataset, rows: Sequence[TraceRow], most_us: float) -> Lines:
    """Returns medians over the ranks, with their range."""
    by_iteration: dict[int, list[TraceRow]] = defaultdict(list)
    for row in rows:
        by_iteration[row.iteration].append(row)
    lines = []
    for quantity, colour in LINES.items():
        times_ms = {n: [getattr(row, quantity) / 1000 for row in by_iteration[n]] for n in sorted(by_iteration)}
        points = [LinePoint(n, statistics.median(of), min(of), max(of)) for n, of in times_ms.items()]
        lines.append(Line(CHART_NAMES[quantity], points, colour))
    ranks = f"{len(dataset.files)} ranks: medians, and from the lowest to the highest" if len(dataset.files) > 1 else ""
    return Lines(
        title=f"{dataset.label}, iteration by iteration",
        subtitle=ranks,
        x=Axis("iteration"),
        y=Axis("ms, whole iteration", domain=(0.0, most_us / 1000 * 1.06)),
        lines=lines,
    )
