"""Sweeps against each other: which points match, how much faster or slower each is, and what else changed.

A point is matched by all that defines it, but not by who ran it where: backend and device are what is compared, if
every dataset has one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlap_sweep import workloads
from overlap_sweep.compare.datasets import (
    Dataset,
    compared_fields,
    differing_values,
    telling_fields,
    without_common_words,
)
from overlap_sweep.report.comparison import flat
from overlap_sweep.results.comparable import Key, KeyedTime
from overlap_sweep.results.estimate import hidden_fraction
from overlap_sweep.results.points import Point
from overlap_sweep.results.verdict import VERDICTS, Verdict, mean_ratio, ratio, verdict

_MATCHED = ("tp_size", "precision", "backend", "repetition", "model.name", "workload.name", "workload.tokens")
"""Of a configuration what the keys of all workloads tell, and what is never the same."""


@dataclass(frozen=True)
class Match:
    """Something measured in a dataset beside what it is compared with in the reference."""

    dataset: str
    reference: str
    ours: KeyedTime
    theirs: KeyedTime

    @property
    def ratio(self) -> float:
        """Time over the reference's: below 1 is faster."""
        return self.ours.time.time_us / self.theirs.time.time_us

    @property
    def verdict(self) -> Verdict:
        return verdict(self.ours.time, self.theirs.time)

    @property
    def none_ratio(self) -> float:
        """Returns by how much the machine changed, not the overlap; NaN where it is unknown."""
        return ratio(self.ours.none_us, self.theirs.none_us)

    @property
    def floor_ratio(self) -> float:
        return ratio(self.ours.floor_us, self.theirs.floor_us)


@dataclass(frozen=True)
class SlotChange(Match):
    """What is best for one slot, in a dataset and in the reference. The match is of the best of the slot's whole pass,
    whose times these are."""

    slot: str
    setting: str
    """Of this slot."""
    reference_setting: str
    reference_choice_us: float | None
    """The time in the dataset of what is best in the reference; None where it was not measured."""
    first_of_pass: bool
    """The pass's other slot has the same times."""

    @property
    def changed(self) -> bool:
        return self.setting != self.reference_setting

    @property
    def regret(self) -> float:
        """What keeping the reference's choice costs in the dataset, as a fraction of the best; NaN where unknown."""
        return ratio(self.reference_choice_us, self.ours.time.time_us) - 1


@dataclass(frozen=True)
class Aggregate:
    """Matching points taken together: of a pass of an operator at one TP size, or all of them. Ratios are geometric
    means."""

    dataset: str
    case: str
    """Empty where there is only one."""
    tp_size: int | None
    operator: str | None
    """None, like the pass, for all together."""
    pass_name: str | None
    matches: list[Match]
    best_ratio: float
    """Of the best settings, whether the same or not; NaN where no slots were decided."""
    none_ratio: float
    floor_ratio: float

    @property
    def ratio(self) -> float:
        return mean_ratio(match.ratio for match in self.matches)

    @property
    def counts(self) -> dict[Verdict, int]:
        found = Counter(match.verdict for match in self.matches)
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def name(self) -> str:
        """Empty for all together."""
        return f"{self.case} {self.operator} {self.pass_name}".strip() if self.operator else ""


@dataclass(frozen=True)
class Totals:
    """One dataset as a whole: sums over the passes that were decided in all datasets. Microseconds."""

    label: str
    common_passes: int
    best_us: float
    none_us: float
    floor_us: float

    @property
    def speedup(self) -> float:
        return ratio(self.none_us, self.best_us)

    @property
    def hidden_fraction(self) -> float:
        return hidden_fraction(self.best_us, self.none_us, self.floor_us)

    def over(self, base: Totals) -> dict[str, float]:
        """Returns the ratios to another dataset's."""
        names = ("best", "none", "floor")
        return {name: ratio(getattr(self, f"{name}_us"), getattr(base, f"{name}_us")) for name in names}


@dataclass(frozen=True)
class Unmatched:
    """What one dataset has and another has not."""

    only_in: str
    missing_in: str
    points: list[str]
    """With what became of it in the other, where it did not succeed there."""


Differences = dict[str, dict[str, list[Any]]]
"""What is not the same everywhere, by name and dataset: one value, or all that its points have; empty where it is not
recorded."""


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
    """A sentence for each match that computes something else than in the reference, as far as is known."""
    environment: Differences
    configuration: Differences
    problems: list[str]

    @property
    def candidates(self) -> list[str]:
        """The labels of all but the reference."""
        return [dataset.label for dataset in self.datasets if dataset.label != self.reference]


def compare_sweeps(datasets: Sequence[Dataset], reference: str) -> SweepComparison:
    """`reference` is the label of one of them. UserError where nothing matches."""
    datasets = without_common_words(datasets)
    compared = compared_fields(datasets)
    telling = telling_fields(datasets, compared)
    base = next(dataset for dataset in datasets if dataset.label == reference)
    others = [dataset for dataset in datasets if dataset is not base]
    matches = {other.label: _matches(other, base, compared) for other in others}
    slots = {other.label: list(_slot_changes(other, base, compared)) for other in others}
    all_matches = [match for of_one in matches.values() for match in of_one]
    environments = {d.label: [flat(p.result.environment) for p in d.points if p.result] for d in datasets}
    configurations = {d.label: [_own_options(p) for p in d.points if p.status == "ok"] for d in datasets}
    return SweepComparison(
        datasets=datasets,
        reference=reference,
        compared=differing_values(datasets, compared),
        telling=telling,
        matches=all_matches,
        slots=[slot for of_one in slots.values() for slot in of_one],
        aggregates=[one for label in matches for one in _aggregates(label, matches[label], slots[label], telling)],
        totals=_totals(datasets, compared),
        unmatched=[found for other in others for found in _unmatched(other, base, compared, telling)],
        deviations=[said for match in all_matches for said in _deviation(match)],
        environment=_differences(environments),
        configuration=_differences(configurations),
        problems=[problem for dataset in datasets for problem in dataset.problems],
    )


