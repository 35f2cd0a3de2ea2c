"""Sweeps against each other: which points match, how much faster or slower each is, and what else changed.

A point is matched by all that defines it, but not by who ran it where: backend and device are what is compared, if
every dataset has one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from overlap_sweep.compare.datasets import Dataset
from overlap_sweep.compare.differences import Difference, configuration_differences, environment_differences
from overlap_sweep.compare.fields import compared_fields, differing_values, telling_fields
from overlap_sweep.compare.matching import Match, Unmatched, matches, unmatched
from overlap_sweep.compare.measured import Key
from overlap_sweep.compare.slots import SlotChange, slot_changes
from overlap_sweep.compare.totals import Aggregate, Totals, aggregates, totals
from overlap_sweep.workloads.tp_training.compare import DEFAULTS, STEP, deviations


@dataclass(frozen=True)
class SweepComparison:
    """All that is known about sweeps beside each other."""

    datasets: list[Dataset]
    reference: str
    compared: dict[str, dict[str, Any]]
    """What differs though points match, such as the backend: by field and dataset its value."""
    telling: list[str]
    """The fields of keys that tell cases apart, such as the model, where there are several of them."""
    matches: list[Match]
    slots: list[SlotChange]
    aggregates: list[Aggregate]
    """Of each dataset but the reference: by TP size, operator and pass, and last all together."""
    totals: list[Totals]
    unmatched: list[Unmatched]
    deviations: list[str]
    """A sentence for each match that computes something else than in the reference, as far as losses tell."""
    environment: list[Difference]
    configuration: list[Difference]
    problems: list[str]

    @property
    def candidates(self) -> list[str]:
        """The labels of all but the reference."""
        return [dataset.label for dataset in self.datasets if dataset.label != self.reference]


def compare_sweeps(datasets: Sequence[Dataset], reference: str) -> SweepComparison:
    """`reference` is the label of one of them. UserError where nothing matches."""
    datasets = with_swept(datasets)
    compared = compared_fields(datasets)
    telling = telling_fields(datasets, compared)
    base = next(dataset for dataset in datasets if dataset.label == reference)
    others = [dataset for dataset in datasets if dataset is not base]
    matched = {other.label: matches(other, base, compared) for other in others}
    slots = {other.label: slot_changes(other, base, compared) for other in others}
    all_matches = [match for of_one in matched.values() for match in of_one]
    return SweepComparison(
        datasets=list(datasets),
        reference=reference,
        compared=differing_values(datasets, compared),
        telling=telling,
        matches=all_matches,
        slots=[slot for of_one in slots.values() for slot in of_one],
        aggregates=[one for label in matched for one in aggregates(label, matched[label], slots[label], telling)],
        totals=totals(datasets, compared),
        unmatched=[found for other in others for found in unmatched(other, base, compared, telling)],
        deviations=deviations(datasets, all_matches),
        environment=environment_differences(datasets),
        configuration=configuration_differences(datasets),
        problems=[problem for dataset in datasets for problem in dataset.problems],
    )


def with_swept(datasets: Sequence[Dataset]) -> list[Dataset]:
    """Of tensor-parallel stacks an option may differ throughout, as on another vendor's GPUs, beside others that both
    sweep: each key gets the words of its setting without those that all of its dataset's have and no other's."""
    words = [[set(_words(one.key)) for one in dataset.measured if one.key.pass_name == STEP] for dataset in datasets]
    found = []
    for dataset, own in zip(datasets, words, strict=True):
        others = {word for of_other in words if of_other is not own for of_key in of_other for word in of_key}
        throughout = set.intersection(*own) - others if own else set()
        measured = [
            replace(one, key=one.key._replace(swept=" ".join(w for w in _words(one.key) if w not in throughout)))
            if one.key.pass_name == STEP
            else one
            for one in dataset.measured
        ]
        found.append(replace(dataset, measured=measured))
    return found


def _words(key: Key) -> list[str]:
    return [] if key.setting == DEFAULTS else str(key.setting).split()
