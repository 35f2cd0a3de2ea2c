"""Training runs in comparisons: matches runs, and compares every quantity of their telemetry with its noise. A single
directory is reported alone. Histories have the step time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.report.charts import Axis, Line, LinePoint, Lines
from overlap_sweep.report.comparison import (
    Chart,
    Comparing,
    Comparison,
    Telemetry,
    as_ratio,
    by_label,
    ratio_column,
    timeline_file,
    verdict_style,
)
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.headline import mean_change
from overlap_sweep.report.numbers import counted, shortened, some_of
from overlap_sweep.report.table import Column, Listing, Table, attribute
from overlap_sweep.results.comparable import Comparable, Sample
from overlap_sweep.results.nodes import on_nodes
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import describe_machine, launch_commands
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import MARGIN, mean_ratio
from overlap_sweep.workloads.fsdp.config import Resolved
from overlap_sweep.workloads.fsdp.knobs import NAMING, knobs_of
from overlap_sweep.workloads.fsdp.logs import Dataset, read_dataset
from overlap_sweep.workloads.fsdp.result import TrainingRun
from overlap_sweep.workloads.fsdp.runs import QUANTITIES, STEPS, Match, QuantityRatio, Run, Verdict, pairs

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


ROWS: Table[QuantityRatio] = Table(
    "rows",
    "one row per quantity and run; values are medians, units are in the quantities' names",
    (
        *(attribute(name, kind="text", read=f"match.{name}") for name in ("dataset", "reference")),
        attribute("run", kind="text", read="match.ours.name"),
        Column("reference_run", lambda row: row.match.theirs and row.match.theirs.name, kind="text"),
        attribute("quantity", kind="text", header="quantity"),
        attribute("reference_value", read="theirs.time_us", header="reference", show=_number),
        attribute("reference_noise", read="theirs.noise_us", header="noise", show=_number, dropped=3),
        attribute("value", read="ours.time_us", header="value", show=_number),
        attribute("noise", read="ours.noise_us", header="noise", show=_number, dropped=2),
        ratio_column("ratio", lambda row: row.ratio, "ratio"),
        attribute("ratio_noise", header="noise", show=as_ratio, dropped=1),
        attribute("verdict", kind="text", header="verdict"),
    ),
)


@dataclass(frozen=True)
class RunComparison:
    """The comparison of all runs with the reference's."""

    datasets: list[Dataset]
    reference: str
    matches: dict[str, list[Match]]
    """By label of the compared dataset; of a single one, which is the reference itself, each run alone."""
    unmatched: list[str]
    """A sentence for each side that has runs which the other lacks."""

    @property
    def candidates(self) -> list[str]:
        return [label for label in self.matches if label != self.reference]

    @property
    def rows(self) -> list[QuantityRatio]:
        return [row for matches in self.matches.values() for match in matches for row in match.quantities.values()]


def compare(
    operands: Sequence[tuple[str, Path]], reference: str, candidate: str | None = None, *, all_runs: bool = False
) -> Comparison:
    """Compares directories with telemetry, given with their labels, with the one labelled `reference`: `candidate`, or
    else all others. `all_runs`: tables have every quantity of each run. UserError if no run of any is in the
    reference."""
    compared = match_runs([read_dataset(*operand) for operand in operands], reference, candidate)
    return Comparison(
        table=ROWS,
        rows=compared.rows,
        show=lambda console: _print(compared, console, all_runs),
        summary=lambda: summary(compared),
        charts=lambda: [*map(_timeline, compared.datasets), *([_overlay(compared)] if compared.candidates else [])],
        problems=[problem for dataset in compared.datasets for problem in dataset.problems],
        headlines=[_headline(compared, label) for label in compared.candidates],
        warnings=[warning for dataset in compared.datasets for warning in dataset.warnings],
        summary_file="summary.json",
        details={
            dataset.label: Listing(STEPS, [step for run in dataset.runs for step in run.steps])
            for dataset in compared.datasets
        },
    )


def match_runs(datasets: Sequence[Dataset], reference: str, candidate: str | None = None) -> RunComparison:
    """Returns the comparison with the dataset labelled `reference`, of `candidate` or else all others. UserError if no
    run of any is in the reference."""
    base = next(dataset for dataset in datasets if dataset.label == reference)
    if len(datasets) == 1:
        return RunComparison(
            [base], reference, {reference: [Match(reference, reference, run) for run in base.runs]}, []
        )
    compared = [one for one in datasets if one is not base and candidate in (None, one.label)]
    matches = {
        one.label: [Match(one.label, reference, *pair) for pair in pairs(one.runs, base.runs)] for one in compared
    }
    unmatched = [line for dataset in compared for line in _unmatched(dataset, base, matches[dataset.label])]
    if not any(matches.values()):
        raise UserError(
            f"No runs match: {' '.join(unmatched)} Give runs with equal names or equal swept settings, or one run each."
        )
    return RunComparison(list(datasets), reference, matches, unmatched)


