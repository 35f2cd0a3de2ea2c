"""Training runs in comparisons: matches runs, and compares every quantity of their telemetry with its noise. A single
directory is reported alone. Histories have the step time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console

from overlap_sweep.errors import UserError
from overlap_sweep.report import comparison
from overlap_sweep.report.charts import Axis, Line, LinePoint, Lines
from overlap_sweep.report.console import print_lines, print_table
from overlap_sweep.report.numbers import counted, shortened, some_of
from overlap_sweep.report.table import Column, Listing, Table, attribute
from overlap_sweep.results.comparable import Comparable
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import launch_commands
from overlap_sweep.results.records import Records
from overlap_sweep.results.verdict import MARGIN, differ, mean_ratio, ratio
from overlap_sweep.study.section import comparing
from overlap_sweep.workloads.fsdp.runs import QUANTITIES, STEPS, Dataset, Run, pairs, read_dataset
from overlap_sweep.workloads.fsdp.study import STUDY

_TIMES = ("step_ms", "compute_ms", "comm_ms", "exposed_comm_ms", "time_us", "none_us", "floor_us")
LOWER_BETTER = {*_TIMES, "peak_memory_gb"}
HIGHER_BETTER = {"hidden_comm_fraction", "overlap_ratio", "samples_per_s", "speedup", "hidden_fraction"}
UNKNOWN = Estimate(math.nan, math.nan, 0)
Verdict = Literal["better", "worse", "same", "lower", "higher"]
"""`lower` and `higher` are for quantities where neither is better."""

_ANOTHER_MODEL = ("model.", "ranking.")
_WORK = (*_ANOTHER_MODEL, "training.batch_size", "training.gradient_accumulation", "precision", "ranks")
"""Settings, or prefixes of their names, that change the amount of work."""
_NAMES_ONLY = ("model.name", "model.source")

FEW_RUNS = 3
"""Number of runs up to which all quantities are printed; of more runs only step times, unless `--by point`."""
HEADLINES = ("step_ms", "exposed_comm_ms", "hidden_comm_fraction", "samples_per_s", "floor_us")
"""Quantities whose ratios are in the answer."""
MOST_POINTS = 720
"""Points of a line in a chart; longer runs are thinned out."""
MOST_PANELS = 30
LONGEST_WORD = 60
LINES = (
    ("step_ms", "step, slowest rank", "ink"),
    ("compute_ms", "computation", "gemm"),
    ("comm_ms", "communication", "comm"),
    ("hidden_comm_ms", "overlapped", "series4"),
    ("exposed_comm_ms", "exposed", "bad"),
)
"""Quantity, name and colour of the lines of a timeline."""
OVERLAID = {
    "step_ms": Axis("step time, ms", from_zero=True),
    "hidden_comm_fraction": Axis("hidden communication, %", format=".0%", domain=(0.0, 1.0)),
}


@dataclass(frozen=True)
class Match:
    """A run and the matching run of the reference; None if the run is reported alone."""

    dataset: str
    reference: str
    ours: Run
    theirs: Run | None = None

    @cached_property
    def settings(self) -> dict[str, dict[str, object]]:
        """Returns the settings that differ, with values by label, the reference's first: knobs if known, `ranks`."""
        own, others = ({**run.settings, "ranks": run.num_ranks} for run in (self.ours, self.theirs or self.ours))
        # Logs without a result only have the number of ranks.
        names = own.keys() & others.keys() if min(len(own), len(others)) == 1 else {**others, **own}
        return {
            name: {self.reference: others.get(name), self.dataset: own.get(name)}
            for name in names
            if own.get(name) != others.get(name)
        }

    @property
    def different_work(self) -> list[str]:
        """Returns the differing settings that change the amount of work; empty if both do the same work."""
        return [name for name in self.settings if name.startswith(_WORK) and name not in _NAMES_ONLY]

    @cached_property
    def quantities(self) -> dict[str, QuantityRatio]:
        """Returns the quantities that either run has, in order; both have `step_ms`."""
        ours, theirs = self.ours.estimates, self.theirs.estimates if self.theirs else {}
        known = [name for name in QUANTITIES if name in ours or name in theirs]
        return {name: QuantityRatio(self, name, ours.get(name, UNKNOWN), theirs.get(name, UNKNOWN)) for name in known}

    @property
    def summary(self) -> dict[str, object]:
        """Returns what summary.json has of it."""
        return {
            "reference_run": self.theirs and self.theirs.name,
            "settings_that_differ": self.settings,
            "different_work": self.different_work,
            "quantities": {
                name: {"ratio": one.ratio, "noise": one.ratio_noise, "verdict": one.verdict}
                for name, one in self.quantities.items()
            },
        }


