"""The headline of a comparison: what is faster, by how much and how surely, or that nothing is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap_sweep.results.estimate import Estimate, gap_noise_us
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.verdict import MARGIN

Times = tuple[Estimate, Estimate]
"""A time and the reference's."""


@dataclass(frozen=True)
class Change:
    """The geometric mean of several times over the reference's."""

    ratio: float
    """Below 1 is faster."""
    noise: float
    """Half-width of its confidence interval, as a share of the ratio; NaN if it is unknown."""

    @property
    def differs(self) -> bool:
        """Returns whether it is faster or slower beyond the noise and MARGIN."""
        return not math.isnan(self.noise) and abs(math.log(self.ratio)) > max(MARGIN, self.noise)

    @property
    def word(self) -> str:
        return "faster" if self.ratio < 1 else "slower"

    @property
    def ends(self) -> tuple[float, float]:
        """Returns the ends of the confidence interval."""
        return self.ratio * math.exp(-self.noise), self.ratio * math.exp(self.noise)

    def in_words(self, label: str, reference: str) -> str:
        """Returns `new is 9.5% slower than old (9.4 to 9.7%)`, or that they do not differ, without a full stop."""
        if self.differs:
            return f"{label} is {Gain(1 - self.ratio, self.ratio * self.noise).in_words(reference)}"
        if math.isnan(self.noise):
            return f"{label} takes {self.ratio:.3f} of {reference}'s time; measured too rarely, its noise is unknown"
        low, high = self.ends
        beyond = f"by {MARGIN:.1%} or more" if abs(math.log(self.ratio)) > self.noise else "beyond the noise"
        return f"{label} and {reference} do not differ {beyond} (ratio {self.ratio:.3f}, {low:.3f} to {high:.3f})"


def mean_change(passes: Iterable[Sequence[Times]]) -> Change:
    """Returns the mean change of the times of all passes. The times of one pass share their baseline, so that their
    noises add up; those of several passes are independent. There must be a time."""
    groups = [[(ours.time_us / theirs.time_us, _noise(ours, theirs)) for ours, theirs in times] for times in passes]
    number = sum(map(len, groups))
    mean_log = sum(math.log(ratio) for times in groups for ratio, _ in times) / number
    noises = (sum(noise for _, noise in times) for times in groups)
    return Change(math.exp(mean_log), math.hypot(*noises) / number)


def _noise(ours: Estimate, theirs: Estimate) -> float:
    if math.isnan(gap_noise_us(ours, theirs)):
        return math.nan
    return math.hypot(ours.noise_us / ours.time_us, theirs.noise_us / theirs.time_us)
