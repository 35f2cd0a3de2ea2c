"""Training runs: which setting trains fastest, and what each knob changes, among the points that may be compared."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from overlap_sweep.analysis.choice import DEFAULT_MARGIN
from overlap_sweep.analysis.estimate import Estimate, estimate, normalised, pooled_none
from overlap_sweep.analysis.frame import hidden_fraction
from overlap_sweep.analysis.points import Point
from overlap_sweep.analysis.training_knobs import (
    Knobs,
    brief,
    changed,
    differing,
    frozen,
    in_words,
    knobs_of,
    overrides,
    same_floor,
    setting_in_words,
    train_alike,
)
from overlap_sweep.identity import key_of
from overlap_sweep.run_directory import Result, Timing, TrainingRun

HOST_LIMITS_FROM = 0.95
"""The share of a step's time from which on the host that enqueues it is what limits it."""
_MARGIN = f"{DEFAULT_MARGIN:.1%}"


class TrainingCase(NamedTuple):
    """What must be equal for training steps to be compared at all. They may differ in batch, accumulation and
    precision: they are compared by the time that a sample takes."""

    model: str
    sizes: str
    """In words."""
    ranks: int
    device: str
    key: str
    """Different for other sizes, whatever they are called."""

    @property
    def brief(self) -> str:
        """Without the sizes and the device."""
        return f"{self.model}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    def __str__(self) -> str:
        return f"{self.brief} on {self.device}: {self.sizes}"


@dataclass(frozen=True)
class TrainingRow:
    """One setting, over all points that measured it. Times are of a step unless they say otherwise."""

    knobs: Knobs
    setting: str
    """In words, without what all settings of the case share."""
    points: tuple[str, ...]
    samples_per_step: int
    tokens_per_step: int
    strategy: str
    precision: str
    step: Estimate
    """Relative to the floors that were measured beside it, where others have the same floor."""
    none: Estimate
    """Every collective alone on the device."""
    floor: Estimate
    """No communication."""
    host_us: float | None
    """None on a CPU, where it is what computes."""
    host_limits: bool
    """The device waits for the host: the schedule of its communication says little."""
    peak_memory_gb: float | None
    loss: float | None
    """After the last step of the recorded run; None where it is no number."""
    compiled: str

    @property
    def time_us(self) -> float:
        return self.step.time_us

    @property
    def none_us(self) -> float:
        return self.none.time_us

    @property
    def floor_us(self) -> float:
        return self.floor.time_us

    @property
    def of_sample(self) -> Estimate:
        """A sample's share of the step."""
        count = self.samples_per_step
        return Estimate(self.step.time_us / count, self.step.noise_us / count, self.step.repeats)

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_step / self.time_us * 1e6

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.time_us * 1e6

    @property
    def speedup(self) -> float:
        """Over the same step with every collective alone on the device."""
        return self.none_us / self.time_us

    @property
    def hidden_fraction(self) -> float:
        return hidden_fraction(self.time_us, self.none_us, self.floor_us)

    @property
    def comm_us(self) -> float:
        """What communication adds to the step where nothing hides it."""
        return self.none_us - self.floor_us

    @property
    def communicates(self) -> bool:
        """Whether that is more than noise: without it there is nothing to hide."""
        return self.comm_us > 0 and self.none.differs_from(self.floor)

    @property
    def exposed_us(self) -> float:
        """What it adds as configured."""
        return self.time_us - self.floor_us

    @property
    def turned(self) -> int:
        """How many knobs are not at their defaults."""
        return len(changed(self.knobs))

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """Sorts the simpler first."""
        return self.turned, [in_words(self.knobs[name]) for name in sorted(self.knobs)]


@dataclass(frozen=True)
class TrainingAnalysis:
    """One case."""

    case: TrainingCase
    points: list[Point]
    rows: list[TrainingRow]
    """From fast to slow, by the time that a sample takes."""
    reference: TrainingRow
    """The simplest: what gains are told against."""
    best: TrainingRow
    reason: str
    differing: list[str]
    """The knobs that are not the same in all rows."""
    shared: str
    """The knobs that were turned in all of them, in words; empty for none."""
    parameters: int

    @property
    def gain(self) -> float:
        """Samples per second of the best over those of the reference, minus 1."""
        return self.best.samples_per_s / self.reference.samples_per_s - 1

    @property
    def alike(self) -> TrainingRow:
        """The best of those that compute the same as the reference."""
        same = [row for row in self.rows if train_alike(row.knobs, self.reference.knobs)]
        return choose(same)[0]

    @property
    def overrides(self) -> str:
        """What to type for the best instead of the others; empty where that is nothing."""
        return overrides(self.best.knobs, self.differing)

    @property
    def one_work(self) -> bool:
        """Whether all rows' steps have as many samples."""
        return len({row.samples_per_step for row in self.rows}) == 1


def analyse_training(points: Iterable[Point]) -> list[TrainingAnalysis]:
    """The `ok` points of training runs by case."""
    cases: dict[TrainingCase, list[Point]] = defaultdict(list)
    for point in points:
        if point.is_training and point.status == "ok":
            cases[training_case(point)].append(point)
    return [_analyse(case, cases[case]) for case in sorted(cases)]


