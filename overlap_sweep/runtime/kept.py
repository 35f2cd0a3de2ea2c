"""Results that need not be measured again: those in the sweep's directory and those in the store."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import environment_identity, instrumented, library_identity, point_identity
from overlap_sweep.results.run_directory import RESULT_FILE, Result, Status, clear, read_result, write_result
from overlap_sweep.runtime.group_config import elsewhere, machine_of
from overlap_sweep.store import Measurement, Store

LASTING: tuple[Status, ...] = ("ok", "skipped")
"""Statuses of points that are not tried again when a sweep is resumed."""


def whole_result(directory: Path) -> Result | None:
    """Returns the directory's result; None if it is missing, damaged or of a later version: then the point is measured
    again and the result overwritten."""
    path = directory / RESULT_FILE
    if not path.exists():
        return None
    try:
        return read_result(path)
    except UserError:
        return None


def kept_result(directory: Path, point: Mapping[str, Any]) -> Result | None:
    """Returns the directory's result if it is valid for the resolved `point` in the present environment."""
    result = whole_result(directory)
    if result is None or result.status not in LASTING or point_identity(result.point) != point_identity(point):
        return None
    return None if differs(result, point) else result


def differs(result: Result, point: Mapping[str, Any]) -> bool:
    """Returns whether the result's environment differs from the point's.

    If points run on other machines, only libraries are compared: a login node has other GPUs and variables.
    """
    identity = library_identity if elsewhere() else environment_identity
    return identity(result.environment) != identity(machine_of(point))


def check_store(config: DictConfig) -> None:
    """Raises UserError if the store cannot be used."""
    if config.reuse and not config.store:
        raise UserError("reuse=true requires store=<path>.")
    _store(config)


def remembered(config: DictConfig, point: dict[str, Any], directory: Path) -> Result | None:
    """With `reuse=true`, writes the store's latest measurement of the point in this environment as its result, and
    returns it. Traces are not copied."""
    store = _store(config) if config.reuse else None
    found = _find(store, point, machine_of(point)) if store else None
    if found is None:
        return None
    clear(directory)
    source = f"{config.store}: measured {found.result.started} on {found.host} in {found.directory}"
    result = msgspec.structs.replace(found.result, name=directory.name, point=point, traces=[], reused_from=source)
    write_result(directory, result)
    return result


def remember(config: DictConfig, result: Result, directory: Path) -> None:
    """Adds a new `ok` result to the store, if there is one, unless its times must not be compared."""
    store = _store(config)
    if store and result.status == "ok" and not result.reused_from and not instrumented(result.point):
        store.add(result, directory)


def _store(config: DictConfig) -> Store | None:
    return _opened(Path(config.store).expanduser().absolute()) if config.store else None


@cache
def _opened(path: Path) -> Store:
    store = Store(path)
    atexit.register(store.close)
    return store


def _find(store: Store, point: dict[str, Any], environment: dict[str, Any]) -> Measurement | None:
    """Returns the store's measurement of the point; prints new problems of the store to stderr."""
    known = len(store.problems)
    found = store.find(point, environment)
    for problem in store.problems[known:]:
        print(f"store: {problem}", file=sys.stderr, flush=True)
    return found
