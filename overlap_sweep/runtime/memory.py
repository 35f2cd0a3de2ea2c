"""The store of measurements, as a running sweep uses it: `store=` and `reuse=`."""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Result, clear, write_result
from overlap_sweep.runtime.group import machine_of
from overlap_sweep.store import Store, open_store

_open: dict[Path, Store] = {}


def check_store(config: DictConfig) -> None:
    """UserError when the store cannot be used, before anything is measured."""
    if config.reuse and not config.store:
        raise UserError("reuse=true needs a store; give store=<file>.")
    _store(config)


def remembered(config: DictConfig, point: dict[str, Any], directory: Path) -> Result | None:
    """With `reuse=true` the store's latest measurement of the point in this environment, written as its result. Its
    traces stay where they were recorded."""
    store = _store(config) if config.reuse else None
    found = store.find(point, machine_of(point)) if store else None
    if found is None:
        return None
    clear(directory)
    source = f"{config.store}: measured {found.result.started} on {found.host} in {found.directory}"
    result = msgspec.structs.replace(found.result, name=directory.name, point=point, traces=[], reused_from=source)
    write_result(directory, result)
    return result


def remember(config: DictConfig, result: Result, directory: Path) -> None:
    """Add what was measured to the store, if there is one."""
    store = _store(config)
    if store and result.status == "ok" and not result.reused_from:
        store.add(result, directory)


def remember_kept(config: DictConfig, result: Result, directory: Path) -> None:
    """Add a result that was there before, unless the store has one of its point: a launch may have died in between."""
    store = _store(config)
    if store and store.find(result.point, result.environment) is None:
        remember(config, result, directory)


def _store(config: DictConfig) -> Store | None:
    if not config.store:
        return None
    path = Path(config.store).expanduser().absolute()
    if path not in _open:
        _open[path] = store = open_store(path)
        atexit.register(store.close)
        for notice in filter(None, (store.notice, *store.problems)):
            print(f"store: {notice}", file=sys.stderr, flush=True)
    return _open[path]