@dataclass(frozen=True)
class QuantityRatio:
    """One quantity of a run and of the reference's run; NaN for a run that lacks it."""

    match: Match
    quantity: str
    ours: Estimate
    theirs: Estimate

    @property
    def judged(self) -> bool:
        """Returns whether one may be better: not if the runs did different work."""
        work = self.match.different_work
        return not work or (self.quantity == "samples_per_s" and not any(o.startswith(_ANOTHER_MODEL) for o in work))

    @property
    def ratio(self) -> float:
        """Returns the ratio to the reference; NaN if undefined."""
        return ratio(self.ours.time_us, self.theirs.time_us)

    @property
    def ratio_noise(self) -> float:
        """Returns the half-width: both relative noises in quadrature. NaN if the ratio or a noise is."""
        shares = (one.noise_us / (one.time_us or math.nan) for one in (self.ours, self.theirs))
        return abs(self.ratio) * math.hypot(*shares)

    @property
    def verdict(self) -> Verdict | None:
        """Returns `same` unless `verdict.differ` says otherwise. None if a noise is unknown."""
        if math.isnan(self.ours.noise_us + self.theirs.noise_us):
            return None
        if not differ(self.ours, self.theirs):
            return "same"
        lower = self.ours.time_us < self.theirs.time_us
        if not self.judged or self.quantity not in LOWER_BETTER | HIGHER_BETTER:
            return "lower" if lower else "higher"
        return "better" if lower == (self.quantity in LOWER_BETTER) else "worse"


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


ROWS: Table[QuantityRatio] = Table(
    "rows",
    "one row per quantity and run; values are medians, units are in the quantities' names",
    (
        *(attribute(name, kind="text", read=f"match.{name}") for name in ("dataset", "reference")),
        attribute("run", kind="text", read="match.ours.name"),
        Column("reference_run", lambda row: row.match.theirs.name if row.match.theirs else None, kind="text"),
        attribute("quantity", kind="text", header="quantity"),
        attribute("reference_value", read="theirs.time_us", header="reference", show=_number),
        attribute("reference_noise", read="theirs.noise_us", header="noise", show=_number, dropped=3),
        attribute("value", read="ours.time_us", header="value", show=_number),
        attribute("noise", read="ours.noise_us", header="noise", show=_number, dropped=2),
        comparison.ratio_column("ratio", lambda row: row.ratio, "ratio"),
        attribute("ratio_noise", header="noise", show=comparison.as_ratio, dropped=1),
        attribute("verdict", kind="text", header="verdict"),
    ),
)


@dataclass(frozen=True)
class RunComparison:
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
    def every_match(self) -> list[Match]:
        return [match for matches in self.matches.values() for match in matches]


