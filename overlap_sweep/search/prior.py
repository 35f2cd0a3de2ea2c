"""What single changes are expected to gain before any is measured: the order in which a search tries them, and which
it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    _measured: dict[Change, float] = field(default_factory=dict)

    def learn(self, change: Change, gain: float) -> None:
        """Takes in what a change has gained, as a share of the baseline's time."""
        if change in self.expected:
            self._measured[change] = gain

    @property
    def scale(self) -> float:
        """Returns how many times what was predicted was gained so far, from all that were measured and that all are as
        predicted; not negative."""
        pairs = [(self.expected[one].gain, gain) for one, gain in self._measured.items() if self._is_predicted(one)]
        together = sum(expected * gain for expected, gain in pairs) + SURE**2
        return max(0.0, together / (sum(expected**2 for expected, _ in pairs) + SURE**2))

    @property
    def above(self) -> float:
        """Returns by how much a gain was farthest above its interval so far; 0 if none was."""
        over = (gain - self.expected[one].high for one, gain in self._measured.items() if self._is_predicted(one))
        return max(0.0, *over, 0.0)

    def gain(self, change: Change) -> float:
        """Returns the expected gain, after what was learnt; 0 of a change without an expectation."""
        found = self.expected.get(change)
        return 0.0 if found is None else found.gain * (self.scale if found.is_predicted else 1.0)

    def most(self, change: Change) -> float:
        """Returns the largest gain that is thought possible; infinite of a change without an expectation."""
        found = self.expected.get(change)
        if found is None:
            return float("inf")
        return found.high + (self.above if found.is_predicted else 0.0)

    def _is_predicted(self, change: Change) -> bool:
        return self.expected[change].is_predicted
