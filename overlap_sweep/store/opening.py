"""Which kind of store a path is, and what all kinds can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Result
from overlap_sweep.store import sqlite
from overlap_sweep.store.files import FileStore, read_files, read_from_afar
from overlap_sweep.store.filesystem import network_file_system
from overlap_sweep.store.lines import files_directory
from overlap_sweep.store.measurement import Measurement, merged


class Store(Protocol):
    """Measurements that many jobs share. Of one process, and of the thread that opened it."""

    notice: str | None
    """What the user should know of it, in a sentence."""
    problems: list[str]
    """A sentence for each kept measurement that could not be read so far; the others are not affected."""

    def add(self, result: Result, directory: Path) -> None:
        """Keep a measurement, whatever its status; one that is kept already stays as it is. When this returns, it
        survives the end of the process and of the machine. UserError where it cannot be kept."""

    def find(self, point: dict[str, Any], environment: dict[str, Any]) -> Measurement | None:
        """The latest measurement of the same point on an equal machine (`identity`) that is `ok` and not launch-bound.
        `environment` is `machine.machine`'s, or a result's."""

    def measurements(self) -> list[Measurement]:
        """All, oldest first."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class StoreReading:
    """What a store held when it was read."""

    measurements: list[Measurement]
    """Oldest first."""
    problems: list[str]
    """A sentence for each that could not be read."""


def open_store(path: Path) -> Store:
    """To add and to find; made where it is not there. UserError, in one line, for what is no store, is of a later
    version, or cannot be written."""
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is no directory; make it, or give a store elsewhere.")
    kind = network_file_system(path)
    if kind is None:
        return sqlite.SqliteStore(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the store's file, such as {path / 'measurements.sqlite'}.")
    return FileStore(
        path,
        f"{path} lies on {kind}, where SQLite is not safe with several writers; measurements are kept in "
        f"{files_directory(path)}, one file per job, and merged when read.",
    )


def read_store(path: Path) -> StoreReading:
    """To look at, another's or a copy too: nothing is written. UserError for what is no store or is not there."""
    directory = files_directory(path)
    if path.is_dir():
        name = path.with_name(path.name.removesuffix(".d")) if path.suffix == ".d" else path / "measurements.sqlite"
        raise UserError(f"{path} is a directory; give the store's file, such as {name}.")
    if not path.exists() and not directory.is_dir():
        raise UserError(f"{path} does not exist; give the path that launch.py was given as store=.")
    problems: list[str] = []
    if network_file_system(path):
        in_sqlite = read_from_afar(path, problems)
    else:
        in_sqlite = sqlite.read(path, problems) if path.exists() else []
    return StoreReading(merged([*in_sqlite, *read_files(path, problems)]), problems)
