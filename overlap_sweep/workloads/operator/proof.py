"""What the tuner proved: its configuration against everything else, side by side on the whole layer.

A trial is one of the tuner's layer points as it was found, its variants under the names that reports use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from overlap_sweep.overlap.overlap_cfg import (
    ASYNC_TP_BACKEND,
    DEFAULT,
    FLOOR,
    NONE,
    SWITCH_DEFAULTS,
    TUNED,
    OverlapConfig,
    named,
)
from overlap_sweep.results.points import Case, Point
from overlap_sweep.results.records import LayerTrial, TunerRecord
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes
from overlap_sweep.workloads.layer.section import Comparison, LayerAnalysis, VariantRow, analyse_layer, compare, labels

NO_OVERLAP = OverlapConfig({}, {**SWITCH_DEFAULTS, "tp_comm_overlap": False})


@dataclass(frozen=True)
class Trial:
    """One trial, whatever its outcome."""

    tp_size: int
    name: str
    """Of the run directory."""
    point: Point | None
    """None where nothing is there that can be read."""
    layer: LayerAnalysis | None = None
    """Of the point under the labels; None unless it is ok."""
    names: dict[str, str] = field(default_factory=dict)
    """By label, its name in the point."""
    times: dict[str, VariantTimes] = field(default_factory=dict)
    """By label, of every variant that was measured."""
    warnings: list[str] = field(default_factory=list)
    """The point's, one sentence each: also why a variant was not measured."""

    @property
    def rows(self) -> dict[str, VariantRow]:
        """Returns the rows by label, in the order of measuring."""
        return {row.name: row for row in self.layer.rows} if self.layer else {}

    @property
    def configs(self) -> dict[str, OverlapConfig]:
        """Returns by label how each measured variant overlaps; without the floor."""
        return {
            label: OverlapConfig(times.settings, {**SWITCH_DEFAULTS, **times.switches})
            if self.names[label] != NONE
            else NO_OVERLAP
            for label, times in self.times.items()
            if label != FLOOR
        }

    @property
    def why_not_ok(self) -> str:
        """Returns in words why a trial has no `layer`."""
        if not self.point or not self.point.result:
            return f"the layer {self.name} left no results"
        what = {"skipped": "was skipped", "timeout": "timed out"}.get(self.point.status, "failed")
        return f"the layer {what}: {self.point.why_not_ok}"

    @property
    def started(self) -> str:
        """Returns the start time, UTC, ISO 8601; empty if unknown."""
        return (self.point and self.point.result and self.point.result.started) or ""


def read_trial(trial: LayerTrial, directory: Path, points: Mapping[Path, Point]) -> Trial:
    """Returns the trial. `directory` is tuner.json's; `points` are all layers by their run directory."""
    point = points.get(directory / trial.point)
    found = Trial(trial.tp_size, trial.point, point)
    if not point or not point.result or point.status != "ok":
        return found
    measured = point.measured_as(LayerTimes)
    names = labels(trial, measured.variants)
    # The tuned configuration of a layer that should not overlap is `none` under another label.
    times = {label: measured.variants[name] for label, name in names.items()}
    relabelled = structs.replace(point.result, measured=structs.replace(measured, variants=times))
    return replace(
        found,
        layer=analyse_layer(replace(point, result=relabelled)),
        names=names,
        times=times,
        warnings=[_with_labels(warning, trial.variants) for warning in point.result.warnings],
    )


def _with_labels(sentence: str, variants: Mapping[str, str]) -> str:
    """Returns the sentence with labels in place of file names, which are long and unfamiliar."""
    for label, name in sorted(variants.items(), key=lambda item: -len(item[1])):
        if name.startswith("file:"):
            sentence = sentence.replace(name, label)
    return sentence


@dataclass(frozen=True)
class Proof:
    """The whole layer, tuned, against all alternatives."""

    tp_size: int
    directory: Path
    """Of the tuner's sweep."""
    case: Case
    trial: Trial
    layer: LayerAnalysis
    """The trial's."""
    against: dict[str, Comparison]
    """By label of every other variant that can be used and was measured: the tuned one's whole time over its."""
    best_other: str
    """The fastest of those."""
    together: list[Trial]
    """Combinations of settings that ran side by side before it."""

    @property
    def decisive(self) -> Comparison:
        """Returns the tuned variant's whole time over the best other's."""
        return self.against[self.best_other]

    @property
    def recommended(self) -> str:
        """Returns a label: `tuned` if it is faster than the best of the others beyond the noise, else that other."""
        return TUNED if self.decisive.faster else self.best_other

    @property
    def config(self) -> OverlapConfig:
        """Returns the recommended configuration."""
        return self.trial.configs[self.recommended]

    @property
    def verdict(self) -> str:
        """Returns the verdict in a sentence."""
        backend = self.case.backend
        compared = self.decisive.in_words(f" than {spoken(self.best_other, backend)}")
        return f"tuned is {compared}: {advised(self.recommended, backend)}."


@dataclass(frozen=True)
class Unproven:
    """A TP size for which a tuner measured operators or planned a proof, without proving anything."""

    tp_size: int
    directory: Path
    """Of the tuner's sweep."""
    case: Case | None
    """None where none of the cases of operators is the layer's."""
    reason: str
    """In words, without a full stop."""
    trial: Trial | None
    """The layer that should have proven it; None where none was run."""
    together: list[Trial]
    instead: OverlapConfig | None = None
    """What to train with, since the tuner's configuration was refuted; None where it was merely not measured."""
    advice: str = ""
    """The same in words."""

    @property
    def verdict(self) -> str:
        """Returns the verdict in a sentence."""
        return f"not proven on the whole layer: {self.reason}{f': {self.advice}' if self.advice else ''}."