def _unmatched(dataset: Dataset, base: Dataset, matches: Sequence[Match]) -> Iterator[str]:
    """Yields a sentence for each of the two with runs that the other lacks."""
    ours = [match.ours.name for match in matches]
    theirs = [match.theirs.name for match in matches if match.theirs]
    for one, other, matched in ((base, dataset, theirs), (dataset, base, ours)):
        if only := [run.name for run in one.runs if run.name not in matched]:
            yield f"{len(only)} only in {one.label}, not in {other.label}: {some_of(only)}."


def settings_throughout(matches: Sequence[Match]) -> dict[str, dict[str, Any]]:
    """Returns the settings that differ in the same way in every pair."""
    first, *others = (match.settings for match in matches)
    return {name: values for name, values in first.items() if all(one.get(name) == values for one in others)}


def mean_ratios(matches: Sequence[Match]) -> dict[str, float]:
    """Returns the geometric mean of the ratios by quantity, if every run has a ratio above 0."""
    found = {name: [m.quantities[name].ratio for m in matches if name in m.quantities] for name in QUANTITIES}
    return {
        name: mean_ratio(ratios)
        for name, ratios in found.items()
        if ratios and len(ratios) == len(matches) and all(one > 0 for one in ratios)
    }


def summary(compared: RunComparison) -> dict[str, Any]:
    """Returns the runs of every dataset with aggregates, settings and ratios to the reference, and the machines and
    commands that measured them. NaN for undefined values."""
    matches = {label: compared.matches[label] for label in compared.candidates}
    return {
        "kind": "telemetry",
        "reference": compared.reference,
        "candidates": compared.candidates,
        "quantities": QUANTITIES,
        "datasets": {
            dataset.label: {
                "path": str(dataset.path),
                "machine": _machine(dataset),
                "commands": launch_commands([run.point for run in dataset.runs if run.point]),
                "runs": {run.name: _run_summary(run) for run in dataset.runs},
                "ratios": {
                    match.ours.name: {
                        "reference_run": match.theirs and match.theirs.name,
                        "settings_that_differ": match.settings,
                        "different_work": match.different_work,
                        "quantities": {
                            name: {"ratio": one.ratio, "noise": one.ratio_noise, "verdict": one.verdict}
                            for name, one in match.quantities.items()
                        },
                    }
                    for match in matches.get(dataset.label, [])
                },
                "mean_ratios": mean_ratios(matches.get(dataset.label, [])),
                "problems": dataset.problems,
                "warnings": dataset.warnings,
            }
            for dataset in compared.datasets
        },
        "unmatched": compared.unmatched,
    }


def _run_summary(run: Run) -> dict[str, Any]:
    return {
        "directory": str(run.directory),
        "ranks": run.ranks,
        "settings": run.settings,
        "aggregates": {
            name: {"median": known.time_us, "noise": known.noise_us, "count": known.repeats}
            for name, known in run.estimates.items()
        },
        "dips": run.dips,
    }


def _print(compared: RunComparison, console: Console, all_runs: bool) -> None:
    """Prints the answer, then the quantities of each run; of many runs only step times unless `all_runs`."""
    for label in compared.candidates:
        console.print(f"\n{label} against {compared.reference}", style="bold")
        print_lines([_answer(compared.matches[label])], console)
    for dataset in compared.datasets:
        runs = counted(len(dataset.runs), "run")
        print_lines([f"{dataset.label}: {dataset.path}, {runs}, on {_machine(dataset)}"], console)
    for label, matches in compared.matches.items():
        if all_runs or len(matches) <= FEW_RUNS:
            for match in matches:
                against = f": {label} against {match.reference}" if match.theirs else ""
                _print_table(f"{match.ours.name}{against}", list(match.quantities.values()), console)
        else:
            _print_table("", [match.quantities["step_ms"] for match in matches], console)
            print_lines(["--by point prints every quantity of each run."], console, indent=0)
        if common := settings_throughout(matches) if matches else {}:
            console.print("\nSettings that differ in all runs:")
            print_lines([f"{name}: {by_label(values)}" for name, values in common.items()], console)
    console.print()
    note = "Medians over the steps, without warm-up and profiled steps."
    if compared.candidates:
        note += f" ratio: value / {compared.reference}'s. same: within the noise of both, or within {MARGIN:.1%}."
    print_lines([*compared.unmatched, note], console, indent=0)


def _print_table(title: str, rows: Sequence[QuantityRatio], console: Console) -> None:
    """Prints a table; without a title each row begins with its run."""
    # A run that is reported alone has no reference.
    columns = ROWS.columns if any(row.match.theirs for row in rows) else Listing(ROWS, rows).columns
    run = () if title else (attribute("", read="match.ours.name", kind="text", header="run"),)
    print_table(title, (*run, *columns), rows, console, style=lambda row: verdict_style(row.verdict))


