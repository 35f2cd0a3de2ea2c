"""What single changes are expected to gain before any is measured: the order in which a search tries them, and which
it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from overlap_sweep.results.records import Expected

Change = tuple[int, str]
"""A knob, by its index, and its value."""

SURE = 0.05
"""Gain that is expected of a change whose measurement counts as much as what was thought of the expectations before
any was measured: that they are right."""


@dataclass
class Prior:
    """Expectations, and what measurements have said of them so far."""

    expected: Mapping[Change, Expected]
    bounded_by: Mapping[Change, Change] = field(default_factory=dict)
    """By change another one, which gains at least as much."""
    _measured: dict[Change, tuple[float, float]] = field(default_factory=dict)

    def learn(self, change: Change, gain: float, noise: float) -> None:
        """Takes in what a change has gained, and its noise, as shares of the baseline's time."""
        if change in self.expected:
            self._measured[change] = gain, noise

    @property
    def scale(self) -> float:
        """Returns how many times what was predicted was gained so far, from all that were measured and that all are as
        predicted; not negative."""
        known = [(self.expected[one].gain, *found) for one, found in self._measured.items() if self._is_predicted(one)]
        # What is lost in noise says little.
        weighted = [(SURE**2 / (SURE**2 + noise**2), expected, gain) for expected, gain, noise in known]
        together = sum(weight * expected * gain for weight, expected, gain in weighted) + SURE**2
        return max(0.0, together / (sum(weight * expected**2 for weight, expected, _ in weighted) + SURE**2))

    @property
    def above(self) -> float:
        """Returns by how much a gain was farthest above its interval so far, beyond its noise; 0 if none was."""
        measured = self._measured.items()
        over = (gain - noise - self.expected[one].high for one, (gain, noise) in measured if self._is_predicted(one))
        return max(0.0, *over, 0.0)

    def gain(self, change: Change) -> float:
        """Returns the expected gain, after what was learnt; 0 of a change without an expectation."""
        found = self.expected.get(change)
        if found is None:
            return 0.0
        return min(found.gain * (self.scale if found.is_predicted else 1.0), max(0.0, self._bound(change)[0]))

    def most(self, change: Change) -> float:
        """Returns the largest gain that is thought possible; infinite of a change without an expectation."""
        found = self.expected.get(change)
        if found is None:
            return inf
        return min(found.high + (self.above if found.is_predicted else 0.0), max(0.0, sum(self._bound(change))))

    def _bound(self, change: Change) -> tuple[float, float]:
        """Returns what the change that bounds it has gained, and the noise of that; infinite if that is unknown."""
        other = self.bounded_by.get(change)
        return self._measured.get(other, (inf, 0.0)) if other else (inf, 0.0)

    def _is_predicted(self, change: Change) -> bool:
        return self.expected[change].is_predicted
