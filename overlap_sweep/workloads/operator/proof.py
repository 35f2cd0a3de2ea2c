"""What the tuner proved: its configuration against all alternatives, side by side on the whole layer.

A trial is one of the tuner's layer points, with its variants under the labels that reports use.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from overlap_sweep.overlap.models import WHOLE, part
from overlap_sweep.overlap.overlap_cfg import (
    ASYNC_TP_BACKEND,
    DEFAULT,
    FILE,
    FLOOR,
    NONE,
    NONE_IN_WORDS,
    SWITCH_DEFAULTS,
    TUNED,
    OverlapConfig,
    spoken,
)
from overlap_sweep.report.numbers import counted
from overlap_sweep.results.gain import Gain, nothing_beat
from overlap_sweep.results.points import Case, Point
from overlap_sweep.results.records import LayerTrial, TunerRecord
from overlap_sweep.study import effects
from overlap_sweep.workloads.layer.answer import (
    LayerAnalysis,
    VariantRow,
    analyse_layer,
    labels,
)
from overlap_sweep.workloads.layer.config import Asked as LayerPoint
from overlap_sweep.workloads.layer.result import LayerTimes, compare
from overlap_sweep.workloads.layer.traces import with_traces
from overlap_sweep.workloads.operator.config import Resolved

NO_OVERLAP = OverlapConfig({}, {**SWITCH_DEFAULTS, "tp_comm_overlap": False})


@dataclass(frozen=True)
class Trial:
    """One trial, whatever its outcome."""

    tp_size: int
    name: str
    point: Point | None
    """None if the run directory is missing or unreadable."""
    layer: LayerAnalysis | None = None
    """The point's variants under their labels; None unless the point is ok."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of its variants by label."""
    warnings: list[str] = field(default_factory=list)
    """The point's warnings, one sentence each; also why a variant was not measured."""

    @property
    def part(self) -> str:
        """Returns what was measured, in words: `the whole layer`, or a part of it."""
        return part(self.point.config_as(LayerPoint).layer.kind) if self.point else WHOLE

    @property
    def rows(self) -> dict[str, VariantRow]:
        """Returns the rows by label, in the order of measuring."""
        return {row.name: row for row in self.layer.rows} if self.layer else {}

    @property
    def configs(self) -> dict[str, OverlapConfig]:
        """Returns the configurations of the measured variants by label, without the floor."""
        return {
            label: OverlapConfig(row.measured.settings, {**SWITCH_DEFAULTS, **row.measured.switches})
            if self.names[label] != NONE
            else NO_OVERLAP
            for label, row in self.rows.items()
            if label != FLOOR
        }

    @property
    def why_not_ok(self) -> str:
        """Returns why a trial has no `layer`, in words."""
        if not self.point or not self.point.result:
            return f"the layer point {self.name} has no result"
        outcome = {"skipped": "was skipped", "timeout": "timed out"}.get(self.point.status, "failed")
        return f"the layer point {outcome}: {self.point.why_not_ok}"

    @property
    def started(self) -> str:
        """Returns the start time, UTC, ISO 8601; empty if unknown."""
        return (self.point and self.point.result and self.point.result.started) or ""


def read_trial(trial: LayerTrial, directory: Path, points: Mapping[Path, Point]) -> Trial:
    """Returns the trial. `directory` is that of tuner.json; `points` are all layer points by run directory."""
    point = points.get(directory / trial.point)
    if not point or not point.result or point.status != "ok":
        return Trial(trial.tp_size, trial.point, point)
    measured = point.measured_as(LayerTimes)
    names = labels(trial, measured.variants)
    # The tuned configuration of a layer that should not overlap is `none` under another label.
    times = {label: measured.variants[name] for label, name in names.items()}
    relabelled = structs.replace(point.result, measured=structs.replace(measured, variants=times))
    (layer,) = with_traces([analyse_layer(replace(point, result=relabelled), names)])
    warnings = point.result.warnings
    # Labels take the place of the long names of files.
    for label, name in sorted(trial.variants.items(), key=lambda item: -len(item[1])):
        if name.startswith(FILE):
            warnings = [warning.replace(name, label) for warning in warnings]
    return Trial(trial.tp_size, trial.point, point, layer, names, warnings)


