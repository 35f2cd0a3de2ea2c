"""Training runs against each other: which is which, and every quantity of their telemetry with its noise; and a step's
time in its history."""

from __future__ import annotations

import json
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
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.verdict import differ, mean_ratio, ratio
from overlap_sweep.workloads.fsdp import result as training_result
from overlap_sweep.workloads.fsdp.cautions import disagreement, exposed
from overlap_sweep.workloads.fsdp.knobs import knobs_of, setting_in_words
from overlap_sweep.workloads.fsdp.telemetry import Run, read_telemetry
from overlap_sweep.workloads.fsdp.telemetry_steps import (
    QUANTITIES,
    Aggregate,
    MeasuredRun,
    measure,
    select,
    slow_devices,
)

Verdict = Literal["better", "worse", "same", "lower", "higher"]
"""`lower` and `higher` where neither is better."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

_WORK = ("ranking.", "training.batch_size", "training.gradient_accumulation", "precision")
"""Settings, or what their names begin with, that change how much there is to do; the model's sizes and the number of
ranks do, too."""
_ANOTHER_MODEL = ("model.", "ranking.")
_NAMES_ONLY = ("model.name", "model.source")
_KNOBS = ("model", "ranking", "fsdp", "training", "distributed", "streams", "compile")
_WHOLE_KNOBS = ("backend", "precision")


def measured(points: Sequence[Point], records: Records) -> Comparable:
    """Returns nothing: training runs are compared by their telemetry."""
    trained = any(point.workload == "fsdp" and point.status == "ok" for point in points)
    lacking = (
        "has training results without telemetry; copy the rank_<r>_metrics.jsonl of their run directories, too, to "
        "compare them."
    )
    return Comparable([], lacking=lacking if trained else "")


def samples(result: Result) -> dict[str, Sample]:
    """Returns the step: it takes what it takes, whoever limits it."""
    step, knobs = training_result.measured(result).step, knobs_of(result.point)
    setting = f"{workloads.world_size(result.point)} ranks, {setting_in_words(knobs, knobs)}"
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
    # How long it trains before its steps are timed, where that is written, and how it is looked at.
    changes_nothing=("training.max_steps", "training.log_interval", "training.output_dir", "profiling", "telemetry"),
    telemetry=_compare,
    telemetry_table=_table,
)


@dataclass(frozen=True)
class TelemetryDataset:
    """All runs of one operand."""

    label: str
    path: Path
    runs: list[MeasuredRun]
    problems: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class QuantityRatio:
    """One quantity of a run beside the reference's; either is None where only one of them knows it."""

    quantity: str
    ours: Aggregate | None
    theirs: Aggregate | None
    judged: bool = True
    """Otherwise it is neither better nor worse: both did not do the same work."""
    believed: bool = True
    """Otherwise it has no verdict: it follows from marks that disagree with the kernels."""

    @property
    def ratio(self) -> float:
        """NaN where it is undefined."""
        return ratio(self.ours.median if self.ours else None, self.theirs.median if self.theirs else None)

    @property
    def ratio_noise(self) -> float:
        """Half-width: both relative noises, added as independent errors are. NaN where the ratio or a noise is."""
        ours, theirs = (one.estimate if one else None for one in (self.ours, self.theirs))
        if not ours or not theirs:
            return math.nan
        shares = (one.noise_us / (one.time_us or math.nan) for one in (ours, theirs))
        return abs(self.ratio) * math.hypot(*shares)

    @property
    def verdict(self) -> Verdict | None:
        """`same` where `verdict.differ` says so. None where the noise is unknown, and of what is not believed."""
        ours, theirs = (one.estimate if one else None for one in (self.ours, self.theirs))
        if ours is None or theirs is None or not self.believed:
            return None
        if not differ(ours, theirs):
            return "same"
        change: Literal["lower", "higher"] = "lower" if ours.time_us < theirs.time_us else "higher"
        better = QUANTITIES[self.quantity].better
        if not better or not self.judged:
            return change
        return "better" if change == better else "worse"


Differences = dict[str, dict[str, Any]]
"""By setting and label the value, the reference's first."""