def compare(
    operands: Sequence[tuple[str, Path]], reference: str, candidate: str | None = None, *, all_runs: bool = False
) -> comparison.Comparison:
    """Compares directories with telemetry, given with their labels, with the one labelled `reference`: `candidate`, or
    else all others. `all_runs`: tables have every quantity of each run. UserError if no run of any is in the
    reference."""
    compared = match_runs([read_dataset(*operand) for operand in operands], reference, candidate)
    datasets = compared.datasets
    return comparison.Comparison(
        table=ROWS,
        rows=[row for match in compared.every_match for row in match.quantities.values()],
        show=lambda console: _print(compared, console, all_runs),
        summary=lambda: summary(compared),
        charts=lambda: [*map(_timeline, datasets), *([_overlay(compared)] if compared.candidates else [])],
        problems=[problem for dataset in datasets for problem in dataset.problems],
        headlines=[_headline(compared, label) for label in compared.candidates],
        warnings=[warning for dataset in datasets for warning in dataset.warnings],
        summary_file="summary.json",
        details={one.label: Listing(STEPS, [step for run in one.runs for step in run.steps]) for one in datasets},
    )


def match_runs(datasets: Sequence[Dataset], reference: str, candidate: str | None = None) -> RunComparison:
    """Returns the comparison with the dataset labelled `reference`. UserError if no run of any is in the reference."""
    base = next(dataset for dataset in datasets if dataset.label == reference)
    if len(datasets) == 1:
        alone = [Match(reference, reference, run) for run in base.runs]
        return RunComparison([base], reference, {reference: alone}, [])
    matches, unmatched = {}, []
    for dataset in datasets:
        if dataset is base or candidate not in (None, dataset.label):
            continue
        found = [Match(dataset.label, reference, *pair) for pair in pairs(dataset.runs, base.runs)]
        matches[dataset.label] = found
        ours, theirs = ({getattr(match, side).name for match in found} for side in ("ours", "theirs"))
        for one, other, matched in ((base, dataset, theirs), (dataset, base, ours)):
            if only := [run.name for run in one.runs if run.name not in matched]:
                unmatched.append(f"{len(only)} only in {one.label}, not in {other.label}: {some_of(only)}.")
    if not any(matches.values()):
        raise UserError(
            f"No runs match: {' '.join(unmatched)} Give runs with equal names or equal swept settings, or one run each."
        )
    return RunComparison(list(datasets), reference, matches, unmatched)


def settings_throughout(matches: Sequence[Match]) -> dict[str, dict[str, object]]:
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


def summary(compared: RunComparison) -> dict[str, object]:
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
                "machine": dataset.machine,
                "commands": launch_commands([run.point for run in dataset.runs if run.point]),
                "runs": {run.name: run.summary for run in dataset.runs},
                "ratios": {match.ours.name: match.summary for match in matches.get(dataset.label, [])},
                "mean_ratios": mean_ratios(matches.get(dataset.label, [])),
                "problems": dataset.problems,
                "warnings": dataset.warnings,
            }
            for dataset in compared.datasets
        },
        "unmatched": compared.unmatched,
    }


def _print(compared: RunComparison, console: Console, all_runs: bool) -> None:
    """Prints the answer, then the quantities of each run; of many runs only step times unless `all_runs`."""
    for label in compared.candidates:
        console.print(f"\n{label} against {compared.reference}", style="bold")
        print_lines([_answer(compared.matches[label])], console)
    for dataset in compared.datasets:
        runs = counted(len(dataset.runs), "run")
        print_lines([f"{dataset.label}: {dataset.path}, {runs}, on {dataset.machine}"], console)
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
            for name, values in common.items():
                text = comparison.by_label({label: [value] for label, value in values.items()})
                print_lines([f"{name}: {text}"], console)
    console.print()
    ratios = f" ratio: value / {compared.reference}'s. same: within the noise of both, or within {MARGIN:.1%}."
    note = f"Medians over the steps, without warm-up and profiled steps.{ratios if compared.candidates else ''}"
    print_lines([*compared.unmatched, note], console, indent=0)