Outcome = Proof | Unproven


def spoken(label: str, backend: str) -> str:
    """Returns a variant's name for use in a sentence."""
    return "the default" if named(label, backend) == DEFAULT else named(label, backend)


def advised(label: str, backend: str) -> str:
    """Returns what to do if this variant is the best."""
    if backend == ASYNC_TP_BACKEND:
        switched = {DEFAULT: "switch async TP on", NONE: "leave async TP off"}
        return switched.get(label, "no switch of PyTorch's gives that")
    return "don't overlap" if label == NONE else f"use {spoken(label, backend)}"


def outcomes(
    tuners: Mapping[Path, TunerRecord], points: Sequence[Point], cases: Mapping[Case, Sequence[Point]]
) -> list[Outcome]:
    """Returns, for every TP size that a tuner measured in every case, what it proved, or why it proved nothing.

    `tuners` by the sweep's directory; `points` are all; `cases` the operators' that may be compared.
    """
    layers = {point.directory: point for point in points if point.workload == "layer"}
    found: list[Outcome] = []
    for directory, record in tuners.items():
        own = [
            (case, int(point.config["tp_size"]))
            for case, of_case in cases.items()
            for point in of_case
            if point.directory.parent == directory
        ]
        trials: dict[str, dict[tuple[Case | None, int], list[Trial]]] = {}
        for kind, recorded in (("together", record.together), ("proof", record.proofs)):
            by_case = trials[kind] = defaultdict(list)
            for one in recorded:
                trial = read_trial(one, directory, layers)
                by_case[_case_of(trial, cases, own), trial.tp_size].append(trial)
        measured = [(case, size) for case, size in own if size > 1]
        for key in dict.fromkeys([*measured, *trials["together"], *trials["proof"]]):
            case, tp_size = key
            tried, proofs = trials["together"].get(key, []), trials["proof"].get(key, [])
            found += [_judged(trial, directory, case, tried) for trial in proofs]
            if not proofs:
                reason = _why_no_proof(record, case, tp_size)
                found.append(Unproven(tp_size, directory, case, reason, None, tried))
    return found


def standing(found: Sequence[Outcome]) -> Outcome:
    """Returns the latest proof among the outcomes of one case and TP size, or else the latest attempt."""
    return max(found, key=lambda one: (isinstance(one, Proof), one.trial.started if one.trial else ""))


def _case_of(trial: Trial, cases: Mapping[Case, Sequence[Point]], own: Sequence[tuple[Case, int]]) -> Case | None:
    """Returns the operators' case that is the layer's. A layer that never ran does not know all of its own: it is the
    only case of its sweep with its model, if there is but one."""
    point = trial.point
    if point and (point.case in cases or trial.layer):
        return point.case if point.case in cases else None
    possible = {case for case, _ in own if not point or case.model == point.case.model}
    return possible.pop() if len(possible) == 1 else None


def _judged(trial: Trial, directory: Path, case: Case | None, together: list[Trial]) -> Outcome:
    def unproven(reason: str, instead: str | None = None) -> Unproven:
        config = trial.configs.get(instead, NO_OVERLAP) if instead else None
        advice = advised(instead, trial.point.config["backend"] if trial.point else "") if instead else ""
        return Unproven(trial.tp_size, directory, case, reason, trial, together, config, advice)

    if not trial.layer:
        return unproven(trial.why_not_ok)
    if case is None:
        return unproven("none of the operators that were measured are of its case")
    others = [label for label in trial.configs if label != TUNED and not trial.times[label].launch_bound]
    if TUNED not in trial.times:
        # The tuner leaves it out only after the layer failed with it.
        said = (warning for warning in trial.warnings if warning.startswith(f"{TUNED} "))
        reason = next(said, "tuned was not measured").rstrip(".")
        return unproven(reason, _best_of(others, trial) if others else NONE)
    if trial.times[TUNED].launch_bound:
        return unproven("tuned was launch-bound, its time says nothing about the device")
    if not others:
        return unproven("nothing that tuned could be compared with was measured, or all of it was launch-bound")
    against = _compare(trial, TUNED, others, len(others))
    return Proof(trial.tp_size, directory, case, trial, trial.layer, against, _best_of(others, trial), together)


def _best_of(labels: Sequence[str], trial: Trial) -> str:
    """Returns the fastest, or the first within the noise of it: none before the default, presets last."""
    fastest = min(labels, key=lambda label: trial.times[label].times["all"].median_us)
    order = sorted(labels, key=lambda label: (label != NONE, label != DEFAULT))
    to_others = _compare(trial, fastest, order)
    return next(label for label in order if not to_others[label].faster)


def _compare(trial: Trial, one: str, others: Sequence[str], tried: int = 1) -> dict[str, Comparison]:
    """Compares one variant with each of the others."""
    assert trial.point
    times = [(trial.times[one], trial.times[other]) for other in others]
    return dict(zip(others, compare(times, trial.point.config["runtime"]["device"], tried), strict=True))


def _why_no_proof(record: TunerRecord, case: Case | None, tp_size: int) -> str:
    """Returns the tuner's reason for this TP size, or for its operators."""
    of_size = f"{case.model} TP={tp_size} " if case else f"TP={tp_size} "
    said = [why.rstrip(".") for what, why in record.dropped.items() if f"{what} ".startswith(of_size)]
    return "; ".join(dict.fromkeys(said)) or "the tuner ran no layer at this TP size"
