"""A store in one SQLite file on a local disk: any number of processes of one host may write to it at the same time."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Result, decoded_result
from overlap_sweep.store.measurement import (
    LEFT_OUT,
    Keys,
    Measurement,
    files_directory,
    keys_of,
    line_files,
    merged,
    new_measurement,
    note,
    read_lines,
)

SCHEMA = 1
"""Of the tables. A version that changes what is equal (`identity`) raises it, and makes the keys of older ones anew."""

APPLICATION_ID = 0x6F767377
"""Tells a store from other programs' databases."""

BUSY_S = 30.0
"""How long to wait for another writer, each of which takes milliseconds."""

_TABLES = """
CREATE TABLE measurement (
    id INTEGER PRIMARY KEY,
    measurement_key TEXT NOT NULL UNIQUE,
    point_key TEXT NOT NULL,
    environment_key TEXT NOT NULL,
    measured TEXT NOT NULL,
    reusable INTEGER NOT NULL,
    host TEXT NOT NULL,
    directory TEXT NOT NULL,
    added TEXT NOT NULL,
    result TEXT NOT NULL
) STRICT;
CREATE INDEX measurement_of_point ON measurement (point_key, environment_key, reusable, measured);
CREATE TABLE imported_file (
    name TEXT PRIMARY KEY,
    bytes INTEGER NOT NULL
) STRICT;
"""

_INSERT = """
INSERT INTO measurement
    (measurement_key, point_key, environment_key, measured, reusable, host, directory, added, result)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (measurement_key) DO NOTHING
"""

_SELECT = "SELECT id, host, directory, added, result FROM measurement"

_LATEST_FIRST = (
    f"{_SELECT} WHERE point_key = ? AND environment_key = ? AND reusable = 1 ORDER BY measured DESC, id DESC"
)


class SqliteStore:
    """See `Store` for what the methods do."""

    notice: str | None = None

    def __init__(self, path: Path) -> None:
        """Made where it is not there. UserError for what is no store, is of a later version or cannot be written."""
        self.problems: list[str] = []
        self._path = path
        with _errors_of(path):
            self._connection = _connect(path)
            try:
                _prepare(self._connection, path)
                self._import_files()
            except BaseException:
                self._connection.close()
                raise

    def add(self, result: Result, directory: Path) -> None:
        with _errors_of(self._path):
            _insert(self._connection, new_measurement(result, directory))

    def find(self, point: dict[str, Any], environment: dict[str, Any]) -> Measurement | None:
        with _errors_of(self._path):
            return _latest(self._connection, self._path, self.problems, keys_of(point, environment))

    def measurements(self) -> list[Measurement]:
        with _errors_of(self._path):
            return merged(_rows(self._connection, self._path, self.problems, _SELECT))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _import_files(self) -> None:
        """What jobs wrote beside it while it lay on a network file system, or on hosts to which it does. A file is read
        from where the last import ended and stays where it is: its writer may still be alive."""
        for file in line_files(files_directory(self._path)):
            known = dict(self._connection.execute("SELECT name, bytes FROM imported_file"))
            if known.get(file.name) == file.stat().st_size:
                continue
            with _transaction(self._connection):
                end = 0
                for line in read_lines(file, self.problems, known.get(file.name, 0)):
                    end = line.end
                    if line.measurement:
                        _insert(self._connection, line.measurement)
                if end:
                    self._connection.execute(
                        "INSERT INTO imported_file VALUES (?, ?) "
                        "ON CONFLICT (name) DO UPDATE SET bytes = excluded.bytes",
                        (file.name, end),
                    )


def read(path: Path, problems: list[str], keys: Keys | None = None) -> list[Measurement]:
    """Returns all measurements of an existing file, which is not written to, nor anything beside it unless somebody
    else has it open; with the `keys` of a point and an environment only the one to be reused. Rows that cannot be read
    become problems.

    UserError for what is no store or is of a later version.
    """
    log = path.with_name(f"{path.name}-wal")
    if not log.exists():
        before = _state(path)
        found: list[str] = []
        try:
            measurements = _read(path, found, keys, "mode=ro&immutable=1")
        except UserError:
            if _state(path) == before:
                raise
        else:
            if _state(path) == before:
                problems += found
                return measurements
    # Somebody writes, so what is in the file alone need not be whole.
    return _read(path, problems, keys, "mode=ro")


