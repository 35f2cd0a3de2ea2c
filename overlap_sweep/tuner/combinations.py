"""What to try together on the whole layer: the best of each slot, and what is nearly as good.

The best of each slot need not be the best together: slots share SMs, copy engines and power with their neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice
from overlap_sweep.workloads.operator.switches import plan

BEST = "best of each slot"


def combinations(
    choices: Sequence[PassChoice], limit: int, within: float, unmeasured: str = "off"
) -> dict[str, OverlapConfig]:
    """At most `limit` different configurations by what they are: first the plan of these choices, then with one pass's
    setting replaced by another way to overlap it, those that should cost least first.

    A setting that is slower than the chosen one by more than `within` of its time is not tried. Each configuration is
    what Megatron-Core's switches allow, with slots that nothing was measured of as `unmeasured` says.
    """
    found = {BEST: plan(choices, unmeasured).config}
    for choice, other in _alternatives(choices, within):
        if len(found) >= limit:
            break
        config = plan([replace(c, chosen=other) if c is choice else c for c in choices], unmeasured).config
        if config not in found.values():
            found[f"{choice.label} by {other.name}"] = config
    return found


def _alternatives(choices: Sequence[PassChoice], within: float) -> Iterator[tuple[PassChoice, Candidate]]:
    """For each choice its best candidate that overlaps by other methods, and its best one by the same."""
    near = []
    for choice in choices:
        kinds_seen = set()
        for candidate in sorted(choice.candidates, key=lambda candidate: candidate.time_us):
            lost_us = candidate.time_us - choice.chosen.time_us
            same_methods = _methods(candidate) == _methods(choice.chosen)
            if candidate is choice.chosen or not candidate.measured or same_methods in kinds_seen:
                continue
            kinds_seen.add(same_methods)
            if lost_us <= within * choice.chosen.time_us:
                near.append((same_methods, lost_us, choice, candidate))
    for _, _, choice, candidate in sorted(near, key=lambda item: item[:2]):
        yield choice, candidate


def _methods(candidate: Candidate) -> dict[str, str]:
    return {slot: setting["method"] for slot, setting in candidate.settings.items()}
