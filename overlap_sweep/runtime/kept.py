"""Results that need not be measured again: those in the sweep's directory, and those that the store remembers."""

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
from overlap_sweep.results.identity import environment_identity, library_identity, point_identity
from overlap_sweep.results.run_directory import RESULT_FILE, Result, Status, clear, read_result, write_result
from overlap_sweep.runtime.group_config import elsewhere, machine_of
from overlap_sweep.store import Measurement, Store

LASTING: tuple[Status, ...] = ("ok", "skipped")
"""What is not tried again when a sweep is resumed."""


def whole_result(directory: Path) -> Result | None:
    """Returns the directory's result; None where there is none, or one that was cut short, describes no point or is of
    a later version, which is measured again and written over."""
    path = directory / RESULT_FILE
    if not path.exists():
        return None
    try:
        return read_result(path)
    except UserError:
        return None


def kept_result(directory: Path, point: Mapping[str, Any]) -> Result | None:
    """Returns the directory's result if it may stand for measuring the resolved `point` here and now."""
    result = whole_result(directory)
    if result is None or result.status not in LASTING or point_identity(result.point) != point_identity(point):
        return None
    return None if differs(result, point) else result


def differs(result: Result, point: Mapping[str, Any]) -> bool:
    """Returns whether the result's environment is another than the point's.

    Where points run elsewhere, only libraries can be compared: a login node has other GPUs, or none, and other
    variables.
    """
    identity = library_identity if elsewhere() else environment_identity
    return identity(result.environment) != identity(machine_of(point))


def check_store(config: DictConfig) -> None:
    """Raises UserError when the store cannot be used, before anything is measured."""
    if config.reuse and not config.store:
        raise UserError("reuse=true needs a store; give store=<file>.")
    _store(config)


def remembered(config: DictConfig, point: dict[str, Any], directory: Path) -> Result | None:
    """Returns with `reuse=true` the store's latest measurement of the point in this environment, written as its result.
    Its traces stay where they were recorded."""
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
    """Adds what was measured to the store, if there is one."""
    store = _store(config)
    if store and result.status == "ok" and not result.reused_from:
        store.add(result, directory)


def _store(config: DictConfig) -> Store | None:
    return _opened(Path(config.store).expanduser().absolute()) if config.store else None


@cache
def _opened(path: Path) -> Store:
    store = Store(path)
    atexit.register(store.close)
    return store


def _find(store: Store, point: dict[str, Any], environment: dict[str, Any]) -> Measurement | None:
    """Returns the store's measurement of the point; prints to stderr what it could not read while looking."""
    known = len(store.problems)
    found = store.find(point, environment)
    for problem in store.problems[known:]:
        print(f"store: {problem}", file=sys.stderr, flush=True)
    return found