@dataclass(frozen=True)
class Proof:
    """The whole layer, tuned, against all alternatives."""

    tp_size: int
    directory: Path
    """Directory of the tuner's sweep."""
    case: Case
    trial: Trial
    layer: LayerAnalysis
    against: dict[str, Gain]
    """Time of the tuned layer over that of every other usable variant, by label."""
    best_other: str
    together: list[Trial]
    """Combinations of settings that ran side by side before the proof."""

    @property
    def decisive(self) -> Gain:
        """Returns the gain of the tuned variant over the best other."""
        return self.against[self.best_other]

    @property
    def recommended(self) -> str:
        """Returns the label to use: `tuned` if it is faster than the best other beyond the noise, else that other."""
        return TUNED if self.decisive.faster else self.best_other

    @property
    def proven(self) -> bool:
        """Returns whether the tuned and the best other variant differ beyond the noise; otherwise they tie, and the
        simpler one is recommended."""
        return self.decisive.sure

    @property
    def nothing_won(self) -> bool:
        """Returns whether the tuner's own answer was no overlap, and nothing else beat that."""
        return self.best_other == NONE and self.trial.names[TUNED] == self.trial.names[NONE]

    @property
    def config(self) -> OverlapConfig:
        """Returns the recommended configuration."""
        return self.trial.configs[self.recommended]

    @property
    def slots_in_words(self) -> str:
        """Returns how many slots of the recommended configuration ran; empty without traces."""
        slots = self.trial.rows[self.recommended].slots
        ran = sum(one.verdict == "in force" for one in slots)
        others = [f"{one.name} {one.verdict}" for one in slots if one.verdict != "in force"]
        said = f"By the traces of {self.trial.part}, {ran} of {counted(len(slots), 'slot')} of the file ran as set"
        return f"{'; '.join([said, *others])}." if slots else ""

    @property
    def cautions(self) -> Iterable[str]:
        """Returns whether the recommended variant changed nothing, and what of it or of the tuned one did not run."""
        best, rows = self.trial.rows[self.recommended], self.trial.rows
        asked = {name: rows[name].effect for name in (self.recommended, TUNED)}
        return effects.cautions(best.label, best.effect, [*asked.values()])

    @property
    def verdict(self) -> str:
        """Returns the verdict in a sentence."""
        backend = self.case.backend
        advice = advised(self.recommended, backend)
        if self.nothing_won:
            return f"{nothing_beat(NONE_IN_WORDS, advice)}."
        tuned = NONE_IN_WORDS if self.trial.names[TUNED] == NONE else TUNED
        return f"{tuned} is {self.decisive.in_words(spoken(self.best_other, backend))}: {advice}."


@dataclass(frozen=True)
class Unproven:
    """A TP size for which a tuner measured operators or planned a proof, without proving anything."""

    tp_size: int
    directory: Path
    case: Case | None
    """None if no operators were measured for the layer's case."""
    reason: str
    """Why nothing was proven, in words, without a full stop."""
    trial: Trial | None
    """The layer point of the proof; None if none was run."""
    together: list[Trial]
    instead: OverlapConfig | None = None
    """What to train with if the tuner's configuration was refuted; None if it was only not measured."""
    advice: str = ""

    @property
    def verdict(self) -> str:
        """Returns the verdict in a sentence."""
        planned = self.trial.part if self.trial else WHOLE
        return f"not proven on {planned}: {self.reason}{f'; {self.advice}' if self.advice else ''}."


Outcome = Proof | Unproven


def advised(label: str, backend: str) -> str:
    """Returns what to do if this variant is the best."""
    if backend == ASYNC_TP_BACKEND:
        switched = {DEFAULT: "switch async TP on", NONE: "leave async TP off"}
        return switched.get(label, "PyTorch has no switch for the fastest variant")
    return "keep overlap off" if label == NONE else f"use {spoken(label, backend)}"


