"""Compares sweeps: which points match, how much faster or slower each is, and what else changed.

A point is matched by all that defines it except backend and device: these are compared if every dataset has a single
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from overlap_sweep import workloads
from overlap_sweep.compare.datasets import Dataset, compared_fields, distinguishing_fields, overlapped_keys
from overlap_sweep.report.comparison import flat
from overlap_sweep.results.comparable import Key, KeyedTime
from overlap_sweep.results.points import Point
from overlap_sweep.results.verdict import VERDICTS, Verdict, mean_ratio, ratio, verdict

_MATCHED = ("tp_size", "precision", "backend", "repetition", "model.name", "workload.name", "workload.tokens")
"""Options that the keys of all workloads cover, and those that are never the same."""


@dataclass(frozen=True)
class Match:
    """A time of a dataset and the time of the reference that it is compared with."""

    dataset: str
    reference: str
    ours: KeyedTime
    theirs: KeyedTime

    @property
    def ratio(self) -> float:
        """Returns the time over the reference's: below 1 is faster."""
        return self.ours.time.time_us / self.theirs.time.time_us

    @property
    def verdict(self) -> Verdict:
        return verdict(self.ours.time, self.theirs.time)

    @property
    def none_ratio(self) -> float:
        """Returns the ratio of the none times, which shows how much the machine changed; NaN where it is unknown."""
        return ratio(self.ours.none_us, self.theirs.none_us)

    @property
    def floor_ratio(self) -> float:
        return ratio(self.ours.floor_us, self.theirs.floor_us)


@dataclass(frozen=True)
class SlotChange(Match):
    """The best settings of one slot in a dataset and in the reference. The times are those of the best settings of the
    slot's whole pass."""

    slot: str
    setting: str
    """The setting of this slot alone."""
    reference_setting: str


@dataclass(frozen=True)
class Aggregate:
    """Matching points of one pass, or of all passes. Ratios are geometric means."""

    dataset: str
    key: Key | None
    """The pass, without a setting; None for all passes."""
    matches: list[Match]
    best: list[Match]
    """The best setting of each pass; it may differ between the two."""

    @property
    def ratio(self) -> float:
        return mean_ratio(match.ratio for match in self.matches)

    @property
    def best_ratio(self) -> float:
        """Returns the ratio of the best times; NaN where no slots were decided."""
        return mean_ratio(match.ratio for match in self.best)

    @property
    def counts(self) -> dict[Verdict, int]:
        found = Counter(match.verdict for match in self.matches)
        return {verdict: found[verdict] for verdict in VERDICTS}


class Unmatched(NamedTuple):
    """Points that one dataset has and another lacks."""

    only_in: str
    missing_in: str
    points: list[str]


Differences = dict[str, dict[str, list[Any]]]
"""Values that differ, by name and dataset: all values of its points; empty where the name is not recorded."""


@dataclass(frozen=True)
class SweepComparison:
    """The whole comparison of two or more sweeps."""

    datasets: list[Dataset]
    reference: str
    compared: Differences
    """Fields that differ though points match, such as the backend."""
    case_fields: list[str]
    """The fields of keys that distinguish cases, such as the model, where there are several."""
    matches: list[Match]
    slots: list[SlotChange]
    aggregates: list[Aggregate]
    """For each dataset but the reference: one per pass, and last one over all passes."""
    unmatched: list[Unmatched]
    environment: Differences
    configuration: Differences

    @property
    def candidates(self) -> list[str]:
        """Returns the labels of all but the reference."""
        return [dataset.label for dataset in self.datasets if dataset.label != self.reference]