def _headline(compared: RunComparison, label: str) -> str:
    """Returns by how much the steps of all runs are faster or slower, a sentence."""
    steps = [match.quantities["step_ms"] for match in compared.matches[label]]
    times = [[(one.ours, one.theirs)] for one in steps if one.judged]
    if not times:
        return f"{label} and {compared.reference} have no runs of the same work in common."
    runs = f" in the geometric mean of {len(times)} runs" if len(times) > 1 else ""
    return f"{mean_change(times).in_words(label, compared.reference)}, by the step time{runs}."


def _answer(matches: Sequence[Match]) -> str:
    if not matches:
        return "No runs match."
    found = [match.quantities["step_ms"].verdict for match in matches]
    numbers = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in get_args(Verdict) if verdict in found)
    ratios = mean_ratios(matches)
    means = ", ".join(f"{name} {as_ratio(ratios[name])}" for name in HEADLINES if name in ratios)
    different = sum(bool(match.different_work) for match in matches)
    work = f" ({different} with different work)" if different else ""
    return f"{counted(len(matches), 'matching run')}{work}. Step time: {numbers}. Geometric mean ratios: {means}."


def _machine(dataset: Dataset) -> str:
    return describe_machine(next((run.environment for run in dataset.runs if run.environment), {}))


def _timeline(dataset: Dataset) -> Chart:
    """Returns the chart of where each step's time went, one panel per run."""
    panels = [
        Lines(
            title=run.name[-LONGEST_WORD:],
            subtitle="",
            x=Axis("global step"),
            y=Axis("time, ms", from_zero=True),
            lines=[_line(run, quantity, *named) for quantity, named in LINES.items()],
        )
        for run in dataset.runs[:MOST_PANELS]
    ]
    title = f"{shortened(dataset.label, LONGEST_WORD)}: breakdown of the step time"
    explained = "Mean over the ranks; step: the slowest rank. Without warm-up."
    return Chart(timeline_file(dataset.label), panels, title, [explained])


def _overlay(compared: RunComparison) -> Chart:
    """Returns the chart of step times and hidden communication of both runs of each pair."""
    panels = []
    for match in [match for label in compared.candidates for match in compared.matches[label]][:MOST_PANELS]:
        both = ((match.reference, match.theirs, "series1"), (match.dataset, match.ours, "series2"))
        for quantity, axis in OVERLAID.items():
            # The hidden share is undefined without communication.
            if all(run and len(run.known(quantity)) for _, run, _ in both):
                lines = [
                    _line(run, quantity, shortened(label, LONGEST_WORD), colour) for label, run, colour in both if run
                ]
                panels.append(Lines(match.ours.name[-LONGEST_WORD:], "", Axis("global step"), axis, lines))
    title = shortened(f"{', '.join(compared.candidates)} against {compared.reference}", LONGEST_WORD)
    explained = "Step time of the slowest rank, and hidden share of communication; without warm-up."
    return Chart("overlay.png", panels, title, [explained])


def _line(run: Run, quantity: str, name: str, colour: str) -> Line:
    """Returns a quantity over the steps that count, thinned to at most MOST_POINTS."""
    every = math.ceil(len(run.counted) / MOST_POINTS)
    known = run.known(quantity).iloc[::every]
    points = [LinePoint(number, value) for number, value in zip(known.index.tolist(), known.tolist(), strict=True)]
    return Line(name, points, colour, shape="")


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns nothing: training runs are compared by their telemetry."""
    trained = any(point.workload == "fsdp" and point.status == "ok" for point in points)
    lacking = (
        "has training results without telemetry; to compare them, copy the rank_<r>_metrics.jsonl files of their run "
        "directories too."
    )
    return Comparable([], lacking=lacking if trained else "")


def samples(result: Result) -> dict[str, Sample]:
    """Returns the sample of the step, even if it is launch-bound."""
    step = result.measured_as(TrainingRun).step
    ranks = f"{workloads.world_size(result.recorded)} ranks{on_nodes(workloads.nodes(result.recorded))}"
    setting = f"{ranks}, {NAMING.in_words(knobs_of(result.recorded))}"
    sample = Sample((step["point"],), step["none"].median_us, "step", result.point_as(Resolved).workload.tokens)
    return {setting: sample}


COMPARED = Comparing(
    measured,
    samples,
    # Length of the run before its steps are timed, output, profiling and telemetry don't change the step time.
    changes_nothing=("training.max_steps", "training.log_interval", "training.output_dir", "profiling", "telemetry"),
    telemetry=Telemetry(compare, {"of telemetry": ROWS, "of telemetry, file of its steps": STEPS}),
)