@dataclass(frozen=True)
class RunMatch:
    """A run beside the one of the reference that is the same point."""

    dataset: str
    reference: str
    ours: MeasuredRun
    theirs: MeasuredRun
    quantities: dict[str, QuantityRatio]
    """In the order of QUANTITIES, those that either knows; `step_ms` both know."""
    settings: Differences
    """Knobs that differ, where both are known."""
    different_work: Differences
    """Those of them that change how much there is to do, and the `ranks`; empty where both do the same."""

    @property
    def believed(self) -> bool:
        return self.ours.believed and self.theirs.believed


@dataclass(frozen=True)
class TelemetryComparison:
    """All that is known about runs beside each other."""

    datasets: list[TelemetryDataset]
    reference: str
    candidates: list[str]
    """The labels of those that are compared with it."""
    matches: list[RunMatch]
    unmatched: list[str]
    """A sentence for each side that has runs which the other has not."""
    problems: list[str]
    warnings: list[str]

    def of(self, label: str) -> list[RunMatch]:
        return [match for match in self.matches if match.dataset == label]


def read_telemetry_dataset(label: str, path: Path) -> TelemetryDataset:
    """UserError when no run can be read, or none has two steps that count."""
    reading = read_telemetry(path)
    problems, warnings, runs = list(reading.problems), list(reading.warnings), []
    for run in reading.runs:
        selection = select(run)
        if len(selection.measured) < 2:
            problems.append(
                f"{run.directory} has {len(selection.measured) or 'no'} step of all ranks beside warm-up and the "
                "profiler's, too few; train for more."
            )
            continue
        try:
            kernels = exposed(run.point) if run.point else None
        except UserError as error:
            kernels = None
            warnings.append(str(error))
        runs.append(measure(run, selection, kernels))
        if selection.incomplete:
            steps = [str(number) for number in selection.incomplete]
            named = f"step{'s' if len(steps) > 1 else ''} {some_of(steps)}"
            warnings.append(f"{run.name}: {named} left out: not all ranks recorded it.")
        warnings += slow_devices(run, selection.measured)
        if kernels and kernels.disagree:
            warnings.append(disagreement(run.name, kernels))
    if not runs:
        raise UserError(problems[0])
    return TelemetryDataset(label, path, runs, problems, warnings)


def compare_telemetry(
    datasets: Sequence[TelemetryDataset], reference: str, candidate: str | None = None
) -> TelemetryComparison:
    """`reference` and `candidate` are labels; without a candidate all others are compared. UserError where no run of
    any is in the reference."""
    base = next(dataset for dataset in datasets if dataset.label == reference)
    compared = [one for one in datasets if one is not base and candidate in (None, one.label)]
    pairs = {dataset.label: _pairs(dataset.runs, base.runs) for dataset in compared}
    matches = [_match(label, reference, *pair) for label, of_one in pairs.items() for pair in of_one]
    unmatched = [said for dataset in compared for said in _unmatched(dataset, base, pairs[dataset.label])]
    if not matches:
        raise UserError(
            f"No run is in both: {' '.join(unmatched)} Give runs of the same names, or of the same settings but for "
            "those that differ throughout, or one run of each."
        )
    return TelemetryComparison(
        datasets=list(datasets),
        reference=reference,
        candidates=[dataset.label for dataset in compared],
        matches=matches,
        unmatched=unmatched,
        problems=[problem for dataset in datasets for problem in dataset.problems],
        warnings=[f"{dataset.label}: {warning}" for dataset in datasets for warning in dataset.warnings],
    )


def settings_of(run: Run) -> dict[str, Any]:
    """Its knobs, as result.json has them: by `fsdp.forward_prefetch` and the like; empty of logs alone."""
    config = run.point.config if run.point else {}
    nested = {name: config[name] for name in (*_WHOLE_KNOBS, *_KNOBS) if name in config}
    connections = config.get("runtime", {}).get("max_connections")
    return flat(nested) | ({"runtime.max_connections": connections} if config else {})


_Pair = tuple[MeasuredRun, MeasuredRun]
"""Ours and the reference's."""


