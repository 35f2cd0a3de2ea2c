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
    """One of them, whatever became of it."""

    tp_size: int
    directory: Path
    """Of the tuner's sweep."""
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
    tuned: OverlapConfig | None = None
    """Of a proof, the tuner's configuration, also where it was not measured; None where that is not known."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By label, why it was not measured, in a sentence."""
    warnings: list[str] = field(default_factory=list)
    """The point's others, one sentence each."""
    taken: str | None = None
    """Of combinations that were tried before a proof, the label of the one that became `tuned`; None where that is not
    known, or was none of them."""

    @property
    def rows(self) -> dict[str, VariantRow]:
        """By label, in the order of measuring."""
        return {row.name: row for row in self.layer.rows} if self.layer else {}

    @property
    def configs(self) -> dict[str, OverlapConfig]:
        """By label, how each variant that was measured overlaps; without the floor."""
        return {label: self._config(label) for label in self.times if label != FLOOR}

    def _config(self, label: str) -> OverlapConfig:
        if self.names[label] == NONE:
            return NO_OVERLAP
        return OverlapConfig(self.times[label].settings, {**SWITCH_DEFAULTS, **self.times[label].switches})

    @property
    def why_not_ok(self) -> str:
        """In words; of a trial without `layer`."""
        if not self.point or not self.point.result:
            return f"the layer {self.name} left no results: it was given up, or is still running"
        what = {"skipped": "was skipped", "timeout": "timed out"}.get(self.point.status, "failed")
        return f"the layer {what}: {self.point.why_not_ok}"

    @property
    def started(self) -> str:
        """UTC, ISO 8601; empty where it is not known."""
        return (self.point and self.point.result and self.point.result.started) or ""


def read_trial(trial: LayerTrial, directory: Path, points: Mapping[Path, Point]) -> Trial:
    """`directory` is tuner.json's; `points` are all layers by their run directory."""
    point = points.get(directory / trial.point)
    found = Trial(trial.tp_size, directory, trial.point, point, tuned=_asked(trial.variants.get(TUNED), point))
    if not point or not point.result or point.status != "ok":
        return found
    result, measured = point.result, point.measured_as(LayerTimes)
    names = labels(trial, measured.variants)
    # The tuned configuration of a layer that should not overlap is `none` under another label.
    times = {label: measured.variants[name] for label, name in names.items()}
    relabelled = structs.replace(result, measured=structs.replace(measured, variants=times))
    missing = {label: name for label, name in trial.variants.items() if name not in measured.variants}
    why = {label: next((w for w in result.warnings if w.startswith(f"{name} ")), "") for label, name in missing.items()}
    return replace(
        found,
        layer=analyse_layer(replace(point, result=relabelled)),
        names=names,
        times=times,
        left_out={
            label: _with_labels(said or f"{label} was not measured.", trial.variants) for label, said in why.items()
        },
        warnings=[_with_labels(w, trial.variants) for w in result.warnings if w not in why.values()],
    )


def _asked(name: str | None, point: Point | None) -> OverlapConfig | None:
    """What the point was told that the variant is, measured or not."""
    if name == NONE:
        return NO_OVERLAP
    told = point.config["layer"].get("configurations", {}).get(name) if point else None
    return OverlapConfig(told["slots"], {**SWITCH_DEFAULTS, **told["switches"]}) if told else None


def _with_labels(sentence: str, variants: Mapping[str, str]) -> str:
    """Files are long, and people know them by their labels."""
    for label, name in sorted(variants.items(), key=lambda item: -len(item[1])):
        if name.startswith("file:"):
            sentence = sentence.replace(name, label)
    return sentence