def _matches(dataset: Dataset, base: Dataset, compared: Collection[str]) -> list[Match]:
    ours, theirs = dataset.times(compared), base.times(compared)
    found = [Match(dataset.label, base.label, ours[key], theirs[key]) for key in theirs if key in ours]
    return sorted(found, key=lambda match: match.ours.key.order)


def _unmatched(
    dataset: Dataset, base: Dataset, compared: Collection[str], telling: Sequence[str]
) -> Iterator[Unmatched]:
    """Returns the keys that only one of the two has; `telling` are the fields to name."""
    for one, other in ((base, dataset), (dataset, base)):
        ours, theirs = one.times(compared), other.times(compared)
        keys = sorted((ours[key].key for key in ours if key not in theirs), key=lambda key: key.order)
        if keys:
            yield Unmatched(one.label, other.label, [_with_fate(key, other, telling) for key in keys])


def _with_fate(key: Key, missing_in: Dataset, telling: Sequence[str]) -> str:
    name = f"{key.case(telling)} TP={key.tp_size} {key.operator} {key.pass_name} {key.setting}".strip()
    # Failed points don't tell their device, so of several cases it is not sure whose fate it is.
    fate = None if telling else missing_in.found.not_ok.get((key.tp_size, key.operator, key.pass_name, key.setting))
    return f"{name} ({fate})" if fate else name


def _deviation(match: Match) -> Iterator[str]:
    ours, theirs = match.ours.computed, match.theirs.computed
    if ours and theirs and (found := ours.deviation_from(theirs)):
        yield f"{match.dataset} does not compute what {match.reference} does: {found}"


def _slot_changes(dataset: Dataset, base: Dataset, compared: Collection[str]) -> Iterator[SlotChange]:
    """Returns how each slot changed that was overlapped in either."""
    ours, theirs = dataset.decisions(compared), base.decisions(compared)
    times = {time.key: time for time in dataset.found.times}
    for key, own in sorted(ours.items(), key=lambda pair: pair[1].best.key.order):
        if key not in theirs:
            continue
        other = theirs[key]
        kept = times.get(own.best.key._replace(setting=other.best.key.setting))
        tried = [slot for slot in own.slots if slot in own.tried | other.tried]
        for slot in tried:
            yield SlotChange(
                dataset=dataset.label,
                reference=base.label,
                ours=own.best,
                theirs=other.best,
                slot=slot,
                setting=own.slots[slot],
                reference_setting=other.slots[slot],
                reference_choice_us=kept.time.time_us if kept else None,
                first_of_pass=slot == tried[0],
            )


def _aggregates(
    dataset: str, matches: Sequence[Match], slots: Sequence[SlotChange], telling: Sequence[str]
) -> Iterator[Aggregate]:
    """By case, TP size, operator and pass, and last all together. Matches and slots are all of the dataset."""

    def group_of(match: Match) -> tuple[str, int | None, str | None, str | None]:
        key = match.ours.key
        return key.case(telling), key.tp_size, key.operator, key.pass_name

    for group in [*dict.fromkeys(map(group_of, matches)), ("", None, None, None)]:
        own = [match for match in matches if group[1] is None or group_of(match) == group]
        best = [slot for slot in slots if slot.first_of_pass and (group[1] is None or group_of(slot) == group)]
        # All settings of a pass have the same baselines.
        passes = {match.ours.key._replace(setting=""): match for match in own}.values()
        yield Aggregate(
            dataset,
            *group,
            matches=own,
            best_ratio=mean_ratio(slot.ratio for slot in best),
            none_ratio=mean_ratio(match.none_ratio for match in passes),
            floor_ratio=mean_ratio(match.floor_ratio for match in passes),
        )


def _totals(datasets: Sequence[Dataset], compared: Collection[str]) -> list[Totals]:
    decisions = [dataset.decisions(compared) for dataset in datasets]
    common = set.intersection(*map(set, decisions))
    return [
        Totals(
            label=dataset.label,
            common_passes=len(common),
            best_us=math.fsum(own[key].best.time.time_us for key in common),
            none_us=math.fsum(own[key].best.none_us or math.nan for key in common),
            floor_us=math.fsum(own[key].best.floor_us or math.nan for key in common),
        )
        for dataset, own in zip(datasets, decisions, strict=True)
    ]


def _own_options(point: Point) -> dict[str, Any]:
    """Without what matching tells already."""
    comparing = workloads.comparing(point.workload)
    matched = (*_MATCHED, *(comparing.matched if comparing else ()))
    beneath = tuple(f"{option}." for option in matched)
    return {
        name: value
        for name, value in flat(point.config).items()
        if name not in matched and not name.startswith(beneath)
    }


def _differences(of_datasets: Mapping[str, Sequence[Mapping[str, Any]]]) -> Differences:
    """By name, whatever some dataset has another set of values of."""
    names = dict.fromkeys(name for of_dataset in of_datasets.values() for options in of_dataset for name in options)
    found = {name: [_values(name, of_dataset) for of_dataset in of_datasets.values()] for name in names}
    return {
        name: dict(zip(of_datasets, values, strict=True))
        for name, values in found.items()
        if any(of_dataset != values[0] for of_dataset in values)
    }


def _values(name: str, of_dataset: Iterable[Mapping[str, Any]]) -> list[Any]:
    known = {repr(options[name]): options[name] for options in of_dataset if options.get(name) is not None}
    return [known[text] for text in sorted(known)]
