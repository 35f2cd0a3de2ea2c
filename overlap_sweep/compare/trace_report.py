"""Says and shows what traces that are compared differ by: tables, sentences, charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console

from overlap_sweep.compare.traces import (
    Match,
    Pair,
    PartMatch,
    QuantityMatch,
    TraceComparison,
    by_iteration,
    compare_traces,
    computation_us,
    computing_kernels,
    read_trace_dataset,
    shared_computation,
)
from overlap_sweep.errors import UserError
from overlap_sweep.report.charts import TICK, Axis, Dot, Key, Row, Rows
from overlap_sweep.report.comparison import Chart, Comparison, mean_change, ratio_column, ratios_file, verdict_style
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import as_us, shortened
from overlap_sweep.report.table import Column, Listing, Table, attribute
from overlap_sweep.results.estimate import estimate
from overlap_sweep.trace.files import rank_of, startup_warnings
from overlap_sweep.trace.kernel_classes import function_name

FEW_KERNELS = 15
LONGEST_KERNEL = 90
LEAST_SHARED, MOST_TIMES = 0.9, 1.8
"""Least share of the computation in kernels that both run as often, and how many times as long these may take, where
both do the same work. Of 33 pairs of recordings that differ in one setting the shares are 0.99 or more and the times at
most 1.46; of 45 pairs of unlike trainings the shares are at most 0.75, but for one of the same model (1.0)."""
CHARTED = ("span_us", "gemm_us", "comm_us", "overlap_us", "exposed_comm_us", "wait_us", "idle_us")

_PHASE = "fwd, bwd, recompute (part of bwd), or all (the whole iteration)."
RATIO: Column = ratio_column(
    "ratio", lambda match: match.ratio, "ratio", about="The value / the reference's.", dropped=2
)
_WHO = (attribute("dataset", kind="text"), attribute("reference", kind="text"))
QUANTITIES: Table[QuantityMatch] = Table(
    "rows",
    "one row per quantity, phase and dataset, per rank or over all ranks",
    (
        *_WHO,
        attribute("rank", kind="count", header="rank"),
        attribute("phase", _PHASE, kind="text", header="phase"),
        attribute("quantity", kind="text", header="quantity"),
        attribute("reference_value", header="reference", show="{:,.6g}".format),
        attribute("value", header="value", show="{:,.6g}".format),
        attribute("difference", header="difference", show="{:+,.6g}".format),
        RATIO,
        Column("ratio_low", lambda match: match.ratio_ends[0], "Lower end of the ratio's 95 % confidence interval."),
        Column("ratio_high", lambda match: match.ratio_ends[1], "Upper end of it."),
        attribute(
            "change", "higher or lower beyond the noise, same, or unknown.", kind="text", header="change", dropped=1
        ),
    ),
)
PARTS: Table[PartMatch] = Table(
    "rows",
    "one row per kernel class, kernel or stream, phase and dataset",
    (
        *_WHO,
        attribute("phase", _PHASE, kind="text"),
        attribute("by", kind="text"),
        attribute("kind", "Class of the kernels: gemm, comm, wait, compute or memory; empty for a stream.", "text"),
        attribute("library", kind="text"),
        attribute("reference_busy_us", read="reference_value", header="reference us"),
        attribute("busy_us", read="value", header="busy us"),
        attribute("difference_us", read="difference", header="difference", show="{:+,.1f}".format),
        RATIO,
        attribute("reference_num_events", header="reference runs", show="{:g}".format, dropped=1),
        attribute("num_events", header="runs", show="{:g}".format, dropped=1),
        attribute("change", kind="text", header="change"),
        # Kernel names are wider than any terminal, so this column is last and the only one that is cut.
        attribute("name", kind="text", header="name"),
    ),
)


def compare(operands: Sequence[tuple[str, Path, Sequence[Path]]], reference: str, by: str) -> Comparison:
    """Compares traces, given as label, directory or file, and its traces. UserError where no rank is in common.
    `by`: phase, rank, class, kernel or stream."""
    compared = compare_traces([read_trace_dataset(*operand) for operand in operands], reference)
    table: Table = QUANTITIES if by in ("phase", "rank") else PARTS
    rows: Sequence[Match] = compared.quantities_by(by) if table is QUANTITIES else compared.parts_by(by)
    if by == "rank" and not rows:
        raise UserError("--by rank: the traces record no ranks, or different ones; use --by phase.")
    files = [file for dataset in compared.datasets for file in dataset.files]
    return Comparison(
        table=table,
        rows=rows,
        show=lambda console: _print(compared, console, by),
        summary=lambda: _summary(compared),
        charts=lambda: [
            Chart(ratios_file(label, list(compared.pairs)), [_dots(compared, label)]) for label in compared.pairs
        ],
        problems=[problem for dataset in compared.datasets for problem in dataset.problems],
        headlines=_headlines(compared),
        cautions=_cautions(compared),
        warnings=[*(warning for file in files for warning in file.warnings), *startup_warnings(files)],
    )


def _headlines(compared: TraceComparison) -> list[str]:
    """Returns how much faster each dataset is than the reference; of two ranks of one run, what they compute."""
    return [
        sentence
        for label, pairs in compared.pairs.items()
        for sentence in (
            _ranks_of_one_run(compared, label, pairs[0])
            if label in compared.one_run
            else [_headline(label, compared.reference, pairs)]
        )
    ]


def _headline(label: str, reference: str, pairs: Sequence[Pair]) -> str:
    sides = ([pair.ours for pair in pairs], [pair.theirs for pair in pairs])
    return _changed(label, reference, *(by_iteration(files, "all", "active_us") for files in sides))


def _changed(label: str, reference: str, ours_us: Sequence[float], theirs_us: Sequence[float]) -> str:
    change = mean_change([[(estimate(ours_us), estimate(theirs_us))]])
    medians = f"{as_us(median(ours_us))} us an iteration against {as_us(median(theirs_us))} us"
    return f"{change.in_words(label, reference)}: {medians}, medians of {len(ours_us)} and {len(theirs_us)}."


def _ranks_of_one_run(compared: TraceComparison, label: str, pair: Pair) -> list[str]:
    reference, ours, theirs = compared.reference, rank_of(pair.ours), rank_of(pair.theirs)
    said = [
        f"{label} and {reference} are ranks {ours} and {theirs} of one run, which wait for each other: their "
        "iterations take equally long whoever is late, and who communicates longer waits. diagnose says who is late, "
        "and why."
    ]
    ours_us, theirs_us = computation_us([pair.ours]), computation_us([pair.theirs])
    if ours_us and theirs_us and median(ours_us) and median(theirs_us):
        said.append(_changed(f"{label}'s computation", f"{reference}'s", ours_us, theirs_us))
    for part in computing_kernels(compared, label)[:1]:
        if part.num_events != part.reference_num_events:
            name = shortened(function_name(part.name) or part.name, LONGEST_KERNEL)
            runs = f"{part.num_events:g} runs an iteration against {part.reference_num_events:g}"
            said.append(f"The kernel that differs most is {name}: {runs}, {part.difference:+,.0f} us.")
    return said


def _cautions(compared: TraceComparison) -> list[str]:
    """Returns a sentence for each dataset that may not do the reference's work."""
    found = []
    for label in (each for each in compared.pairs if each not in compared.one_run):
        share, times = shared_computation(computing_kernels(compared, label))
        who = f"{label} and {compared.reference}"
        if share < LEAST_SHARED:
            why = f"at most {share:.0%} of what they compute is in kernels that both run as often"
        elif not 1 / MOST_TIMES < times < MOST_TIMES:
            why = f"the kernels that both run take {times:.2f} times as long in {label}"
        else:
            continue
        found.append(
            f"{who} may not do the same work: {why}. Where models, shapes, precisions or devices differ, their times "
            "say nothing about settings."
        )
    return found