def training_case(point: Point) -> TrainingCase:
    config = point.config
    ranking, model = config["ranking"], config["model"]
    sizes = (
        f"{ranking['num_layers']} layers, {ranking['sequence_length']} events, "
        f"{ranking['num_sparse_features']} + {ranking['num_dense_features']} features"
    )
    key = key_of({"model": model, "ranking": ranking})
    return TrainingCase(model["name"], sizes, config["distributed"]["dp_size"], point.case.device, key)


def is_host_limited(result: Result) -> bool:
    """Whether the host took nearly as long to enqueue the step as the device to run it."""
    run = measured(result)
    host_us = run.host_us.get("point")
    return result.launch_bound or (host_us is not None and host_us >= HOST_LIMITS_FROM * run.step["point"].median_us)


def measured(result: Result | None) -> TrainingRun:
    """Of a point that is ok."""
    assert result
    assert result.training
    return result.training


def differ(one: TrainingRow, other: TrainingRow) -> bool:
    """Whether a sample's times are apart by more than the noise, and by more than DEFAULT_MARGIN: points are measured
    minutes apart, and often in different process groups."""
    ours, theirs = one.of_sample, other.of_sample
    return abs(ours.time_us / theirs.time_us - 1) > DEFAULT_MARGIN and ours.differs_from(theirs)


def choose(rows: Sequence[TrainingRow]) -> tuple[TrainingRow, str]:
    """The simplest of those that tie with the fastest, and why. What diverges is chosen only where everything does."""
    usable = [row for row in rows if row.loss is not None] or rows
    fastest = min(usable, key=lambda row: row.of_sample.time_us)
    ties = [row for row in usable if row is fastest or not differ(row, fastest)]
    chosen = min(ties, key=lambda row: (row.turned, row.of_sample.time_us))
    if len(rows) == 1:
        return chosen, "the only one that was measured"
    if chosen is fastest:
        return chosen, f"fastest of {len(usable)}"
    ours, theirs = chosen.of_sample, fastest.of_sample
    within = _MARGIN if ours.differs_from(theirs) else "the noise"
    return chosen, (
        f"simplest of those within {within} of the fastest, {fastest.setting} "
        f"({1 - theirs.time_us / ours.time_us:.1%} faster, noise {_relative_noise(ours, theirs):.1%})"
    )


def _relative_noise(one: Estimate, other: Estimate) -> float:
    return math.hypot(one.noise_us, other.noise_us) / one.time_us


def _analyse(case: TrainingCase, points: list[Point]) -> TrainingAnalysis:
    same: dict[frozenset[tuple[str, Any]], list[Point]] = defaultdict(list)
    for point in points:
        same[frozen(knobs_of(point.config))].append(point)
    settings = [knobs_of(of_setting[0].config) for of_setting in same.values()]
    names = differing(settings)
    floors = _floors(points)
    rows = [
        _row(knobs, setting_in_words(knobs, names if len(settings) > 1 else knobs), of_setting, floors)
        for knobs, of_setting in zip(settings, same.values(), strict=True)
    ]
    best, reason = choose(rows)
    shared = [name for name in changed(settings[0]) if name not in names] if len(settings) > 1 else []
    return TrainingAnalysis(
        case=case,
        points=points,
        rows=sorted(rows, key=lambda row: row.of_sample.time_us),
        reference=min(rows, key=lambda row: row.simplicity),
        best=best,
        reason=reason,
        differing=names,
        shared=", ".join(f"{brief(name)}={in_words(settings[0][name])}" for name in shared),
        parameters=measured(points[0].result).parameters,
    )


def _floors(points: Iterable[Point]) -> dict[frozenset[tuple[str, Any]], list[Timing]]:
    """Those that do the same, together."""
    found = defaultdict(list)
    for point in points:
        found[same_floor(knobs_of(point.config))].append(measured(point.result).step["floor"])
    return found


def _row(
    knobs: Knobs, setting: str, points: Sequence[Point], floors: Mapping[frozenset[tuple[str, Any]], list[Timing]]
) -> TrainingRow:
    runs = [measured(point.result) for point in points]
    same = floors[same_floor(knobs)]
    floor = pooled_none(same)

    def comparable(variant: str) -> Estimate:
        if len(same) == 1:
            # There is nothing to compare it with through the floor, whose noise would be added for nothing.
            return estimate(runs[0].step[variant].samples_us)
        return normalised([(run.step[variant], run.step["floor"]) for run in runs], floor)

    hosts_us = [run.host_us["point"] for run in runs if "point" in run.host_us]
    memory_gb = [run.peak_memory_gb for run in runs if run.peak_memory_gb is not None]
    return TrainingRow(
        knobs=knobs,
        setting=setting,
        points=tuple(point.name for point in points),
        samples_per_step=runs[0].samples_per_step,
        tokens_per_step=points[0].config["workload"]["tokens"],
        strategy=points[0].config["distributed"]["strategy"],
        precision=points[0].config["precision"],
        step=comparable("point"),
        none=comparable("none"),
        floor=floor,
        host_us=statistics.median(hosts_us) if hosts_us else None,
        host_limits=any(is_host_limited(point.result) for point in points if point.result),
        peak_memory_gb=max(memory_gb, default=None),
        loss=runs[-1].losses[-1],
        compiled=runs[0].compiled,
    )