def _read(path: Path, problems: list[str], keys: Keys | None, how: str) -> list[Measurement]:
    with _errors_of(path), contextlib.closing(_connect(path, how)) as connection:
        _check(connection, path)
        if keys:
            latest = _latest(connection, path, problems, keys)
            return [latest] if latest else []
        return merged(_rows(connection, path, problems, _SELECT))


def _state(path: Path) -> tuple[int, int]:
    now = path.stat()
    return now.st_mtime_ns, now.st_size


def _connect(path: Path, how: str = "mode=rwc") -> sqlite3.Connection:
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the store's file, such as {path / 'measurements.sqlite'}.")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_S, isolation_level=None)
    # Another's file may define views and triggers: they get no functions with side effects.
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    if _is_new(connection, path):
        _set_journal(connection, path)
        with _transaction(connection):
            if _is_new(connection, path):
                for statement in _TABLES.split(";")[:-1]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
    _check(connection, path)
    _set_journal(connection, path)
    # A committed measurement survives a power loss too, for a flush of milliseconds per measurement. NORMAL would keep
    # the file whole as well, but lose the last measurements.
    connection.execute("PRAGMA synchronous = FULL")


def _is_new(connection: sqlite3.Connection, path: Path) -> bool:
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    return not tables and not _pragma(connection, "application_id")


def _set_journal(connection: sqlite3.Connection, path: Path) -> None:
    """Write-ahead logging: readers and writers do not wait for each other. The file remembers it."""
    deadline = time.monotonic() + BUSY_S
    while (mode := _pragma(connection, "journal_mode")) != "wal":
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            # SQLite does not wait here for others that open the file in the same moment.
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
            continue
        if mode != "wal":
            raise UserError(f"{path} lies where SQLite cannot keep a write-ahead log; give a store on a local disk.")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise UserError(f"{path} is no store of measurements; give a store's file, or a path where there is none yet.")
    if (schema := _pragma(connection, "user_version")) > SCHEMA:
        raise UserError(f"{path} has schema {schema}, this version reads up to {SCHEMA}; update overlap_sweep.")


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _insert(connection: sqlite3.Connection, measurement: Measurement) -> None:
    connection.execute(
        _INSERT,
        (
            measurement.measurement_key,
            *measurement.keys,
            measurement.measured,
            measurement.reusable,
            measurement.host,
            measurement.directory,
            measurement.added,
            msgspec.json.encode(measurement.result).decode(),
        ),
    )


def _latest(connection: sqlite3.Connection, path: Path, problems: list[str], keys: Keys) -> Measurement | None:
    for measurement in _rows(connection, path, problems, _LATEST_FIRST, *keys):
        # Another's file may say anything in its columns; what counts is the result.
        if measurement.reusable and measurement.keys == keys:
            return measurement
    return None


def _rows(
    connection: sqlite3.Connection, path: Path, problems: list[str], query: str, *arguments: str
) -> Iterator[Measurement]:
    for number, host, directory, added, text in connection.execute(query, arguments):
        where = f"{path}, row {number}"
        try:
            host, directory, added, text = msgspec.convert([host, directory, added, text], tuple[str, str, str, str])
            yield Measurement(decoded_result(text, where, LEFT_OUT), directory, host, added)
        except msgspec.ValidationError as error:
            note(problems, f"{where} cannot be read ({error}); it is left out.")
        except UserError as error:
            note(problems, str(error))


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Takes the lock to write at once: one that asks for it later may be refused without waiting."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


_MENDS = {
    sqlite3.SQLITE_NOTADB: "give a store's file, or a path where there is none yet",
    sqlite3.SQLITE_CORRUPT: "restore it from a copy, or give another path",
    sqlite3.SQLITE_CANTOPEN: "give a path in a directory that is there and that you may write to",
    sqlite3.SQLITE_READONLY: "give a store that you may write to",
    sqlite3.SQLITE_PERM: "give a store that you may write to",
    sqlite3.SQLITE_BUSY: "another program has locked it; end that, or give another path",
    sqlite3.SQLITE_FULL: "make room on its disk",
    sqlite3.SQLITE_IOERR: "see whether its disk is full or broken",
}


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        mend = _MENDS.get(code, "restore it from a copy, or give another path")
        raise UserError(f"{path} cannot be used as a store ({error}); {mend}.") from None
