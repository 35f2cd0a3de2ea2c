"""Points of a dataset beside the same points of the reference: how much faster or slower, and which have no match."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.compare.fields import matchable
from overlap_sweep.compare.measured import Key, Measured
from overlap_sweep.compare.ratios import ratio
from overlap_sweep.results.estimate import Estimate

MARGIN = 0.005
"""Sessions differ by more than the noise within each of them: a smaller difference is a tie, whatever the noise."""

Verdict = Literal["faster", "slower", "same"]
VERDICTS: tuple[Verdict, ...] = ("faster", "slower", "same")


@dataclass(frozen=True)
class Match:
    """Something measured in a dataset beside what it is compared with in the reference."""

    dataset: str
    reference: str
    ours: Measured
    theirs: Measured

    @property
    def ratio(self) -> float:
        """Time over the reference's: below 1 is faster."""
        return self.ours.time.time_us / self.theirs.time.time_us

    @property
    def verdict(self) -> Verdict:
        return verdict(self.ours.time, self.theirs.time)

    @property
    def none_ratio(self) -> float:
        """How much the machine changed, not the overlap; NaN where it is unknown."""
        return ratio(self.ours.none_us, self.theirs.none_us)

    @property
    def floor_ratio(self) -> float:
        return ratio(self.ours.floor_us, self.theirs.floor_us)


@dataclass(frozen=True)
class Unmatched:
    """What one dataset has and another has not."""

    only_in: str
    missing_in: str
    names: list[str]
    """With what became of it in the other, where it did not succeed there."""


def verdict(time: Estimate, reference: Estimate) -> Verdict:
    """`same` where the difference is inside the noise of both, or below MARGIN."""
    by = time.time_us / reference.time_us
    if abs(by - 1) <= MARGIN or not time.differs_from(reference):
        return "same"
    return "faster" if by < 1 else "slower"


def matches(dataset: Dataset, base: Dataset, compared: Collection[str]) -> list[Match]:
    ours, theirs = _by_key(dataset, compared), _by_key(base, compared)
    found = [Match(dataset.label, base.label, ours[key], theirs[key]) for key in theirs if key in ours]
    return sorted(found, key=lambda match: match.ours.key.order)


def unmatched(dataset: Dataset, base: Dataset, compared: Collection[str], telling: Sequence[str]) -> list[Unmatched]:
    """Of both; `telling` are the fields to be told."""
    found = []
    for one, other in ((base, dataset), (dataset, base)):
        ours, theirs = _by_key(one, compared), _by_key(other, compared)
        keys = sorted((ours[key].key for key in ours if key not in theirs), key=lambda key: key.order)
        if keys:
            found.append(Unmatched(one.label, other.label, [_with_fate(key, other, telling) for key in keys]))
    return found


def _by_key(dataset: Dataset, compared: Collection[str]) -> dict[Key, Measured]:
    return {matchable(measured.key, compared): measured for measured in dataset.measured}


def _with_fate(key: Key, missing_in: Dataset, telling: Sequence[str]) -> str:
    name = f"{key.case(telling)} TP={key.tp_size} {key.operator} {key.pass_name} {key.setting}".strip()
    # Failed points don't tell their device, so of several cases it is not sure whose fate it is.
    fate = None if telling else missing_in.not_ok.get((key.tp_size, key.operator, key.pass_name, key.setting))
    return f"{name} ({fate})" if fate else name
