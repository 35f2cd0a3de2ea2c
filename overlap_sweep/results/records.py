"""What lies beside the points of a sweep that searched: tuner.json, search.json and knobs.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place, check_search, check_tuner
from overlap_sweep.results.knob_record import KNOBS_FILE, KnobRecord, check_knobs, read_knobs
from overlap_sweep.results.run_directory import (
    SEARCH_FILE,
    TUNER_FILE,
    SearchRecord,
    TunerRecord,
    read_search_record,
    read_tuner_record,
)

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Records:
    """By the sweep's directory, in the order of their names."""

    tuners: dict[Path, TunerRecord]
    searches: dict[Path, SearchRecord]
    knobs: dict[Path, KnobRecord]
    problems: list[str]
    """One sentence for each that cannot be read: its points are analysed all the same."""


def read_records(root: Path) -> Records:
    """Those at or below `root`."""
    problems: list[str] = []
    tuners = _read_all(root, TUNER_FILE, read_tuner_record, check_tuner, problems)
    searches = _read_all(root, SEARCH_FILE, read_search_record, check_search, problems)
    knobs = _read_all(root, KNOBS_FILE, read_knobs, check_knobs, problems)
    return Records(tuners, searches, knobs, problems)


def _read_all(
    root: Path,
    name: str,
    read: Callable[[Path], _Record],
    check: Callable[[_Record, Path], None],
    problems: list[str],
) -> dict[Path, _Record]:
    found = {}
    for path in sorted(root.rglob(name)):
        try:
            check_place(path, root)
            record = read(path)
            check(record, path)
        except UserError as error:
            problems.append(str(error))
        else:
            found[path.parent] = record
    return found
