"""Reads the sweeps to compare, and decides which fields of their keys must match and which are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.report.numbers import some_of
from overlap_sweep.results.comparable import BASELINES, Comparable, Decision, Key, KeyedTime, together
from overlap_sweep.results.points import Case, Point, PointStatus, read_points
from overlap_sweep.results.records import read_records

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
        """Returns the number of points of each status that occurs."""
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
        counts = counts or "no readable points"
        raise UserError(f"{path} has no measured times to compare ({counts}); measure it again with launch.py.")
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
    several = any(key.nodes > 1 for dataset_keys in keys for key in dataset_keys)
    named = [*_IN_ERRORS, *(["nodes"] if several else [])]
    contents = "; ".join(
        f"{dataset.label} has {', '.join(_some_values(name, dataset_keys) for name in named)}"
        for dataset, dataset_keys in zip(datasets, keys, strict=True)
    )
    raise UserError(f"No points in common: {contents}. Compare sweeps that measured the same points.")


def distinguishing_fields(datasets: Sequence[Dataset], compared: Collection[str]) -> list[str]:
    """Returns the fields that distinguish cases, such as the model, where there are several."""
    keys = [key for dataset in datasets for key in dataset.keys]
    return [name for name in Case._fields if name not in compared and len({getattr(key, name) for key in keys}) > 1]


def overlapped_keys(datasets: Sequence[Dataset]) -> list[list[Key]]:
    """Returns the keys of each dataset without baselines; all keys if some dataset has only baselines."""
    overlapped = [[key for key in dataset.keys if key.setting not in BASELINES] for dataset in datasets]
    return overlapped if all(overlapped) else [dataset.keys for dataset in datasets]


def _one_each(name: str, keys: Iterable[Sequence[Key]]) -> bool:
    """Returns whether every dataset has a single value of the field; for settings: a single one per pass."""
    if name == "setting":
        return all(len({key._replace(setting="") for key in of}) == len(of) for of in keys)
    return all(len({getattr(key, name) for key in of}) == 1 for of in keys)


def _some_values(name: str, keys: Sequence[Key]) -> str:
    return f"{name} {some_of(sorted({str(getattr(key, name)) for key in keys}), 3, '/')}"
