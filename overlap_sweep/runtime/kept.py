"""What need not be measured again: results that a run directory, or a store, has already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.errors import UserError
from overlap_sweep.identity import environment_identity, library_identity, point_identity
from overlap_sweep.run_directory import RESULT_FILE, Result, Status, read_result
from overlap_sweep.runtime.devices import elsewhere
from overlap_sweep.runtime.group import machine_of

LASTING: tuple[Status, ...] = ("ok", "skipped")
"""What is not tried again when a sweep is resumed."""


def whole_result(directory: Path) -> Result | None:
    """What the directory has; None where there is nothing, or something that was cut short or is of a later version,
    which is measured again and written over."""
    path = directory / RESULT_FILE
    if not path.exists():
        return None
    try:
        return read_result(path)
    except UserError:
        return None


def kept_result(directory: Path, point: Mapping[str, Any]) -> Result | None:
    """The directory's result if it may stand for measuring the resolved `point` here and now."""
    result = whole_result(directory)
    return result if result and result.status in LASTING and stands_for(result, point) else None


def stands_for(result: Result, point: Mapping[str, Any]) -> bool:
    """Whether the result is of the same configuration, and of an environment that is the same as the point's.

    Where points run elsewhere (a login node) only libraries can be compared; the job compares the rest.
    """
    if point_identity(result.point) != point_identity(point):
        return False
    same = library_identity if elsewhere() else environment_identity
    return same(result.environment) == same(machine_of(point))
