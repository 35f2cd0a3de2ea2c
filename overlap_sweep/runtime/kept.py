"""What need not be measured again: results that a run directory has already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import environment_identity, library_identity, point_identity
from overlap_sweep.results.run_directory import RESULT_FILE, Result, Status, read_result
from overlap_sweep.runtime.attempts import current_launch
from overlap_sweep.runtime.devices import elsewhere
from overlap_sweep.runtime.group import machine_of

LASTING: tuple[Status, ...] = ("ok", "skipped")
"""What is not tried again when a sweep is resumed."""


def whole_result(directory: Path) -> Result | None:
    """What the directory has; None where there is nothing, or something that was cut short, describes no point or is of
    a later version, which is measured again and written over."""
    path = directory / RESULT_FILE
    if not path.exists():
        return None
    try:
        return read_result(path)
    except UserError:
        return None


def kept_result(directory: Path, point: Mapping[str, Any]) -> Result | None:
    """The directory's result if it may stand for measuring the resolved `point` here and now. One that failed may if it
    is of this very launch, whose attempts it has used up."""
    result = whole_result(directory)
    if result is None or not (result.status in LASTING or of_launch(result, current_launch())):
        return None
    return result if stands_for(result, point) else None


def of_launch(result: Result, launch: str | None) -> bool:
    return launch is not None and result.launch == launch


def stands_for(result: Result, point: Mapping[str, Any]) -> bool:
    """Whether the result is of the same configuration, and of an environment that is the same as the point's.

    Where points run elsewhere, only libraries can be compared: a login node has other GPUs, or none, and other
    variables.
    """
    return is_of(result, point) and not differing(result, point)


def is_of(result: Result, point: Mapping[str, Any]) -> bool:
    """Whether the result is of the same configuration."""
    return point_identity(result.point) == point_identity(point)


def differing(result: Result, point: Mapping[str, Any]) -> list[str]:
    """What of the environment differs."""
    identity = library_identity if elsewhere() else environment_identity
    before, now = identity(result.environment), identity(machine_of(point))
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
