"""The tuner's layer points as they were found, their variants under the names that reports use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE, SWITCH_DEFAULTS, TUNED, OverlapConfig, named
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import LayerTrial
from overlap_sweep.results.run_directory import Result
from overlap_sweep.workloads.layer.answer import LayerAnalysis, VariantRow, analyse_layer, labels
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes

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
    """Its rows under their labels; None unless the point is ok."""
    times: dict[str, VariantTimes] = field(default_factory=dict)
    """By label, of every variant that was measured."""
    configs: dict[str, OverlapConfig] = field(default_factory=dict)
    """By label, how each of them overlaps; without the floor."""
    tuned: OverlapConfig | None = None
    """Of a proof, the tuner's configuration, also where it was not measured; None where that is not known."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By label, why it was not measured, in a sentence."""
    warnings: list[str] = field(default_factory=list)
    """The point's others, one sentence each."""

    @property
    def rows(self) -> dict[str, VariantRow]:
        """By label, in the order of measuring."""
        return {row.name: row for row in self.layer.rows} if self.layer else {}

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
    """`directory` is tuner.json's; `points` are all by their run directory."""
    point = points.get(directory / trial.point)
    tuned = _asked(trial.variants.get(TUNED), point)
    if not point or not point.result or point.status != "ok" or point.workload != "layer":
        return Trial(trial.tp_size, directory, trial.point, point, tuned=tuned)
    result, variants = point.result, point.measured_as(LayerTimes).variants
    names = labels(trial, variants)
    said = {name: _warning_about(name, result) for name in trial.variants.values() if name not in variants}
    return Trial(
        tp_size=trial.tp_size,
        directory=directory,
        name=trial.point,
        point=point,
        layer=_relabelled(analyse_layer(point), names),
        times={label: variants[name] for label, name in names.items()},
        configs={label: _config(name, variants[name]) for label, name in names.items() if name != FLOOR},
        tuned=tuned,
        left_out={
            label: _with_labels(said[name] or f"{label} was not measured.", trial.variants)
            for label, name in trial.variants.items()
            if name in said
        },
        warnings=[_with_labels(w, trial.variants) for w in result.warnings if w not in said.values()],
    )


def _relabelled(layer: LayerAnalysis, names: Mapping[str, str]) -> LayerAnalysis:
    rows = {row.name: row for row in layer.rows}
    # The tuned configuration of a layer that should not overlap is `none` under another label.
    reference = next(label for label, name in names.items() if name == layer.reference)
    backend = layer.point.case.backend
    relabelled = (
        replace(rows[name], name=label, label=named(label, backend), reference=reference)
        for label, name in names.items()
    )
    return replace(layer, rows=list(relabelled))


def _config(name: str, times: VariantTimes) -> OverlapConfig:
    return NO_OVERLAP if name == NONE else OverlapConfig(times.settings, {**SWITCH_DEFAULTS, **times.switches})


def _asked(name: str | None, point: Point | None) -> OverlapConfig | None:
    """What the point was told that the variant is, measured or not."""
    if name == NONE:
        return NO_OVERLAP
    told = point.config.get("layer", {}).get("configurations", {}).get(name) if point else None
    return OverlapConfig(told["slots"], {**SWITCH_DEFAULTS, **told["switches"]}) if told else None


def _warning_about(name: str, result: Result) -> str | None:
    return next((warning for warning in result.warnings if warning.startswith(f"{name} ")), None)


def _with_labels(sentence: str, variants: Mapping[str, str]) -> str:
    """Files are long, and people know them by their labels."""
    for label, name in sorted(variants.items(), key=lambda item: -len(item[1])):
        if name.startswith("file:"):
            sentence = sentence.replace(name, label)
    return sentence
