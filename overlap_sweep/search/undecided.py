"""What a search knows in the end: whether something is proven to be faster, whether nothing is, or neither."""

from __future__ import annotations

from typing import Literal

from overlap_sweep.search import Setting
from overlap_sweep.search.knob_trail import KnobTrail

Verdict = Literal["proven", "keep", "undecided"]
"""`keep`: nothing gains what is worth having, and the measurements would have shown it."""

WORTH_HAVING = 0.05
"""Gain, as a share of the baseline's time, that measurements must be able to show before they speak for the baseline.
"""


def verdict(trail: KnobTrail, *, unfinished: bool) -> Verdict:
    """Returns what the measurements say. `unfinished`: whether values that may gain were left out."""
    if trail.chosen not in (None, trail.baseline):
        return "proven"
    return "undecided" if unfinished or trail.best != trail.baseline or rivals(trail) else "keep"


def rivals(trail: KnobTrail) -> list[Setting]:
    """Returns the settings that may gain what is worth having, those first that gain most even if the noise is against
    them: what seems faster, and, as long as the baseline's own time is known too badly, what may be."""
    base = trail.baseline
    gains = {setting: gain for setting in trail.found.of if setting != base and (gain := trail.compared(setting))}
    is_known = noise(trail) < _shown(trail)
    may_gain = {
        setting: gain
        for setting, gain in gains.items()
        if gain.interval[1] >= WORTH_HAVING and (gain.share > 0 or not is_known)
    }
    return sorted(may_gain, key=lambda setting: -may_gain[setting].interval[0])


def noise(trail: KnobTrail) -> float:
    """Returns the noise of the baseline's own time, as a share of it."""
    found = trail.found.estimate(trail.baseline)
    return found.noise_us / found.time_us


def _shown(trail: KnobTrail) -> float:
    """Returns the gain that the measurements should be able to show: the largest that was predicted of what was tried,
    at least what is worth having."""
    expected = trail.prior.expected if trail.prior else {}
    changes = {change for setting in trail.found.of for change in trail.changed(setting).items()}
    predicted = (one.gain for change, one in expected.items() if change in changes and one.is_predicted)
    return max(WORTH_HAVING, *predicted, 0.0)
