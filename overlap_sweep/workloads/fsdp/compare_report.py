"""The report of comparisons of training runs: quantities of every run, differing settings, and charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from overlap_sweep.report.charts import Axis, Line, LinePoint, Lines
from overlap_sweep.report.comparison import (
    Chart,
    Comparison,
    as_ratio,
    by_label,
    ratio_column,
    timeline_file,
    verdict_style,
)
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.headline import mean_change
from overlap_sweep.report.numbers import counted, shortened
from overlap_sweep.report.table import Column, Table, attribute
from overlap_sweep.results.provenance import describe_machine, launch_commands
from overlap_sweep.results.verdict import MARGIN
from overlap_sweep.workloads.fsdp.compare import (
    VERDICTS,
    QuantityRatio,
    RunMatch,
    TelemetryComparison,
    TelemetryDataset,
    mean_ratios,
    settings_of,
    settings_throughout,
)
from overlap_sweep.workloads.fsdp.telemetry_steps import QUANTITIES, MeasuredRun

FEW_RUNS = 3
"""Number of runs up to which all quantities are printed; of more runs only step times, unless `--by point`."""
HEADLINES = ("step_ms", "exposed_comm_ms", "hidden_comm_fraction", "samples_per_s", "floor_us")
"""Quantities whose ratios are in the answer."""

MOST_POINTS = 720
"""Points of a line in a chart; longer runs are thinned out."""
MOST_PANELS = 30
LONGEST_WORD = 60
LINES = {
    "step_ms": ("step, slowest rank", "ink"),
    "compute_ms": ("computation", "gemm"),
    "comm_ms": ("communication", "comm"),
    "hidden_comm_ms": ("overlapped", "series4"),
    "exposed_comm_ms": ("exposed", "bad"),
}
"""Name and colour of the lines of a timeline, by quantity."""
OVERLAID = {
    "step_ms": Axis("step time, ms", from_zero=True),
    "hidden_comm_fraction": Axis("hidden communication, %", format=".0%", domain=(0.0, 1.0)),
}


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


C = Column[QuantityRatio]
ROWS: Table[QuantityRatio] = Table(
    "rows",
    "one row per quantity and run; values are medians, units are in the quantities' names",
    (
        *(attribute(name, kind="text") for name in ("dataset", "reference", "run", "reference_run")),
        attribute("quantity", kind="text", header="quantity"),
        C("reference_value", lambda row: row.theirs and row.theirs.time_us, header="reference", show=_number),
        C("reference_noise", lambda row: row.theirs and row.theirs.noise_us, header="noise", show=_number, dropped=3),
        C("value", lambda row: row.ours and row.ours.time_us, header="value", show=_number),
        C("noise", lambda row: row.ours and row.ours.noise_us, header="noise", show=_number, dropped=2),
        ratio_column("ratio", lambda row: row.ratio, "ratio"),
        attribute("ratio_noise", header="noise", show=as_ratio, dropped=1),
        attribute("verdict", kind="text", header="verdict"),
    ),
)


def report(compared: TelemetryComparison, all_runs: bool) -> Comparison:
    """Returns the comparison for display and files; `all_runs`: tables have every quantity of each run."""
    return Comparison(
        table=ROWS,
        rows=[row for match in compared.matches for row in match.quantities.values()],
        show=lambda console: _print(compared, console, all_runs),
        summary=lambda: telemetry_summary(compared),
        charts=lambda: [*map(_timeline, compared.datasets), _overlay(compared)],
        problems=[problem for dataset in compared.datasets for problem in dataset.problems],
        headlines=[_headline(compared, label) for label in compared.candidates],
        warnings=[warning for dataset in compared.datasets for warning in dataset.warnings],
        summary_file="summary.json",
    )


def telemetry_summary(compared: TelemetryComparison) -> dict[str, Any]:
    """Returns the runs of every dataset with aggregates, settings and ratios to the reference, and the machines and
    commands that measured them. NaN for undefined values."""
    return {
        "kind": "telemetry",
        "reference": compared.reference,
        "candidates": compared.candidates,
        "quantities": {name: quantity.meaning for name, quantity in QUANTITIES.items()},
        "datasets": {
            dataset.label: {
                "path": str(dataset.path),
                "machine": _machine(dataset),
                "commands": launch_commands([one.run.point for one in dataset.runs if one.run.point]),
                "runs": {measured.name: _run_summary(measured) for measured in dataset.runs},
                "ratios": {match.ours.name: _match_summary(match) for match in compared.of(dataset.label)},
                "mean_ratios": mean_ratios(compared.of(dataset.label)),
                "problems": dataset.problems,
                "warnings": dataset.warnings,
            }
            for dataset in compared.datasets
        },
        "unmatched": compared.unmatched,
    }


def _match_summary(match: RunMatch) -> dict[str, Any]:
    return {
        "reference_run": match.theirs.name,
        "settings_that_differ": match.settings,
        "different_work": match.different_work,
        "quantities": {
            name: {"ratio": one.ratio, "noise": one.ratio_noise, "verdict": one.verdict}
            for name, one in match.quantities.items()
        },
    }


def _run_summary(measured: MeasuredRun) -> dict[str, Any]:
    return {
        "directory": str(measured.run.directory),
        "ranks": measured.run.ranks,
        "settings": settings_of(measured.run),
        "aggregates": {
            name: {"median": known.time_us, "noise": known.noise_us, "count": known.repeats}
            for name, known in measured.aggregates.items()
        },
        "dips": measured.dips,
    }


def _print(compared: TelemetryComparison, console: Console, all_runs: bool) -> None:
    """Prints the answer, then the quantities of each run; of many runs only step times unless `all_runs`."""
    for label in compared.candidates:
        console.print(f"\n{label} against {compared.reference}", style="bold")
        print_lines([_answer(compared.of(label))], console)
    for dataset in compared.datasets:
        runs = counted(len(dataset.runs), "run")
        print_lines([f"{dataset.label}: {dataset.path}, {runs}, on {_machine(dataset)}"], console)
    for label in compared.candidates:
        matches = compared.of(label)
        if all_runs or len(matches) <= FEW_RUNS:
            for match in matches:
                _print_table(
                    f"{match.ours.name}: {label} against {match.reference}", match.quantities.values(), console
                )
        else:
            _print_table("", [match.quantities["step_ms"] for match in matches], console)
            print_lines(["--by point prints every quantity of each run."], console, indent=0)
        if common := settings_throughout(matches) if matches else {}:
            console.print("\nSettings that differ in all runs:")
            print_lines([f"{name}: {by_label(values)}" for name, values in common.items()], console)
    console.print()
    note = (
        f"Medians over the steps, without warm-up and profiled steps. ratio: value / {compared.reference}'s. "
        f"same: within the noise of both, or within {MARGIN:.1%}."
    )
    print_lines([*compared.unmatched, note], console, indent=0)


def _print_table(title: str, rows: Iterable[QuantityRatio], console: Console) -> None:
    """Prints a table; without a title each row begins with its run."""
    columns = ROWS.columns if title else (attribute("", read="run", kind="text", header="run"), *ROWS.columns)
    print_table(title, columns, list(rows), console, style=lambda row: verdict_style(row.verdict))


def _headline(compared: TelemetryComparison, label: str) -> str:
    """Returns by how much the steps of all runs are faster or slower, a sentence."""
    steps = [match.quantities["step_ms"] for match in compared.of(label)]
    times = [[(one.ours, one.theirs)] for one in steps if one.ours and one.theirs and one.judged]
    if not times:
        return f"{label} and {compared.reference} have no runs of the same work in common."
    runs = f" in the geometric mean of {len(times)} runs" if len(times) > 1 else ""
    return f"{mean_change(times).in_words(label, compared.reference)}, by the step time{runs}."


def _answer(matches: Sequence[RunMatch]) -> str:
    if not matches:
        return "No runs match."
    counts = [match.quantities["step_ms"].verdict for match in matches]
    numbers = ", ".join(f"{counts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in counts)
    ratios = mean_ratios(matches)
    means = ", ".join(f"{name} {as_ratio(ratios[name])}" for name in HEADLINES if name in ratios)
    different = sum(bool(match.different_work) for match in matches)
    work = f" ({different} with different work)" if different else ""
    return f"{counted(len(matches), 'matching run')}{work}. Step time: {numbers}. Geometric mean ratios: {means}."


def _machine(dataset: TelemetryDataset) -> str:
    return describe_machine(next((one.run.environment for one in dataset.runs if one.run.environment), {}))


def _timeline(dataset: TelemetryDataset) -> Chart:
    """Returns the chart of where each step's time went, one panel per run."""
    panels = [
        Lines(
            title=measured.name[-LONGEST_WORD:],
            subtitle="",
            x=Axis("global step"),
            y=Axis("time, ms", from_zero=True),
            lines=[_line(measured, quantity, *named) for quantity, named in LINES.items()],
        )
        for measured in dataset.runs[:MOST_PANELS]
    ]
    title = f"{shortened(dataset.label, LONGEST_WORD)}: breakdown of the step time"
    explained = "Mean over the ranks; step: the slowest rank. Without warm-up."
    return Chart(timeline_file(dataset.label), panels, title, [explained])


