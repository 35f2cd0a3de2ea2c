"""Training runs in comparisons: matches runs, and compares every quantity of their telemetry with its noise. Also the
step time for histories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.report.comparison import Comparing, Comparison, flat
from overlap_sweep.report.numbers import some_of
from overlap_sweep.report.table import Table
from overlap_sweep.results.comparable import Comparable, Sample
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.nodes import on_nodes
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import differ, mean_ratio, ratio
from overlap_sweep.workloads.fsdp import result as training_result
from overlap_sweep.workloads.fsdp.knobs import knobs_of, setting_in_words
from overlap_sweep.workloads.fsdp.telemetry import Run, read_telemetry
from overlap_sweep.workloads.fsdp.telemetry_steps import QUANTITIES, MeasuredRun, describe_dips, measure

Verdict = Literal["better", "worse", "same", "lower", "higher"]
"""`lower` and `higher` are for quantities where neither is better."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

_ANOTHER_MODEL = ("model.", "ranking.")
_WORK = (*_ANOTHER_MODEL, "training.batch_size", "training.gradient_accumulation", "precision", "ranks")
"""Settings, or prefixes of their names, that change the amount of work."""
_NAMES_ONLY = ("model.name", "model.source")
_KNOBS = (
    "repetition",
    "backend",
    "precision",
    "model",
    "ranking",
    "fsdp",
    "training",
    "distributed",
    "streams",
    "compile",
)


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
    step = training_result.measured(result).step
    ranks = f"{workloads.world_size(result.point)} ranks{on_nodes(workloads.nodes(result.point))}"
    setting = f"{ranks}, {setting_in_words(knobs_of(result.point))}"
    sample = Sample((step["point"],), step["none"].median_us, "step", result.point["workload"]["tokens"])
    return {setting: sample}


def _compare(operands: Sequence[tuple[str, Path]], reference: str, candidate: str | None, all_runs: bool) -> Comparison:
    # History does without charts.
    from overlap_sweep.workloads.fsdp.compare_report import report

    datasets = [read_telemetry_dataset(*operand) for operand in operands]
    return report(compare_telemetry(datasets, reference, candidate), all_runs)


def _table() -> Table[Any]:
    from overlap_sweep.workloads.fsdp.compare_report import ROWS

    return ROWS


COMPARED = Comparing(
    measured,
    samples,
    # Length of the run before its steps are timed, output, profiling and telemetry don't change the step time.
    changes_nothing=("training.max_steps", "training.log_interval", "training.output_dir", "profiling", "telemetry"),
    telemetry=_compare,
    telemetry_table=_table,
)


@dataclass(frozen=True)
class TelemetryDataset:
    """All runs of one operand of a comparison."""

    label: str
    path: Path
    runs: list[MeasuredRun]
    problems: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class QuantityRatio:
    """One quantity of a run and of the reference's run; None for a run that lacks it."""

    dataset: str
    reference: str
    run: str
    reference_run: str
    quantity: str
    ours: Estimate | None
    theirs: Estimate | None
    judged: bool = True
    """False if the runs did different work, so that neither is better."""

    @property
    def ratio(self) -> float:
        """Returns the ratio to the reference; NaN if undefined."""
        return ratio(self.ours.time_us if self.ours else None, self.theirs.time_us if self.theirs else None)

    @property
    def ratio_noise(self) -> float:
        """Returns the half-width: both relative noises in quadrature. NaN if the ratio or a noise is."""
        if not self.ours or not self.theirs:
            return math.nan
        shares = (one.noise_us / (one.time_us or math.nan) for one in (self.ours, self.theirs))
        return abs(self.ratio) * math.hypot(*shares)

    @property
    def verdict(self) -> Verdict | None:
        """Returns `same` unless `verdict.differ` says otherwise. None if a noise is unknown."""
        if not self.ours or not self.theirs or math.isnan(self.ours.noise_us + self.theirs.noise_us):
            return None
        if not differ(self.ours, self.theirs):
            return "same"
        change: Verdict = "lower" if self.ours.time_us < self.theirs.time_us else "higher"
        better = QUANTITIES[self.quantity].better
        if not better or not self.judged:
            return change
        return "better" if change == better else "worse"


@dataclass(frozen=True)
class RunMatch:
    """A run and the matching run of the reference."""

    dataset: str
    reference: str
    ours: MeasuredRun
    theirs: MeasuredRun
    quantities: dict[str, QuantityRatio]
    """Quantities that either run has, in the order of QUANTITIES; both have `step_ms`."""
    settings: dict[str, dict[str, Any]]
    """Settings that differ, with the value by label, the reference's first: knobs if both are known, and `ranks`."""

    @property
    def different_work(self) -> list[str]:
        """Returns the differing settings that change the amount of work; empty if both do the same work."""
        return [name for name in self.settings if name.startswith(_WORK) and name not in _NAMES_ONLY]


@dataclass(frozen=True)
class TelemetryComparison:
    """The comparison of all runs with the reference's."""

    datasets: list[TelemetryDataset]
    reference: str
    candidates: list[str]
    """Labels of the datasets that are compared with the reference."""
    matches: list[RunMatch]
    unmatched: list[str]
    """A sentence for each side that has runs which the other lacks."""

    def of(self, label: str) -> list[RunMatch]:
        return [match for match in self.matches if match.dataset == label]