def _pairs(ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun]) -> list[_Pair]:
    """In the order of `theirs`: one run of each is a pair, else runs of the same name; where no name is in both, runs
    that were given the same of what was swept, whatever differs between the datasets throughout."""
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    by_name = {one.name: one for one in ours}
    pairs = [(by_name[one.name], one) for one in theirs if one.name in by_name]
    return pairs or _pairs_by_settings(ours, theirs)


def _pairs_by_settings(ours: Sequence[MeasuredRun], theirs: Sequence[MeasuredRun]) -> list[_Pair]:
    """None of logs alone, and none of runs that several of a dataset are the same as."""
    own, others = ([_comparable(one.run) for one in runs] for runs in (ours, theirs))
    if not all(own) or not all(others):
        return []
    swept = [
        name
        for name in dict.fromkeys(name for settings in (*own, *others) for name in settings)
        if any(len({settings.get(name) for settings in of_runs}) > 1 for of_runs in (own, others))
    ]
    our_keys, their_keys = ([tuple(map(settings.get, swept)) for settings in of_runs] for of_runs in (own, others))
    return [
        (ours[our_keys.index(key)], one)
        for key, one in zip(their_keys, theirs, strict=True)
        if our_keys.count(key) == their_keys.count(key) == 1
    ]


def _comparable(run: Run) -> dict[str, str]:
    """Settings as text, so that lists can be keys and `true` is not 1; with the repetition, which is none."""
    settings = settings_of(run)
    if run.point and settings:
        settings["repetition"] = run.point.config.get("repetition")
    return {name: json.dumps(value, sort_keys=True) for name, value in settings.items() if value is not None}


def _unmatched(dataset: TelemetryDataset, base: TelemetryDataset, pairs: Sequence[_Pair]) -> Iterator[str]:
    """A sentence for each of the two that has runs which the other has not."""
    for one, other, matched in (
        (base, dataset, [theirs.name for _, theirs in pairs]),
        (dataset, base, [ours.name for ours, _ in pairs]),
    ):
        if only := [run.name for run in one.runs if run.name not in matched]:
            yield f"{len(only)} only in {one.label}, not in {other.label}: {some_of(only)}."


def settings_throughout(matches: Sequence[RunMatch]) -> Differences:
    """The settings that differ in every pair, and in the same way."""
    first = matches[0].settings if matches else {}
    return {
        name: values for name, values in first.items() if all(match.settings.get(name) == values for match in matches)
    }


def mean_ratios(matches: Sequence[RunMatch]) -> dict[str, float]:
    """By quantity the geometric mean over the runs, where every run has a ratio above 0."""
    found = {name: [m.quantities[name].ratio for m in matches if name in m.quantities] for name in QUANTITIES}
    return {
        name: mean_ratio(ratios)
        for name, ratios in found.items()
        if ratios and len(ratios) == len(matches) and all(one > 0 for one in ratios)
    }


def _match(label: str, reference: str, ours: MeasuredRun, theirs: MeasuredRun) -> RunMatch:
    own, others = settings_of(ours.run), settings_of(theirs.run)
    settings = {
        name: {reference: others.get(name), label: own.get(name)}
        for name in dict.fromkeys([*others, *own])
        if own and others and own.get(name) != others.get(name)
    }
    work = {name: values for name, values in settings.items() if _is_work(name)}
    if ours.run.num_ranks != theirs.run.num_ranks:
        work["ranks"] = {reference: theirs.run.num_ranks, label: ours.run.num_ranks}
    believed = ours.believed and theirs.believed
    quantities = {
        name: QuantityRatio(
            name,
            ours.aggregates.get(name),
            theirs.aggregates.get(name),
            judged=not work or (name == "samples_per_s" and not any(map(_is_model, work))),
            believed=believed or not quantity.by_marks,
        )
        for name, quantity in QUANTITIES.items()
        if name in ours.aggregates or name in theirs.aggregates
    }
    return RunMatch(label, reference, ours, theirs, quantities, settings, work)


def _is_work(setting: str) -> bool:
    return setting.startswith(_WORK) or _is_model(setting)


def _is_model(setting: str) -> bool:
    return setting.startswith(_ANOTHER_MODEL) and setting not in _NAMES_ONLY
