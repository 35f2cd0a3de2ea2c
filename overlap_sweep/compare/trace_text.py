"""Comparisons of traces for people: the times of every phase, and what they went to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from overlap_sweep.compare.tables import as_ratio, counted, print_table, styled
from overlap_sweep.compare.trace_pairs import TraceDataset
from overlap_sweep.compare.trace_parts import PartMatch
from overlap_sweep.compare.traces import QuantityMatch, TraceComparison
from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import PASS_WORDS, as_us

FEW_KERNELS = 15

PHASE_NAMES = {**PASS_WORDS, "recompute": "recomputation", "all": "whole iteration"}


def print_traces(comparison: TraceComparison, console: Console, by: str = "phase") -> None:
    """The quantities of every phase over the ranks or of each, and what the time went to: by class, and by `by`."""
    for label in comparison.candidates:
        console.print(f"\n{label} against {comparison.reference}", style="bold")
        print_lines([_pairing(comparison, label)], console)
        print_lines(
            [_trace_line(dataset) for dataset in comparison.datasets if dataset.label in (label, comparison.reference)],
            console,
        )
        quantities = [match for match in comparison.quantities if match.dataset == label]
        wanted = [match for match in quantities if (match.rank is not None) == (by == "rank")]
        if by in ("phase", "rank"):
            _print_quantities(wanted, comparison.reference, label, console)
        parts = [part for part in comparison.parts if part.dataset == label and part.phase == "all"]
        classes = [part for part in parts if part.by == "class"]
        _print_parts("Classes of kernels, whole iteration", classes, comparison.reference, label, None, console)
        if by in ("kernel", "stream"):
            chosen = [part for part in parts if part.by == by]
            title = f"{by.capitalize()}s, whole iteration"
            _print_parts(title, chosen, comparison.reference, label, None, console)
        else:
            kernels = [part for part in parts if part.by == "kernel" and part.change != "same"]
            title = "Kernels that changed most, whole iteration"
            _print_parts(title, kernels, comparison.reference, label, FEW_KERNELS, console)
    print_lines(comparison.unmatched, console)
    console.print()
    notes = [
        f"Medians over iterations{' and ranks' if by != 'rank' else ''}; ratio: over {comparison.reference}'s.",
        "same: the iterations of both overlap.",
    ]
    print_lines(notes, console, indent=0)


def _pairing(comparison: TraceComparison, label: str) -> str:
    ranks = [pair.rank for pair in comparison.pairs[label]]
    if all(rank is not None for rank in ranks):
        return f"matched by rank: {', '.join(map(str, ranks))}"
    return "one trace of each" if len(ranks) == 1 else f"{len(ranks)} traces of each, matched by their order"


def _trace_line(dataset: TraceDataset) -> str:
    iterations = {len({row.iteration for row in file.steady_rows}) for file in dataset.files}
    counts = " to ".join(map(str, sorted({min(iterations), max(iterations)})))
    noun = "iteration" if iterations == {1} else "iterations"
    return f"{dataset.label}: {dataset.path}, {counted(len(dataset.files), 'trace')}, {counts} {noun}"


def _print_quantities(matches: Sequence[QuantityMatch], theirs: str, ours: str, console: Console) -> None:
    headers = ["quantity", theirs, ours, "difference", "ratio"]
    groups: dict[tuple[int | None, str], list[QuantityMatch]] = {}
    for match in matches:
        groups.setdefault((match.rank, match.phase), []).append(match)
    for (rank, phase), group in groups.items():
        rows = [
            [
                match.quantity.replace("_us", " us"),
                _number(match.quantity, match.reference_value),
                _number(match.quantity, match.value),
                _number(match.quantity, match.difference, signed=True),
                as_ratio(match.ratio),
            ]
            for match in group
        ]
        title = f"{'' if rank is None else f'Rank {rank}, '}{PHASE_NAMES[phase]}"
        print_table(title[:1].upper() + title[1:], headers, rows, {"quantity"}, console)


def _number(quantity: str, value: float | None, signed: bool = False) -> str:
    if value is None or math.isnan(value):
        return "-"
    sign = "+" if signed else ""
    if quantity.endswith("_us"):
        return f"{value:{sign},.1f}"
    return f"{value:{sign}.2f}" if quantity.endswith("ratio") else f"{value:{sign}g}"


def _print_parts(
    title: str, parts: Sequence[PartMatch], theirs: str, ours: str, most: int | None, console: Console
) -> None:
    if not parts:
        return
    what = parts[0].by
    shown = parts[:most]
    numbers = [f"{theirs} us", f"{ours} us", "difference", "ratio", "runs", "change"]
    rows: list[list[str | Text]] = [
        [
            as_us(part.reference_busy_us),
            as_us(part.busy_us),
            f"{part.difference_us:+,.1f}",
            as_ratio(part.ratio),
            f"{part.reference_num_events:g} to {part.num_events:g}",
            styled(part.change),
            part.name,
        ]
        for part in shown
    ]
    # Kernels' names are longer than any terminal is wide, so they are last and the only ones to be cut.
    print_table(title, [*numbers, what], rows, {"change", what}, console, ("runs", "ratio"), cut=what)
    if len(shown) < len(parts):
        print_lines([f"... and {len(parts) - len(shown)} more; --by {what} prints all of them"], console)