def compare_sweeps(datasets: Sequence[Dataset], reference: str) -> SweepComparison:
    """Returns the comparison; `reference` is the label of one dataset. UserError where nothing matches."""
    compared = compared_fields(datasets)
    case_fields = distinguishing_fields(datasets, compared)
    base = next(dataset for dataset in datasets if dataset.label == reference)
    others = [dataset for dataset in datasets if dataset is not base]
    matches = {other.label: _matches(other, base, compared) for other in others}
    slots = {other.label: list(_slot_changes(other, base, compared)) for other in others}
    labels = [dataset.label for dataset in datasets]
    values = [[{name: getattr(key, name) for name in compared} for key in of] for of in overlapped_keys(datasets)]
    environments = {d.label: [flat(p.result.environment) for p in d.points if p.result] for d in datasets}
    configurations = {d.label: [_own_options(p) for p in d.points if p.status == "ok"] for d in datasets}
    return SweepComparison(
        datasets=list(datasets),
        reference=reference,
        compared=_differences(dict(zip(labels, values, strict=True))),
        case_fields=case_fields,
        matches=[match for found in matches.values() for match in found],
        slots=[slot for found in slots.values() for slot in found],
        aggregates=[one for label in matches for one in _aggregates(label, matches[label], slots[label])],
        unmatched=[found for other in others for found in _unmatched(other, base, compared, case_fields)],
        environment=_differences(environments),
        configuration=_differences(configurations),
    )


def _matches(dataset: Dataset, base: Dataset, compared: Collection[str]) -> list[Match]:
    ours, theirs = dataset.times(compared), base.times(compared)
    found = [Match(dataset.label, base.label, ours[key], theirs[key]) for key in theirs if key in ours]
    return sorted(found, key=lambda match: match.ours.key.order)


def _unmatched(
    dataset: Dataset, base: Dataset, compared: Collection[str], case_fields: Sequence[str]
) -> Iterator[Unmatched]:
    """Yields the keys that only one of the two has; `case_fields` are the fields to name."""
    for one, other in ((base, dataset), (dataset, base)):
        ours, theirs = one.times(compared), other.times(compared)
        keys = sorted((ours[key].key for key in ours if key not in theirs), key=lambda key: key.order)
        if keys:
            yield Unmatched(one.label, other.label, [f"{key.named(case_fields)} {key.setting}" for key in keys])


def _slot_changes(dataset: Dataset, base: Dataset, compared: Collection[str]) -> Iterator[SlotChange]:
    """Yields the change of each slot that was overlapped in either dataset."""
    ours, theirs = dataset.decisions(compared), base.decisions(compared)
    for key, own in sorted(ours.items(), key=lambda pair: pair[1].best.key.order):
        if other := theirs.get(key):
            for slot in own.slots:
                if slot in own.tried | other.tried:
                    settings = own.slots[slot], other.slots[slot]
                    yield SlotChange(dataset.label, base.label, own.best, other.best, slot, *settings)


def _aggregates(dataset: str, matches: Sequence[Match], slots: Sequence[SlotChange]) -> Iterator[Aggregate]:
    """Yields the aggregates by pass, and last over all passes. Matches and slots are all of the dataset."""
    # The slots of a pass have the same times.
    best = {_pass_of(slot): slot for slot in slots}
    for key in dict.fromkeys(map(_pass_of, matches)):
        own = [match for match in matches if _pass_of(match) == key]
        yield Aggregate(dataset, key, own, [best[key]] if key in best else [])
    yield Aggregate(dataset, None, list(matches), list(best.values()))


def _pass_of(match: Match) -> Key:
    return match.ours.key._replace(setting="")


def _own_options(point: Point) -> dict[str, Any]:
    """Returns the point's options that matching does not cover, flattened."""
    comparing = workloads.comparing(point.workload)
    matched = (*_MATCHED, *(comparing.matched if comparing else ()))
    beneath = tuple(f"{option}." for option in matched)
    return {
        name: value
        for name, value in flat(point.recorded).items()
        if name not in matched and not name.startswith(beneath)
    }


def _differences(options_by_dataset: Mapping[str, Sequence[Mapping[str, Any]]]) -> Differences:
    """Returns the options whose sets of values differ between datasets, by name."""
    names = dict.fromkeys(name for points in options_by_dataset.values() for options in points for name in options)
    found = {name: [_values(name, points) for points in options_by_dataset.values()] for name in names}
    return {
        name: dict(zip(options_by_dataset, values, strict=True))
        for name, values in found.items()
        if any(value != values[0] for value in values)
    }


def _values(name: str, points: Iterable[Mapping[str, Any]]) -> list[Any]:
    known = {repr(options[name]): options[name] for options in points if options.get(name) is not None}
    return [known[text] for text in sorted(known)]