def _overlay(compared: TelemetryComparison) -> Chart:
    """Returns the chart of step times and hidden communication of both runs of each pair."""
    panels = []
    for match in compared.matches[:MOST_PANELS]:
        both = ((match.reference, match.theirs, "series1"), (match.dataset, match.ours, "series2"))
        for quantity, axis in OVERLAID.items():
            # The hidden share is undefined without communication.
            if all(quantity in run.steps for _, run, _ in both):
                lines = [_line(run, quantity, shortened(label, LONGEST_WORD), colour) for label, run, colour in both]
                panels.append(Lines(match.ours.name[-LONGEST_WORD:], "", Axis("global step"), axis, lines))
    title = shortened(f"{', '.join(compared.candidates)} against {compared.reference}", LONGEST_WORD)
    explained = "Step time of the slowest rank, and hidden share of communication; without warm-up."
    return Chart("overlay.png", panels, title, [explained])


def _line(measured: MeasuredRun, quantity: str, name: str, colour: str) -> Line:
    """Returns a quantity over the steps that count, thinned to at most MOST_POINTS."""
    values = measured.steps[quantity].tolist()
    every = math.ceil(len(measured.numbers) / MOST_POINTS)
    # JSON has no NaN.
    known = [(n, v) for n, v in zip(measured.numbers, values, strict=True) if not math.isnan(v)]
    return Line(name, [LinePoint(number, value) for number, value in known[::every]], colour, shape="")