def _print_table(title: str, rows: Sequence[QuantityRatio], console: Console) -> None:
    """Prints a table; without a title each row begins with its run."""
    # A run that is reported alone has no reference.
    columns = ROWS.columns if any(row.match.theirs for row in rows) else Listing(ROWS, rows).columns
    run = () if title else (attribute("", read="match.ours.name", kind="text", header="run"),)
    print_table(title, (*run, *columns), rows, console, style=lambda row: comparison.verdict_style(row.verdict))


def _headline(compared: RunComparison, label: str) -> str:
    steps = [match.quantities["step_ms"] for match in compared.matches[label]]
    times = [[(one.ours, one.theirs)] for one in steps if one.judged]
    if not times:
        return f"{label} and {compared.reference} have no runs of the same work in common."
    runs = f" in the geometric mean of {len(times)} runs" if len(times) > 1 else ""
    return f"{comparison.mean_change(times).in_words(label, compared.reference)}, by the step time{runs}."


def _answer(matches: Sequence[Match]) -> str:
    if not matches:
        return "No runs match."
    found = [match.quantities["step_ms"].verdict for match in matches]
    numbers = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in get_args(Verdict) if verdict in found)
    ratios = mean_ratios(matches)
    means = ", ".join(f"{name} {comparison.as_ratio(ratios[name])}" for name in HEADLINES if name in ratios)
    different = sum(bool(match.different_work) for match in matches)
    work = f" ({different} with different work)" if different else ""
    return f"{counted(len(matches), 'matching run')}{work}. Step time: {numbers}. Geometric mean ratios: {means}."


def _timeline(dataset: Dataset) -> comparison.Chart:
    panels = [
        _lines(run, Axis("time, ms", from_zero=True), [(run, *line) for line in LINES])
        for run in dataset.runs[:MOST_PANELS]
    ]
    title = f"{shortened(dataset.label, LONGEST_WORD)}: breakdown of the step time"
    explained = "Mean over the ranks; step: the slowest rank. Without warm-up."
    return comparison.Chart(comparison.timeline_file(dataset.label), panels, title, [explained])


def _overlay(compared: RunComparison) -> comparison.Chart:
    panels = []
    for match in compared.every_match[:MOST_PANELS]:
        assert match.theirs
        both = ((match.theirs, match.reference, "series1"), (match.ours, match.dataset, "series2"))
        for quantity, axis in OVERLAID.items():
            # The hidden share is undefined without communication.
            if all(run.known(quantity) for run, *_ in both):
                lines = [(run, quantity, shortened(label, LONGEST_WORD), colour) for run, label, colour in both]
                panels.append(_lines(match.ours, axis, lines))
    title = shortened(f"{', '.join(compared.candidates)} against {compared.reference}", LONGEST_WORD)
    explained = "Step time of the slowest rank, and hidden share of communication; without warm-up."
    return comparison.Chart("overlay.png", panels, title, [explained])


def _lines(named: Run, y: Axis, lines: Sequence[tuple[Run, str, str, str]]) -> Lines:
    """Returns a panel, thinned to at most MOST_POINTS. `lines`: run, quantity, name and colour of each."""
    drawn = []
    for run, quantity, name, colour in lines:
        known = list(run.known(quantity).items())[:: math.ceil(len(run.counted) / MOST_POINTS)]
        drawn.append(Line(name, [LinePoint(*point) for point in known], colour, shape=""))
    return Lines(named.name[-LONGEST_WORD:], "", Axis("global step"), y, drawn)


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns nothing: training runs are compared by their telemetry."""
    trained = any(point.workload == "fsdp" and point.status == "ok" for point in points)
    copy = "to compare them, copy the rank_<r>_metrics.jsonl files of their run directories too."
    return Comparable([], lacking=f"has training results without telemetry; {copy}" if trained else "")


COMPARED = replace(
    comparing(STUDY),
    measured=measured,
    telemetry=comparison.Telemetry(compare, {"of telemetry": ROWS, "of telemetry, file of its steps": STEPS}),
)
