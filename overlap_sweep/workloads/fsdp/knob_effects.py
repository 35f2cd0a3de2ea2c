"""What each knob changes, as rows and as a chart: every two settings of training steps that differ in nothing else."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from overlap_sweep.report.charts import Axis, Dot, Key, Reference, Row, Rows
from overlap_sweep.results.estimate import estimate
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis, TrainingRow
from overlap_sweep.workloads.fsdp.knobs import brief, in_words, order

MOST_DRAWN = 40
"""As many as are looked at; the table has all."""
MANY_PAIRS = 5
"""From so many on it is seen how far pairs are apart."""


@dataclass(frozen=True)
class KnobEffect:
    """Two settings that differ in one knob alone."""

    knob: str
    before: TrainingRow
    """With the usual value, or where neither has it the smaller one."""
    after: TrainingRow

    @property
    def change(self) -> float:
        """Returns the change of the time that a sample takes: -0.1 is a tenth less."""
        return self.after.of_sample.time_us / self.before.of_sample.time_us - 1

    @property
    def noise(self) -> float:
        """Returns the noise of the change."""
        ours, theirs = self.after.of_sample, self.before.of_sample
        relative = math.hypot(ours.noise_us / ours.time_us, theirs.noise_us / theirs.time_us)
        return relative * ours.time_us / theirs.time_us

    @property
    def differs(self) -> bool:
        return self.before.of_sample.differs_from(self.after.of_sample)

    @property
    def usable(self) -> bool:
        """Whether neither side is limited by the host, or diverges: the knob's part in that cannot be told."""
        return not any(row.launch_bound or row.loss is None for row in (self.before, self.after))


@dataclass(frozen=True)
class KnobContribution:
    """One change of one knob, wherever it was measured."""

    knob: str
    before: Any
    after: Any
    effects: list[KnobEffect]
    beside_best: KnobEffect | None
    """With all other knobs as in the best setting. The best was chosen for being fast: its own luck is in it."""
    taken: bool
    """Whether the best setting has it as it is after the change."""

    @property
    def change(self) -> float:
        """The median of the effects."""
        return statistics.median(effect.change for effect in self.effects)

    @property
    def range(self) -> tuple[float, float]:
        changes = [effect.change for effect in self.effects]
        return min(changes), max(changes)

    @property
    def noise(self) -> float:
        """Returns the noise of the median: of MANY_PAIRS by how far they are apart, else that of a typical effect."""
        if len(self.effects) >= MANY_PAIRS:
            return estimate([effect.change for effect in self.effects]).noise_us
        return statistics.median(effect.noise for effect in self.effects)

    @property
    def sure(self) -> bool:
        """Whether the change is more than noise."""
        return abs(self.change) > self.noise

    @property
    def differs(self) -> int:
        """In how many of them the change is more than noise."""
        return sum(effect.differs for effect in self.effects)

    @property
    def what(self) -> str:
        return f"{in_words(self.before)} \N{RIGHTWARDS ARROW} {in_words(self.after)}"

    @property
    def name(self) -> str:
        return brief(self.knob)

    @property
    def change_text(self) -> str:
        return _as_change(self.change, self.sure)

    @property
    def range_text(self) -> str:
        """Empty of a single pair."""
        low, high = self.range
        return f"{low:+.1%} to {high:+.1%}" if len(self.effects) > 1 else ""

    @property
    def beside_text(self) -> str:
        """Empty where there is no such pair."""
        return _as_change(self.beside_best.change, self.beside_best.differs) if self.beside_best else ""


@dataclass(frozen=True)
class KnobEffects:
    """All that the settings of a case say about single knobs."""

    contributions: list[KnobContribution]
    """What moved most, over all pairs, comes first."""
    left_out: int
    """Pairs of which one side is limited by the host, or diverges."""
    only_left_out: list[str]
    """The knobs that there are no other pairs of."""
    never_alone: list[str]
    """The knobs that differ between settings, but never alone: their part cannot be told."""


def contributed(analysis: TrainingAnalysis) -> KnobEffects:
    """Returns every change of each knob from one value to another."""
    effects = [effect for name in analysis.differing for effect in _effects(name, analysis)]
    found: dict[tuple[str, str, str], list[KnobEffect]] = defaultdict(list)
    for effect in effects:
        if effect.usable:
            before, after = (in_words(row.knobs.get(effect.knob)) for row in (effect.before, effect.after))
            found[effect.knob, before, after].append(effect)
    contributions = [_contribution(of_change, analysis.best) for of_change in found.values()]
    alone, told = {effect.knob for effect in effects}, {knob for knob, _, _ in found}
    return KnobEffects(
        contributions=sorted(contributions, key=lambda contribution: -abs(contribution.change)),
        left_out=sum(not effect.usable for effect in effects),
        only_left_out=[brief(name) for name in analysis.differing if name in alone - told],
        never_alone=[brief(name) for name in analysis.differing if name not in alone],
    )


def _effects(knob: str, analysis: TrainingAnalysis) -> Iterator[KnobEffect]:
    """Yields every pair of rows that differ in this knob alone."""
    alike: dict[tuple[str, ...], list[TrainingRow]] = defaultdict(list)
    for row in analysis.rows:
        alike[tuple(repr(row.knobs.get(other)) for other in analysis.differing if other != knob)].append(row)
    for group in alike.values():
        for before, after in combinations(sorted(group, key=lambda row: order(row.knobs, knob)), 2):
            yield KnobEffect(knob, before, after)


def _contribution(effects: list[KnobEffect], best: TrainingRow) -> KnobContribution:
    first = effects[0]
    knob, before, after = first.knob, first.before.knobs.get(first.knob), first.after.knobs.get(first.knob)
    beside_best = next((effect for effect in effects if best in (effect.before, effect.after)), None)
    taken = in_words(best.knobs.get(knob)) == in_words(after)
    return KnobContribution(knob, before, after, effects, beside_best, taken)


def _as_change(change: float, sure: bool) -> str:
    return f"{change:+.1%}" if sure else f"{change:+.1%} (noise)"


def knob_bars(analysis: TrainingAnalysis) -> Rows:
    """Returns every change of one knob with all others alike."""
    contributions = contributed(analysis).contributions[:MOST_DRAWN]
    return Rows(
        title=f"What each knob contributed: {analysis.case.brief}",
        subtitle="change of the time that a sample takes; whiskers are all pairs and their noise, dots the best's",
        axis=Axis(format="+.1~%"),
        parts=[Key("change", "good")],
        columns=["time", "beside the best"],
        rows=[_knob_bar(contribution) for contribution in contributions],
        references=[Reference("faster | slower", 0.0)],
    )


def _knob_bar(contribution: KnobContribution) -> Row:
    (low, high), beside = contribution.range, contribution.beside_best
    name = f"{contribution.name} {contribution.what}"
    return Row(
        name=name,
        ends=[contribution.change],
        low=low - contribution.noise,
        high=high + contribution.noise,
        cells=[contribution.change_text, contribution.beside_text or "-"],
        colour="wait" if not contribution.sure else "bad" if contribution.change > 0 else "good",
        bold=contribution.taken and beside is not None,
        dots=[Dot(beside.change, colour="ink")] if beside else [],
        details={
            "knob": name,
            "time of a sample": contribution.change_text,
            "over the pairs": contribution.range_text or "one pair",
            "pairs": str(len(contribution.effects)),
            "beside the best": contribution.beside_text or "-",
        },
    )