@dataclass(frozen=True)
class Proof:
    """The whole layer, tuned, against all else that one could take."""

    tp_size: int
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
    def directory(self) -> Path:
        return self.trial.directory

    @property
    def decisive(self) -> Comparison:
        """The tuned one's whole time over the best other's."""
        return self.against[self.best_other]

    @property
    def recommended(self) -> str:
        """A label: `tuned` where it is faster than the best of the others beyond the noise, else that other."""
        return TUNED if self.decisive.faster else self.best_other

    @property
    def config(self) -> OverlapConfig:
        """The recommended one."""
        return self.trial.configs[self.recommended]

    @property
    def tuned_is_none(self) -> bool:
        """Whether no overlap at all is what the tuner came to."""
        return self.trial.configs[TUNED] == NO_OVERLAP

    @property
    def verdict(self) -> str:
        """In a sentence."""
        backend = self.case.backend
        other, name = self.decisive, spoken(self.best_other, backend)
        if other.faster:
            only = ", the fastest of the others" if len(self.against) > 1 else ""
            use = "but no switch of PyTorch's gives that" if backend == ASYNC_TP_BACKEND else "use tuned"
            return f"tuned is {other.in_words(f' than {name}')}{only}: {use}."
        use = advised(self.best_other, backend)
        if self.tuned_is_none and self.best_other == NONE:
            return f"no overlap that was found pays: {use}."
        tuned = "tuned, which is no overlap," if self.tuned_is_none else "tuned"
        if other.differs:
            return f"{tuned} is {other.in_words(f' than {name}')}: {use}."
        interval = f"{other.ratio:.3f} [{other.interval.low:.3f}, {other.interval.high:.3f}]"
        return f"{tuned} is no faster than {name} beyond the noise, ratio {interval}: {use}."


@dataclass(frozen=True)
class Unproven:
    """A TP size that a tuner measured operators of, or meant to prove, and could not."""

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
        """In a sentence."""
        return f"not proven on the whole layer: {self.reason}{f': {self.advice}' if self.advice else ''}."


Outcome = Proof | Unproven


def spoken(label: str, backend: str) -> str:
    """A variant's name in a sentence."""
    return "the default" if named(label, backend) == DEFAULT else named(label, backend)


def advised(label: str, backend: str) -> str:
    if backend == ASYNC_TP_BACKEND and label in (NONE, DEFAULT):
        return "switch async TP on" if label == DEFAULT else "leave async TP off"
    return "don't overlap" if label == NONE else f"use {spoken(label, backend)}"


def outcomes(
    tuners: Mapping[Path, TunerRecord], points: Sequence[Point], cases: Mapping[Case, Sequence[Point]]
) -> list[Outcome]:
    """Of every TP size that a tuner measured, in every case: what it proved, or why it proved nothing.

    `tuners` by the sweep's directory; `points` are all; `cases` the operators' that may be compared.
    """
    by_directory = {point.directory: point for point in points if point.workload == "layer"}
    found: list[Outcome] = []
    for directory, record in tuners.items():
        own = {
            case: [point for point in of_case if point.directory.parent == directory] for case, of_case in cases.items()
        }
        own = {case: of_case for case, of_case in own.items() if of_case}
        together = _by_case(record.together, directory, by_directory, cases, own)
        proofs = _by_case(record.proofs, directory, by_directory, cases, own)
        measured = [(case, size) for case in own for size in sorted({int(p.config["tp_size"]) for p in own[case]})]
        for key in dict.fromkeys([*((case, size) for case, size in measured if size > 1), *together, *proofs]):
            tried = together.get(key, [])
            if key in proofs:
                found += [_judged(trial, key[0], tried) for trial in proofs[key]]
            else:
                reason = _why_no_proof(record, *key)
                found.append(Unproven(key[1], directory, key[0], reason, None, tried))
    return found


def standing(found: Sequence[Outcome]) -> Outcome:
    """Of several outcomes of one case and TP size the latest proof, or where there is none, the latest attempt."""
    return max(found, key=lambda one: (isinstance(one, Proof), one.trial.started if one.trial else ""))


def _by_case(
    trials: Sequence[LayerTrial],
    directory: Path,
    points: Mapping[Path, Point],
    cases: Mapping[Case, Sequence[Point]],
    own: Mapping[Case, Sequence[Point]],
) -> dict[tuple[Case | None, int], list[Trial]]:
    found = defaultdict(list)
    for recorded in trials:
        trial = read_trial(recorded, directory, points)
        found[_case_of(trial, cases, own), trial.tp_size].append(trial)
    return dict(found)