def outcomes(
    tuners: Mapping[Path, TunerRecord], points: Sequence[Point], cases: Mapping[Case, Sequence[Point]]
) -> list[Outcome]:
    """Returns what the tuners proved for every case and TP size they measured, or why they proved nothing.

    `tuners` are by sweep directory, `points` are all points, `cases` those of operators by case.
    """
    layers = {point.directory: point for point in points if point.workload == "layer"}
    found: list[Outcome] = []
    for directory, record in tuners.items():
        own = [
            (case, point.config_as(Resolved).tp_size)
            for case, case_points in cases.items()
            for point in case_points
            if point.directory.parent == directory
        ]
        trials: dict[str, dict[tuple[Case | None, int], list[Trial]]] = {}
        broken: dict[tuple[Case | None, int], str] = {}
        for kind, recorded in (("together", record.together), ("proof", record.proofs)):
            by_case = trials[kind] = defaultdict(list)
            for one in recorded:
                trial = read_trial(one, directory, layers)
                key = _case_of(trial, cases, own), trial.tp_size
                by_case[key].append(trial)
                if kind == "proof" and TUNED in one.variants and not trial.layer:
                    broken[key] = trial.why_not_ok
        measured = [(case, size) for case, size in own if size > 1]
        for key in dict.fromkeys([*measured, *trials["together"], *trials["proof"]]):
            case, tp_size = key
            tried, proofs = trials["together"].get(key, []), trials["proof"].get(key, [])
            found += [_judged(trial, directory, case, tried, broken.get(key)) for trial in proofs]
            if not proofs:
                start = f"{case.model} TP={tp_size} " if case else f"TP={tp_size} "
                dropped = [why.rstrip(".") for label, why in record.dropped.items() if f"{label} ".startswith(start)]
                reason = "; ".join(dict.fromkeys(dropped)) or "the tuner ran no layer at this TP size"
                found.append(Unproven(tp_size, directory, case, reason, None, tried))
    return found


def standing(found: Iterable[Outcome], case: Case) -> dict[int, Outcome]:
    """Returns the outcome to report for the case by TP size: the latest proof, or else the latest attempt, of equals
    the last recorded."""
    ordered = sorted(found, key=lambda one: (isinstance(one, Proof), one.trial.started if one.trial else ""))
    by_size = {one.tp_size: one for one in ordered if one.case == case}
    return dict(sorted(by_size.items()))


def _case_of(trial: Trial, cases: Mapping[Case, Sequence[Point]], own: Sequence[tuple[Case, int]]) -> Case | None:
    """Returns the case of operators that is also the layer's. A layer that never ran has no device: it gets the only
    case of its sweep with its model."""
    point = trial.point
    if point and (point.case in cases or trial.layer):
        return point.case if point.case in cases else None
    possible = {
        case
        for case, _ in own
        if not point or (case.model, case.process_wide) == (point.case.model, point.case.process_wide)
    }
    return possible.pop() if len(possible) == 1 else None


def _judged(trial: Trial, directory: Path, case: Case | None, together: list[Trial], broken: str | None) -> Outcome:
    """Returns what a trial proves. `broken`: why the layer did not run with the tuned settings, if it did not; the
    trial without them that follows shows whether it runs at all."""

    def unproven(reason: str, instead: str | None = None) -> Unproven:
        config = trial.configs.get(instead, NO_OVERLAP) if instead else None
        advice = advised(instead, trial.point.config.backend if trial.point else "") if instead else ""
        return Unproven(trial.tp_size, directory, case, reason, trial, together, config, advice)

    if not trial.layer:
        return unproven(broken or trial.why_not_ok)
    if case is None:
        return unproven("no operators were measured for its case")
    others = [label for label in trial.configs if label != TUNED and not trial.rows[label].launch_bound]
    if TUNED not in trial.rows:
        # The tuner leaves it out only after the layer failed with it.
        warnings = (warning for warning in trial.warnings if warning.startswith(f"{TUNED} "))
        reason = next(warnings, broken or "tuned was not measured").rstrip(".")
        return unproven(reason, _best_of(others, trial) if others else NONE)
    if trial.rows[TUNED].launch_bound:
        return unproven("tuned was launch-bound: its time says nothing about the device")
    if not others:
        return unproven("every other variant was launch-bound or not measured")
    against = _compare(trial, TUNED, others, len(others))
    return Proof(trial.tp_size, directory, case, trial, trial.layer, against, _best_of(others, trial), together)


def _best_of(labels: Sequence[str], trial: Trial) -> str:
    """Returns the fastest label, or the simplest within its noise: none, then the default, then presets."""
    fastest = min(labels, key=lambda label: trial.rows[label].measured.times["all"].median_us)
    order = sorted(labels, key=lambda label: (label != NONE, label != DEFAULT))
    to_others = _compare(trial, fastest, order)
    return next(label for label in order if not to_others[label].faster)


def _compare(trial: Trial, one: str, others: Sequence[str], tried: int = 1) -> dict[str, Gain]:
    assert trial.point
    times = [(trial.rows[one].measured, trial.rows[other].measured) for other in others]
    return dict(zip(others, compare(times, trial.point.config.runtime.device, tried), strict=True))
