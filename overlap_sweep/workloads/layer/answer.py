"""Layers: how the variants of one layer point compare, round by round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap_sweep.overlap.overlap_cfg import FLOOR, NONE, named, without_folders
from overlap_sweep.results.estimate import EXACTLY_ONE, Interval, estimate, gap_noise_us, hidden_fraction
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import LayerTrial
from overlap_sweep.results.verdict import TYPICAL_SCATTER_OF_LAYERS, Scatter, steadied
from overlap_sweep.workloads.layer.result import LayerTimes, VariantTimes


@dataclass(frozen=True)
class Comparison:
    """One variant's whole time over another's of the same round."""

    ratio: float
    """Median over the rounds: below 1 is faster."""
    interval: Interval

    @property
    def differs(self) -> bool:
        """Whether it is faster or slower beyond the noise."""
        return self.interval.excludes(1.0)

    @property
    def faster(self) -> bool:
        """Beyond the noise."""
        return self.interval.high < 1

    @property
    def speedup(self) -> float:
        return 1 / self.ratio

    def in_words(self, than: str = "", with_interval: bool = True) -> str:
        """`9.5% faster than none (9.4 to 9.7%)`; `than` is such as ` than none`."""
        if not self.differs:
            return f"no different{than.replace(' than ', ' from ')}"
        by, near, far = (abs(1 - ratio) for ratio in (self.ratio, self.interval.low, self.interval.high))
        low, high = sorted((near, far))
        interval = f" ({low * 100:.1f} to {high:.1%})" if with_interval else ""
        return f"{by:.1%} {'faster' if self.faster else 'slower'}{than}{interval}"


@dataclass(frozen=True)
class VariantRow:
    """One variant; its times are medians over the rounds, in microseconds."""

    name: str
    label: str
    """What people call it."""
    reference: str
    """The variant that its ratio is to: `none`, or where that was not measured the first."""
    rounds: int
    fwd_us: float
    bwd_us: float
    step_us: float | None
    """None without an optimizer."""
    all_us: float
    to_reference: Comparison
    hidden_fraction: float
    """Of the medians of the whole time; NaN where `none` or `floor` was not measured."""
    launch_bound: bool
    relative_error: float | None
    """The largest of any tensor, against `none`."""

    @property
    def ratio(self) -> float:
        return self.to_reference.ratio

    @property
    def interval(self) -> Interval:
        return self.to_reference.interval


@dataclass(frozen=True)
class LayerAnalysis:
    """One `ok` layer point, its variants in the order of measuring."""

    point: Point
    rows: list[VariantRow]

    @property
    def reference(self) -> str:
        """The variant that ratios are to."""
        return self.rows[0].reference

    @property
    def rounds(self) -> int:
        return self.rows[0].rounds

    @property
    def contenders(self) -> list[VariantRow]:
        """What can be used instead of the reference, by ratio: the floor computes nothing meaningful, and a
        launch-bound variant's time says nothing about the device."""
        rows = [row for row in self.rows if row.name not in (self.reference, FLOOR) and not row.launch_bound]
        return sorted(rows, key=lambda row: row.ratio)

    @property
    def winner(self) -> VariantRow | None:
        """The fastest of those that are faster than the reference beyond the noise."""
        return next((row for row in self.contenders if row.to_reference.faster), None)

    @property
    def verdict(self) -> str:
        """One line: what is faster than the reference beyond the noise, and what is not."""
        if any(row.launch_bound for row in self.rows if row.name == self.reference):
            return f"no verdict: {self.reference} was launch-bound, its time says nothing about the device"
        if not self.contenders:
            return f"no verdict: there is nothing to compare {self.reference} with"
        winner = self.winner
        others = [f"{row.label} is {row.to_reference.in_words()}" for row in self.contenders if row is not winner]
        if winner:
            first = f"{winner.label} is {winner.to_reference.in_words(f' than {self.reference}')}"
            return "; ".join([first, *others])
        return f"nothing is faster than {self.reference}: {'; '.join(others)}"

    @property
    def cautions(self) -> list[str]:
        """Returns what to know before believing the ratios."""
        launch_bound = ", ".join(row.label for row in self.rows if row.launch_bound)
        return [
            *([f"none was not measured: ratios are to {self.reference}."] if self.reference != NONE else []),
            *([f"Launch-bound, left out of the verdict: {launch_bound}."] if launch_bound else []),
        ]


def labels(trial: LayerTrial, measured: Iterable[str]) -> dict[str, str]:
    """Returns the measured variants of a tuner's layer under the names that reports use, and those of others under
    their own."""
    names = {label: name for label, name in trial.variants.items() if name in measured}
    return names | {name: name for name in measured if name not in names.values()}


def analyse_layer(point: Point) -> LayerAnalysis:
    """Compare the variants of an `ok` layer point."""
    variants = point.measured_as(LayerTimes).variants
    reference = NONE if NONE in variants else next(iter(variants))
    tried = max(len(variants.keys() - {reference, FLOOR}), 1)
    pairs = [(variant, variants[reference]) for variant in variants.values()]
    compared = compare(pairs, point.config["runtime"]["device"], tried)
    whole_us = {name: variant.times["all"].median_us for name, variant in variants.items()}
    short = without_folders(variants)

    def row(name: str, variant: VariantTimes, to_reference: Comparison) -> VariantRow:
        step, both = variant.times.get("step"), {NONE, FLOOR} <= variants.keys()
        return VariantRow(
            name=name,
            label=named(short[name], point.case.backend),
            reference=reference,
            rounds=len(variant.times["all"].samples_us),
            fwd_us=variant.times["fwd"].median_us,
            bwd_us=variant.times["bwd"].median_us,
            step_us=step.median_us if step else None,
            all_us=whole_us[name],
            to_reference=to_reference,
            hidden_fraction=hidden_fraction(whole_us[name], whole_us[NONE], whole_us[FLOOR]) if both else math.nan,
            launch_bound=variant.launch_bound,
            relative_error=max(variant.relative_error.values(), default=None),
        )

    return LayerAnalysis(point, [row(*one, found) for one, found in zip(variants.items(), compared, strict=True)])


def compare(pairs: Sequence[tuple[VariantTimes, VariantTimes]], device_kind: str, tried: int = 1) -> list[Comparison]:
    """Each first variant with its second: their i-th samples were taken side by side. `tried` is how many the best is
    looked for among."""
    between = Scatter(TYPICAL_SCATTER_OF_LAYERS[device_kind])
    ratios = []
    for one, other in pairs:
        samples = zip(one.times["all"].samples_us, other.times["all"].samples_us, strict=True)
        rounds = [time_us / other_us for time_us, other_us in samples]
        ratios.append(EXACTLY_ONE if one is other else between.added_to(estimate(rounds), 1))
    noises = [(ratio.time_us, gap_noise_us(ratio, EXACTLY_ONE, tried)) for ratio in steadied(ratios)]
    return [Comparison(ratio, Interval(ratio - noise, ratio + noise)) for ratio, noise in noises]