def _case_of(trial: Trial, cases: Mapping[Case, Sequence[Point]], own: Mapping[Case, Sequence[Point]]) -> Case | None:
    """The operators' case that is the layer's. A layer that never ran knows too little of its own to tell exactly: it
    is that case of the sweep which nothing that it does know speaks against, if there is but one."""
    point = trial.point
    if point and point.case in cases:
        return point.case
    if trial.layer:
        return None
    possible = [
        case
        for case, points in own.items()
        if any(p.config["tp_size"] == trial.tp_size for p in points) and (not point or _may_be(case, point))
    ]
    return possible[0] if len(possible) == 1 else None


def _may_be(case: Case, point: Point) -> bool:
    environment = point.result.environment if point.result else {}
    known = point.case._replace(device=environment.get("gpu") or case.device)
    pairs = zip(known, case, strict=True)
    return all(one == other or one in (None, "auto") for one, other in pairs)


def _judged(trial: Trial, case: Case | None, tried: Sequence[Trial]) -> Outcome:
    together = [replace(one, taken=_taken(one, trial.configs.get(TUNED, trial.tuned))) for one in tried]

    def unproven(reason: str, instead: str | None = None) -> Unproven:
        config = trial.configs.get(instead, NO_OVERLAP) if instead else None
        advice = advised(instead, trial.point.config["backend"] if trial.point else "") if instead else ""
        return Unproven(trial.tp_size, trial.directory, case, reason, trial, together, config, advice)

    if not trial.layer:
        return unproven(trial.why_not_ok)
    if case is None:
        assert trial.point
        return unproven(f"none of the operators that were measured are of its case, {trial.point.case}")
    others = [label for label in trial.configs if label != TUNED and not trial.times[label].launch_bound]
    if TUNED not in trial.times:
        # The tuner leaves it out only after the layer failed with it.
        left_out = "the layer fails with tuned and runs without it" if trial.tuned is None else "tuned was not measured"
        reason = trial.left_out.get(TUNED, left_out).rstrip(".")
        return unproven(reason, _best_of(others, trial) if others else NONE)
    if trial.times[TUNED].launch_bound:
        return unproven("tuned was launch-bound, its time says nothing about the device")
    if not others:
        return unproven("nothing that tuned could be compared with was measured, or all of it was launch-bound")
    against = _compare(trial, TUNED, others, len(others))
    return Proof(trial.tp_size, case, trial, trial.layer, against, _best_of(others, trial), together)


def _best_of(labels: Sequence[str], trial: Trial) -> str:
    """The fastest, or the first of those that the noise cannot tell from it: none before the default, presets last."""
    fastest = min(labels, key=lambda label: trial.times[label].times["all"].median_us)
    order = [label for label in (NONE, DEFAULT) if label in labels]
    order += [label for label in labels if label not in order]
    to_others = _compare(trial, fastest, order)
    return next(label for label in order if not to_others[label].faster)


def _compare(trial: Trial, one: str, others: Sequence[str], tried: int = 1) -> dict[str, Comparison]:
    """Compares one variant with each of the others."""
    assert trial.point
    times = [(trial.times[one], trial.times[other]) for other in others]
    return dict(zip(others, compare(times, trial.point.config["runtime"]["device"], tried), strict=True))


def _taken(trial: Trial, tuned: OverlapConfig | None) -> str | None:
    return next((label for label, config in trial.configs.items() if label != NONE and config == tuned), None)


def _why_no_proof(record: TunerRecord, case: Case | None, tp_size: int) -> str:
    """What the tuner said of this TP size, or of its operators."""
    of_size = f"{case.model} TP={tp_size}" if case else f"TP={tp_size}"
    if of_size in record.dropped:
        return record.dropped[of_size].rstrip(".")
    operators = defaultdict(list)
    for what, why in record.dropped.items():
        if what.startswith(f"{of_size} "):
            operators[why.rstrip(".")].append(what.removeprefix(f"{of_size} "))
    said = [f"{', '.join(names)}: {why}" for why, names in operators.items()]
    return "; ".join(said) or "the tuner ran no layer at this TP size"
