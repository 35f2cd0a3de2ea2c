"""The best of each slot: whether it is still what it was in the reference, and what keeping that costs."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from overlap_sweep.compare.datasets import Dataset, measured_candidate
from overlap_sweep.compare.fields import matchable
from overlap_sweep.compare.matching import Match
from overlap_sweep.overlap import space
from overlap_sweep.workloads.operator.choice import PassChoice


@dataclass(frozen=True)
class SlotChange(Match):
    """What is best for one slot, in a dataset and in the reference. The match is of the best of the slot's whole pass,
    whose times these are."""

    slot: str
    setting: str
    """Of this slot."""
    reference_setting: str
    changed: bool
    reference_choice_us: float | None
    """The time in the dataset of what is best in the reference; None where it was not measured."""

    @property
    def regret(self) -> float:
        """What keeping the reference's choice costs in the dataset, as a fraction of the best; NaN where unknown."""
        if self.reference_choice_us is None:
            return math.nan
        return self.reference_choice_us / self.ours.time.time_us - 1


def slot_changes(dataset: Dataset, base: Dataset, compared: Collection[str]) -> list[SlotChange]:
    """Of every slot that was overlapped in either."""
    theirs = {matchable(key, compared): (key, choice) for key, choice in base.choices.items()}
    found = []
    for key in sorted(dataset.choices, key=lambda key: key.order):
        if matchable(key, compared) not in theirs:
            continue
        choice = dataset.choices[key]
        base_key, base_choice = theirs[matchable(key, compared)]
        best = Match(
            dataset.label,
            base.label,
            measured_candidate(key, choice, choice.chosen),
            measured_candidate(base_key, base_choice, base_choice.chosen),
        )
        found += [
            _change(best, slot, choice, base_choice)
            for phase, pass_name in space.PASS_OF_PHASE.items()
            if pass_name == choice.pass_name
            and (slot := space.slot(choice.operator, phase)) in choice.tried_slots | base_choice.tried_slots
        ]
    return found


def _change(best: Match, slot: str, choice: PassChoice, base: PassChoice) -> SlotChange:
    ours, theirs = choice.chosen.settings.get(slot), base.chosen.settings.get(slot)
    kept = (c.time_us for c in choice.candidates if c.measured and c.name == base.chosen.name)
    return SlotChange(
        dataset=best.dataset,
        reference=best.reference,
        ours=best.ours,
        theirs=best.theirs,
        slot=slot,
        setting=space.brief_name(ours),
        reference_setting=space.brief_name(theirs),
        changed=ours != theirs,
        reference_choice_us=next(kept, None),
    )
