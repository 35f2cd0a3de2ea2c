"""Sweeps as they are compared: what each measured, and which fields of its keys match those of the others or are what
is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.results.comparable import BASELINES, Comparable, Decision, Key, KeyedTime, together
from overlap_sweep.results.points import Case, Point, PointStatus, read_points
from overlap_sweep.results.records import read_records

COMPARED_FIRST = ("backend", "device")
COMPARED_IF_NOTHING_MATCHES = ("model", "tokens", "precision", "tp_size", "setting")

_IN_ERRORS = ("model", "tokens", "precision", "tp_size", "operator", "setting")
_MOST_IN_ERRORS = 3


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
        """Returns how many points there are of each status, without those that there are none of."""
        found = Counter(point.status for point in self.points)
        return {status: found[status] for status in get_args(PointStatus) if found[status]}

    def times(self, compared: Collection[str]) -> dict[Key, KeyedTime]:
        """Returns all times by what is to be matched."""
        return {matchable(time.key, compared): time for time in self.found.times}

    def decisions(self, compared: Collection[str]) -> dict[Key, Decision]:
        """Returns what is best for each pass by what is to be matched."""
        return {matchable(key, compared): decision for key, decision in self.found.decisions.items()}


def read_dataset(label: str, path: Path) -> Dataset:
    """Reads the results at or below `path`. UserError where nothing was measured."""
    reading, records = read_points(path), read_records(path)
    comparing = filter(None, map(workloads.comparing, workloads.names()))
    found = together([one.measured(reading.points, records) for one in comparing])
    if not found.times and found.lacking:
        raise UserError(f"{path} {found.lacking}")
    if not found.times:
        what = ", ".join(f"{n} {status}" for status, n in Counter(p.status for p in reading.points).items())
        what = what or "none readable"
        raise UserError(f"{path} has no point with times to compare ({what}); measure it again with launch.py.")
    return Dataset(label, path, reading.points, found, [*reading.problems, *records.problems])


def matchable(key: Key, compared: Collection[str]) -> Key:
    """Returns a key that is equal for what is to be matched. Baselines are matched by their names also where settings
    are compared."""
    kept = {"setting"} if key.setting in BASELINES else set()
    swept = key.swept if "setting" in compared else ""
    return Key(**(key._asdict() | {"swept": swept} | dict.fromkeys(set(compared) - kept)))


def without_common_words(datasets: Sequence[Dataset]) -> list[Dataset]:
    """Returns the same with `swept` without the words that all settings of a dataset have and none of another: an
    option may differ throughout, as on another vendor's GPUs, beside others that both sweep."""
    words = [[set(key.swept.split()) for key in dataset.keys if key.swept is not None] for dataset in datasets]
    found = []
    for dataset, own in zip(datasets, words, strict=True):
        others = {word for of_other in words if of_other is not own for of_key in of_other for word in of_key}
        throughout = set.intersection(*own) - others if own else set()
        times = [replace(time, key=_without(time.key, throughout)) for time in dataset.found.times]
        found.append(replace(dataset, found=replace(dataset.found, times=times)))
    return found


def _without(key: Key, throughout: Collection[str]) -> Key:
    if key.swept is None:
        return key
    return key._replace(swept=" ".join(word for word in key.swept.split() if word not in throughout))


def compared_fields(datasets: Sequence[Dataset]) -> list[str]:
    """Returns the fields that are compared instead of matched. UserError where nothing matches however."""
    keys = _overlapped_keys(datasets)
    compared = [name for name in COMPARED_FIRST if _one_each(name, keys)]
    if _have_a_match(keys, compared):
        return compared
    more = [
        name
        for name in COMPARED_IF_NOTHING_MATCHES
        if _one_each(name, keys) and len({getattr(key, name) for of_dataset in keys for key in of_dataset}) > 1
    ]
    if more and _have_a_match(keys, [*compared, *more]):
        return [*compared, *more]
    raise UserError(_nothing_matches({dataset.label: of for dataset, of in zip(datasets, keys, strict=True)}))


def differing_values(datasets: Sequence[Dataset], compared: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns by field that is compared and by dataset its value, where they are not all the same."""
    labels = [dataset.label for dataset in datasets]
    differing = {}
    for name in compared:
        values = [list(dict.fromkeys(getattr(key, name) for key in of)) for of in _overlapped_keys(datasets)]
        # Of several passes each has a setting of its own.
        told = [" or ".join(of) if name == "setting" else of[0] for of in values]
        if len(set(told)) > 1:
            differing[name] = dict(zip(labels, told, strict=True))
    return differing


def telling_fields(datasets: Sequence[Dataset], compared: Collection[str]) -> list[str]:
    """Returns the fields that tell cases apart, such as the model, where there are several of them."""
    keys = [key for dataset in datasets for key in dataset.keys]
    return [name for name in Case._fields if name not in compared and len({getattr(key, name) for key in keys}) > 1]


def _overlapped_keys(datasets: Sequence[Dataset]) -> list[list[Key]]:
    """Returns the keys of each dataset that overlap; all keys where some dataset overlaps nothing."""
    overlapped = [[key for key in dataset.keys if key.setting not in BASELINES] for dataset in datasets]
    return overlapped if all(overlapped) else [dataset.keys for dataset in datasets]


def _one_each(name: str, keys: Iterable[Sequence[Key]]) -> bool:
    """Whether every dataset has a single value of it; of settings a single one for each pass and what was swept."""
    if name == "setting":
        return all(len({key._replace(setting="") for key in of_dataset}) == len(of_dataset) for of_dataset in keys)
    return all(len({getattr(key, name) for key in of_dataset}) == 1 for of_dataset in keys)


def _have_a_match(keys: Iterable[Sequence[Key]], compared: Collection[str]) -> bool:
    sets = [{matchable(key, compared) for key in of_dataset} for of_dataset in keys]
    return any(one & other for i, one in enumerate(sets) for other in sets[:i])


def _nothing_matches(keys: Mapping[str, Sequence[Key]]) -> str:
    values = {
        name: {label: sorted({str(getattr(key, name)) for key in of}) for label, of in keys.items()}
        for name in (*_IN_ERRORS, "backend")
    }
    differing = [name for name in _IN_ERRORS if not set.intersection(*map(set, values[name].values()))]
    told = "; ".join(
        f"{label} has " + ", ".join(f"{name} {_first(values[name][label])}" for name in differing or values)
        for label in keys
    )
    return f"No point of one is also in another: {told}. Give sweeps that have points in common."


def _first(names: Sequence[str]) -> str:
    return "/".join([*names[:_MOST_IN_ERRORS], *(["..."] if len(names) > _MOST_IN_ERRORS else [])])
