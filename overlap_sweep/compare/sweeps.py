"""Compares sweeps: which points match, how much faster or slower each is, and what else changed.

A point is matched by all that defines it except backend and device: these are compared if every dataset has a single
one.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.report.comparison import flat
from overlap_sweep.report.numbers import some_of
from overlap_sweep.results.comparable import BASELINES, Comparable, Decision, Key, KeyedTime, together
from overlap_sweep.results.points import Case, Point, PointStatus, read_points
from overlap_sweep.results.records import read_records
from overlap_sweep.results.verdict import VERDICTS, Verdict, mean_ratio, ratio, verdict

COMPARED_FIRST = ("backend", "device")
COMPARED_IF_NOTHING_MATCHES = ("model", "tokens", "precision", "tp_size", "nodes", "process_wide", "setting")

_IN_ERRORS = ("operator", "tp_size", "model", "tokens", "precision", "setting", "backend")


@dataclass(frozen=True)
class Dataset:
    """Results at or below one directory."""

    label: str
    path: Path
    points: list[Point]
    found: Comparable
    problems: list[str]

    @property
    def keys(self) -> list[Key]:
        return [time.key for time in self.found.times]

    def counts(self) -> dict[str, int]:
        found = Counter(point.status for point in self.points)
        return {status: found[status] for status in get_args(PointStatus) if found[status]}

    def times(self, compared: Collection[str]) -> dict[Key, KeyedTime]:
        """Returns all times by the key that is matched."""
        return {matchable(time.key, compared): time for time in self.found.times}

    def decisions(self, compared: Collection[str]) -> dict[Key, Decision]:
        """Returns the best setting of each pass by the key that is matched."""
        return {matchable(key, compared): decision for key, decision in self.found.decisions.items()}


def read_dataset(label: str, path: Path) -> Dataset:
    """Reads the results at or below `path`. UserError where nothing was measured."""
    reading, records = read_points(path), read_records(path)
    comparing = filter(None, map(workloads.comparing, workloads.names()))
    found = together([workload.measured(reading.points, records) for workload in comparing])
    if not found.times and found.lacking:
        raise UserError(f"{path} {found.lacking}")
    if not found.times:
        counts = ", ".join(f"{n} {status}" for status, n in Counter(p.status for p in reading.points).items())
        raise UserError(
            f"{path} has no measured times to compare ({counts or 'no readable points'}); measure it again with "
            "launch.py."
        )
    return Dataset(label, path, reading.points, found, [*reading.problems, *records.problems])


def matchable(key: Key, compared: Collection[str]) -> Key:
    """Returns the key without the compared fields: equal for points that match. Baselines match by name even where
    settings are compared."""
    kept = {"setting"} if key.setting in BASELINES else set()
    return Key(**(key._asdict() | dict.fromkeys(set(compared) - kept)))


def compared_fields(datasets: Sequence[Dataset]) -> list[str]:
    """Returns the fields that are compared instead of matched. UserError where nothing matches in either case."""
    keys = overlapped_keys(datasets)
    first = [name for name in COMPARED_FIRST if _one_each(name, keys)]
    more = [
        name
        for name in COMPARED_IF_NOTHING_MATCHES
        if _one_each(name, keys) and len({getattr(key, name) for dataset_keys in keys for key in dataset_keys}) > 1
    ]
    for compared in (first, [*first, *more]):
        sets = [{matchable(key, compared) for key in dataset_keys} for dataset_keys in keys]
        if any(one & other for i, one in enumerate(sets) for other in sets[:i]):
            return compared
    several = any((key.nodes or 1) > 1 for dataset_keys in keys for key in dataset_keys)
    named = [*_IN_ERRORS, *(["nodes"] if several else [])]
    contents = []
    for dataset, own in zip(datasets, keys, strict=True):
        values = (f"{name} {some_of(sorted({str(getattr(key, name)) for key in own}), 3, '/')}" for name in named)
        contents.append(f"{dataset.label} has {', '.join(values)}")
    raise UserError(f"No points in common: {'; '.join(contents)}. Compare sweeps that measured the same points.")


def overlapped_keys(datasets: Sequence[Dataset]) -> list[list[Key]]:
    """Returns the keys of each dataset without baselines; all keys if some dataset has only baselines."""
    overlapped = [[key for key in dataset.keys if key.setting not in BASELINES] for dataset in datasets]
    return overlapped if all(overlapped) else [dataset.keys for dataset in datasets]


def _one_each(name: str, keys: Iterable[Sequence[Key]]) -> bool:
    """Returns whether every dataset has a single value of the field; for settings: a single one per pass."""
    if name == "setting":
        return all(len({key._replace(setting="") for key in of}) == len(of) for of in keys)
    return all(len({getattr(key, name) for key in of}) == 1 for of in keys)


MATCHED = ("tp_size", "precision", "backend", "repetition", "model.name", "workload.name", "workload.tokens")
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


Differences = dict[str, dict[str, list[object]]]
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
    keys = [key for dataset in datasets for key in dataset.keys]
    several = [name for name in Case._fields if len({getattr(key, name) for key in keys}) > 1]
    case_fields = [name for name in several if name not in compared]
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


def _own_options(point: Point) -> dict[str, object]:
    comparing = workloads.comparing(point.workload)
    matched = (*MATCHED, *(comparing.matched if comparing else ()))
    beneath = tuple(f"{option}." for option in matched)
    return {
        name: value
        for name, value in flat(point.recorded).items()
        if name not in matched and not name.startswith(beneath)
    }


def _differences(options_by_dataset: Mapping[str, Sequence[Mapping[str, object]]]) -> Differences:
    """Returns the options whose sets of values differ between datasets, by name."""
    names = dict.fromkeys(name for points in options_by_dataset.values() for options in points for name in options)
    found = {name: [_values(name, points) for points in options_by_dataset.values()] for name in names}
    return {
        name: dict(zip(options_by_dataset, values, strict=True))
        for name, values in found.items()
        if any(value != values[0] for value in values)
    }


def _values(name: str, points: Iterable[Mapping[str, object]]) -> list[object]:
    known = {repr(value): value for options in points if (value := options.get(name)) is not None}
    return [known[text] for text in sorted(known)]
