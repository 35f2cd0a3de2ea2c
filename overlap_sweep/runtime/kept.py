"""Results that need not be measured again: those in the sweep's directory and those in the store."""

import atexit
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
from omegaconf import DictConfig

from overlap_sweep.cache import cache_directory, cache_root
from overlap_sweep.config import ResolvedPoint
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.gpus import elsewhere
from overlap_sweep.results.identity import environment_identity, instrumented, library_identity, point_identity
from overlap_sweep.results.run_directory import RESULT_FILE, Result, Status, clear, read_result, write_result
from overlap_sweep.runtime.group_config import machine_of
from overlap_sweep.store import Measurement, Store, read_store

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


def kept_result(directory: Path, point: ResolvedPoint) -> Result | None:
    """Returns the directory's result if it is valid for the resolved `point` in the present environment, and whole: not
    one that a search gave up."""
    result = whole_result(directory)
    if result is None or result.gave_up or result.status not in LASTING:
        return None
    return None if point_identity(result.point) != point_identity(point) or differs(result, point) else result


def differs(result: Result, point: ResolvedPoint) -> bool:
    """Returns whether the result's environment differs from the point's.

    If points run on other machines, only libraries are compared: a login node has other GPUs and variables.
    """
    identity = library_identity if elsewhere() else environment_identity
    return identity(result.environment) != identity(machine_of(point))


def check_store(config: DictConfig) -> None:
    """Raises UserError if the store cannot be used."""
    if config.reuse and not config.store:
        raise UsageError("reuse=true requires store=<path>.")
    _store(config)


def remembered(config: DictConfig, point: ResolvedPoint, directory: Path) -> Result | None:
    """With `reuse=true`, writes the store's latest measurement of the point in this environment as its result, and
    returns it. Traces are not copied."""
    store = _store(config) if config.reuse else None
    found = _find(store, point, machine_of(point)) if store else None
    if found is None:
        return None
    clear(directory)
    source = f"{config.store}: measured {found.result.started} on {found.host} in {found.directory}"
    result = msgspec.structs.replace(
        found.result, name=directory.name, recorded=dict(point), traces=[], reused_from=source
    )
    write_result(directory, result)
    return result


def remember(config: DictConfig, result: Result, directory: Path) -> None:
    """Adds a new result that is `ok` or has wrong numbers to the store, if there is one, unless its times must not be
    compared or it was given up; wrong numbers also to the user's own store of them."""
    if result.reused_from or result.gave_up or instrumented(result.point):
        return
    if not (result.status == "ok" or result.has_wrong_numbers):
        return
    stores = [_store(config), _own_store() if result.has_wrong_numbers else None]
    for store in filter(None, stores):
        store.add(result, directory)


def wrong_results(config: DictConfig) -> list[Result]:
    """Returns the results with wrong numbers in the store, if there is one, and in the user's own, of any machine."""
    paths = [Path(config.store).expanduser().absolute()] if config.store else []
    if _own_store():
        paths.append(_own_path())
    readings = (read_store(path) for path in paths if path.with_name(f"{path.name}.d").is_dir())
    return [one.result for reading in readings for one in reading.measurements if one.result.has_wrong_numbers]


def _store(config: DictConfig) -> Store | None:
    return _opened(Path(config.store).expanduser().absolute()) if config.store else None


def _own_path() -> Path:
    return cache_root() / "wrong_numbers" / "points"


def _own_store() -> Store | None:
    """Returns the user's own store of wrong results on this machine; None where nothing can be kept."""
    return _opened(_own_path()) if cache_directory("wrong_numbers") else None


@cache
def _opened(path: Path) -> Store:
    store = Store(path)
    atexit.register(store.close)
    return store


def _find(store: Store, point: ResolvedPoint, environment: Mapping[str, object]) -> Measurement | None:
    """Returns the store's measurement of the point; prints new problems of the store to stderr."""
    known = len(store.problems)
    found = store.find(point, environment)
    for problem in store.problems[known:]:
        print(f"store: {problem}", file=sys.stderr, flush=True)
    return found
