"""What single changes are expected to gain before any is measured: the order in which a search tries them, and which
it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from overlap_sweep.results.gain import NO_GAIN, Gain
from overlap_sweep.results.records import Expected

Change = tuple[int, str]
"""A knob, by its index, and its value."""

SURE = 0.05
"""Gain that is expected of a change whose measurement counts as much as what was thought of the expectations before
any was measured: that they are right."""
UNBOUNDED = Gain(inf, 0.0)


@dataclass
class Prior:
    """Expectations, and what measurements have said of them so far."""

    expected: Mapping[Change, Expected]
    bounded_by: Mapping[Change, Change] = field(default_factory=dict)
    """By change another one, which gains at least as much."""
    _measured: dict[Change, Gain] = field(default_factory=dict)
    _alone: set[Change] = field(default_factory=set)
    """Those that were measured on the baseline itself."""

    def learn(self, change: Change, gain: Gain, on: Mapping[int, str]) -> None:
        """Takes in what a change has gained over the baseline with the changes `on`, by knob's index."""
        if change in self.expected:
            self._measured[change] = gain
            if not on:
                self._alone.add(change)

    @property
    def scale(self) -> float:
        """Returns how many times what was predicted was gained so far, from all that were measured and that all are as
        predicted; not negative."""
        known = [(self.expected[one].gain, gain) for one, gain in self._of_predictions()]
        # What is lost in noise says little.
        weighted = [(SURE**2 / (SURE**2 + gain.noise**2), expected, gain.share) for expected, gain in known]
        together = sum(weight * expected * gain for weight, expected, gain in weighted) + SURE**2
        return max(0.0, together / (sum(weight * expected**2 for weight, expected, _ in weighted) + SURE**2))

    @property
    def above(self) -> float:
        """Returns by how much a gain was farthest above its interval so far, beyond its noise; 0 if none was."""
        over = (gain.share - gain.noise - self.expected[one].high for one, gain in self._of_predictions())
        return max(0.0, *over, 0.0)

    def gain(self, change: Change, on: Mapping[int, str]) -> float:
        """Returns the gain that is expected of a change of the baseline with the changes `on`, by knob's index, after
        what was learnt; 0 of a change without an expectation."""
        found = self.expected.get(change)
        if found is None:
            return 0.0
        gained = self._gained(change, on)
        if found.is_predicted:
            left = found.gain * self.scale - gained
        else:
            left = found.gain * (1 - min(1.0, gained / found.high)) if found.high > 0 else found.gain
        return min(left, max(0.0, self._bound(change, on).share))

    def most(self, change: Change, on: Mapping[int, str]) -> float:
        """Returns the largest gain that is thought possible; infinite of a change without an expectation."""
        found = self.expected.get(change)
        if found is None:
            return inf
        most = found.high + (self.above if found.is_predicted else 0.0) - self._gained(change, on)
        bound = self._bound(change, on)
        return min(most, max(0.0, bound.share + bound.noise))

    def _gained(self, change: Change, on: Mapping[int, str]) -> float:
        """Returns what was gained already of what the change may gain: by another value of its knob, which it would
        replace, or by what mends the same cause."""
        found = self.expected[change]

        def is_same(other: Change) -> bool:
            bounds = not found.is_predicted and not self.expected[other].is_predicted
            return other[0] == change[0] or (bounds and bool(found.why) and self.expected[other].why == found.why)

        known = [other for other in on.items() if other in self._measured]
        return sum(max(0.0, self._measured[other].share) for other in known if is_same(other))

    def _bound(self, change: Change, on: Mapping[int, str]) -> Gain:
        """Returns what the change that bounds it has gained, nothing if that is there already; infinite if that is
        unknown."""
        other = self.bounded_by.get(change)
        if other is None:
            return UNBOUNDED
        return NO_GAIN if on.get(other[0]) == other[1] else self._measured.get(other, UNBOUNDED)

    def _of_predictions(self) -> list[tuple[Change, Gain]]:
        """Returns what was measured as it was predicted: of the baseline itself."""
        return [(one, self._measured[one]) for one in self._alone if self.expected[one].is_predicted]