def _summary(compared: TraceComparison) -> dict[str, object]:
    return {
        "kind": "traces",
        "reference": compared.reference,
        "datasets": {
            dataset.label: {
                "path": str(dataset.path),
                "files": [str(file.path) for file in dataset.files],
                "ranks": [file.rank for file in dataset.files],
                "startup_iterations": max(len(file.startup) for file in dataset.files),
            }
            for dataset in compared.datasets
        },
        "quantities": QUANTITIES.records(compared.quantities_by("phase")),
        "classes": PARTS.records(compared.parts_by("class")),
        "unmatched": compared.unmatched,
    }


def _print(compared: TraceComparison, console: Console, by: str) -> None:
    """Prints the quantities of every phase, and the times of kernel classes, kernels or streams of the whole
    iteration."""
    for label, pairs in compared.pairs.items():
        console.print(f"\n{label} against {compared.reference}", style="bold")
        ranks = ", ".join(str(pair.rank) for pair in pairs if pair.rank is not None)
        print_lines([f"matched by rank: {ranks}" if ranks else "one trace each"], console)
        if by in ("phase", "rank"):
            listing = Listing(QUANTITIES, [match for match in compared.quantities_by(by) if match.dataset == label])
            print_table("", listing.columns, listing.rows, console, group=lambda match: (match.rank, match.phase))
        parts = [part for part in compared.parts if part.dataset == label and part.phase == "all"]
        _print_parts("Kernel classes", [part for part in parts if part.by == "class"], console)
        if by in ("kernel", "stream"):
            _print_parts(f"{by.capitalize()}s", [part for part in parts if part.by == by], console)
        else:
            changed = [part for part in parts if part.by == "kernel" and part.change != "same"]
            _print_parts("Kernels that changed most", changed[:FEW_KERNELS], console)
            if len(changed) > FEW_KERNELS:
                print_lines([f"... and {len(changed) - FEW_KERNELS} more; --by kernel prints all"], console)
    print_lines(compared.unmatched, console)
    console.print(f"\nMedians. ratio: value / {compared.reference}'s value. same: the iterations' times overlap.")


def _print_parts(title: str, parts: Sequence[PartMatch], console: Console) -> None:
    if parts:
        title = f"{title}, whole iteration"
        print_table(title, PARTS.columns, parts, console, style=lambda part: verdict_style(part.change), cut_last=True)


def _dots(compared: TraceComparison, label: str) -> Rows:
    rows: list[Row] = []
    for match in compared.quantities_by("phase"):
        if match.dataset != label or match.quantity not in CHARTED:
            continue
        ours, theirs = match.value or 0.0, match.reference_value or 0.0
        worse = ours < theirs if match.quantity == "overlap_us" else ours > theirs
        own = "wait" if ours == theirs else "bad" if worse else "good"
        dots = [Dot(theirs, colour="ink", shape=TICK), Dot(ours, colour=own)]
        cell = "new" if math.isnan(match.ratio) else f"{match.ratio:.2f}x"
        rows.append(Row(name=f"{match.phase} {match.quantity.removesuffix('_us')}", dots=dots, cells=[cell]))
    return Rows(
        title=f"{label} against {compared.reference}",
        subtitle="medians over iterations and ranks; number: ratio",
        axis=Axis("time, us", from_zero=True),
        columns=["ratio"],
        rows=rows,
        legend=[
            Key(compared.reference, "ink", shape=TICK),
            Key(f"{label}, better", "good", shape="circle"),
            Key(f"{label}, worse", "bad", shape="circle"),
            Key(f"{label}, same", "wait", shape="circle"),
        ],
    )