def read_telemetry_dataset(label: str, path: Path) -> TelemetryDataset:
    """Returns the runs at `path`. UserError if no run can be read, or none has two steps that count."""
    reading = read_telemetry(path)
    problems, warnings, runs = list(reading.problems), list(reading.warnings), []
    for run in map(measure, reading.runs):
        if len(run.numbers) > 1:
            runs.append(run)
            warnings += [describe_dips(run)] if run.dips else []
        else:
            problems.append(
                f"{run.run.directory} has fewer than two steps of all ranks after warm-up, not profiled; train for "
                "more steps."
            )
    if not runs:
        raise UserError(problems[0])
    return TelemetryDataset(label, path, runs, problems, [f"{label}: {warning}" for warning in warnings])


def compare_telemetry(
    datasets: Sequence[TelemetryDataset], reference: str, candidate: str | None = None
) -> TelemetryComparison:
    """Returns the comparison with the dataset labelled `reference`, of `candidate` or else all others. UserError if no
    run of any is in the reference."""
    base = next(dataset for dataset in datasets if dataset.label == reference)
    compared = [one for one in datasets if one is not base and candidate in (None, one.label)]
    pairs = {dataset.label: _pairs(dataset.runs, base.runs) for dataset in compared}
    matches = [_match(label, reference, *pair) for label, of_one in pairs.items() for pair in of_one]
    unmatched = [line for dataset in compared for line in _unmatched(dataset, base, pairs[dataset.label])]
    if not matches:
        raise UserError(
            f"No runs match: {' '.join(unmatched)} Give runs with equal names or equal swept settings, or one run each."
        )
    return TelemetryComparison(list(datasets), reference, list(pairs), matches, unmatched)


def settings_of(run: Run) -> dict[str, Any]:
    """Returns the run's knobs as in result.json, such as `fsdp.forward_prefetch`; empty for logs without a result."""
    if not run.point:
        return {}
    config = run.point.config
    runtime = {"max_connections": config["runtime"].get("max_connections"), "nodes": workloads.nodes(config)}
    return flat({"runtime": runtime, **{name: config[name] for name in _KNOBS if name in config}})


_Pair = tuple[MeasuredRun, MeasuredRun]
"""Ours and the reference's."""


def _pairs(ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun]) -> list[_Pair]:
    """Returns pairs in the order of `theirs`. Single runs are a pair; otherwise runs of the same name match, or, if no
    name is in both, runs with equal swept settings."""
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    by_name = {one.name: one for one in ours}
    pairs = [(by_name[one.name], one) for one in theirs if one.name in by_name]
    return pairs or _pairs_by_settings(ours, theirs)


def _pairs_by_settings(ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun]) -> list[_Pair]:
    """Returns the pairs of runs with equal swept settings; none for logs without results or for ambiguous matches."""
    own, others = ([settings_of(one.run) for one in runs] for runs in (ours, theirs))
    if not all(own) or not all(others):
        return []
    # As text, in which true is not 1.
    swept = [
        name
        for name in set().union(*own, *others)
        if any(len({str(one.get(name)) for one in of_runs}) > 1 for of_runs in (own, others))
    ]
    our_keys, their_keys = ([[str(one.get(name)) for name in swept] for one in of_runs] for of_runs in (own, others))
    return [
        (ours[our_keys.index(key)], one)
        for key, one in zip(their_keys, theirs, strict=True)
        if our_keys.count(key) == their_keys.count(key) == 1
    ]


def _unmatched(dataset: TelemetryDataset, base: TelemetryDataset, pairs: Sequence[_Pair]) -> Iterator[str]:
    """Yields a sentence for each dataset with runs that the other lacks."""
    for one, other, matched in (
        (base, dataset, [theirs.name for _, theirs in pairs]),
        (dataset, base, [ours.name for ours, _ in pairs]),
    ):
        if only := [run.name for run in one.runs if run.name not in matched]:
            yield f"{len(only)} only in {one.label}, not in {other.label}: {some_of(only)}."


def settings_throughout(matches: Sequence[RunMatch]) -> dict[str, dict[str, Any]]:
    """Returns the settings that differ in the same way in every pair."""
    first, *others = (match.settings for match in matches)
    return {name: values for name, values in first.items() if all(one.get(name) == values for one in others)}


def mean_ratios(matches: Sequence[RunMatch]) -> dict[str, float]:
    """Returns the geometric mean of the ratios by quantity, if every run has a ratio above 0."""
    found = {name: [m.quantities[name].ratio for m in matches if name in m.quantities] for name in QUANTITIES}
    return {
        name: mean_ratio(ratios)
        for name, ratios in found.items()
        if ratios and len(ratios) == len(matches) and all(one > 0 for one in ratios)
    }


def _match(label: str, reference: str, ours: MeasuredRun, theirs: MeasuredRun) -> RunMatch:
    own, others = ({**settings_of(one.run), "ranks": one.run.num_ranks} for one in (ours, theirs))
    # Logs without a result only tell the number of ranks.
    names = own.keys() & others.keys() if min(len(own), len(others)) == 1 else {**others, **own}
    settings = {
        name: {reference: others.get(name), label: own.get(name)} for name in names if own.get(name) != others.get(name)
    }
    match = RunMatch(label, reference, ours, theirs, {}, settings)
    work = match.different_work
    for name in QUANTITIES:
        pair = ours.aggregates.get(name), theirs.aggregates.get(name)
        if any(pair):
            judged = not work or (name == "samples_per_s" and not any(one.startswith(_ANOTHER_MODEL) for one in work))
            match.quantities[name] = QuantityRatio(label, reference, ours.name, theirs.name, name, *pair, judged)
    return match
