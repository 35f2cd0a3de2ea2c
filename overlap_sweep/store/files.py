"""A store on a network file system: one file of JSON lines per writing process, merged by whoever reads.

Nobody writes to another's file, and each line is on the disk before `add` returns. No file is ever removed.
"""

from __future__ import annotations

import os
import platform
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Result, flush
from overlap_sweep.store import sqlite
from overlap_sweep.store.measurement import (
    Keys,
    Measurement,
    decoded,
    files_directory,
    keys_of,
    line_files,
    merged,
    new_measurement,
    note,
    read_lines,
)


class _Place(NamedTuple):
    """Where a measurement stands that may be reused."""

    measured: str
    file: Path
    start: int
    end: int


class FileStore:
    """See `Store` for what the methods do."""

    def __init__(self, path: Path, notice: str | None = None) -> None:
        """`path` is the store's, beside which the files lie. UserError where they cannot be written."""
        self.notice = notice
        self.problems: list[str] = []
        self._path = path
        self._directory = files_directory(path)
        self._writing: tuple[int, int] | None = None
        self._read_up_to: dict[Path, int] = {}
        self._latest: dict[Keys, _Place] = {}
        try:
            self._directory.mkdir(exist_ok=True)
        except OSError as error:
            raise _cannot_be_written(self._directory, error) from None
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise UserError(f"{self._directory} cannot be written to; give a store in a directory of yours.")

    def add(self, result: Result, directory: Path) -> None:
        line = new_measurement(result, directory).encoded() + b"\n"
        try:
            descriptor = self._descriptor()
            written = os.write(descriptor, line)
            os.fsync(descriptor)
        except OSError as error:
            self.close()
            raise _cannot_be_written(self._directory, error) from None
        if written < len(line):
            # What follows would be taken for the rest of this line.
            self.close()
            raise UserError(f"{self._directory} has no room for a measurement; make some.")

    def find(self, point: dict[str, Any], environment: dict[str, Any]) -> Measurement | None:
        self._read_what_is_new()
        keys = keys_of(point, environment)
        of_files = [_read_at(self._latest[keys])] if keys in self._latest else []
        found = [*of_files, *read_from_afar(self._path, self.problems, keys)]
        return max(found, key=lambda measurement: measurement.measured, default=None)

    def measurements(self) -> list[Measurement]:
        return merged([*read_from_afar(self._path, self.problems), *read_files(self._path, self.problems)])

    def close(self) -> None:
        """Closes the file that is written; adding opens another."""
        if self._writing:
            _, descriptor = self._writing
            self._writing = None
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _descriptor(self) -> int:
        """Of this process's own file: a forked one may not write to its parent's."""
        if self._writing and self._writing[0] == os.getpid():
            return self._writing[1]
        host = re.sub(r"[^A-Za-z0-9-]+", "-", platform.node())
        path = self._directory / f"{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._writing = os.getpid(), descriptor
        flush(self._directory)
        return descriptor

    def _read_what_is_new(self) -> None:
        for file in line_files(self._directory):
            for line in read_lines(file, self.problems, self._read_up_to.get(file, 0)):
                self._read_up_to[file] = line.end
                if line.measurement and line.measurement.reusable:
                    place = _Place(line.measurement.measured, file, line.start, line.end)
                    earlier = self._latest.setdefault(line.measurement.keys, place)
                    if place.measured >= earlier.measured:
                        self._latest[line.measurement.keys] = place


def _read_at(place: _Place) -> Measurement:
    with place.file.open("rb") as file:
        file.seek(place.start)
        return decoded(file.read(place.end - place.start), f"{place.file}, byte {place.start}")


def read_files(path: Path, problems: list[str]) -> Iterator[Measurement]:
    """Yields all that lies in files beside the store's path. What cannot be read becomes a problem."""
    for file in line_files(files_directory(path)):
        yield from (line.measurement for line in read_lines(file, problems) if line.measurement)


def read_from_afar(path: Path, problems: list[str], keys: Keys | None = None) -> list[Measurement]:
    """`sqlite.read` on a network file system, where a file that is being written elsewhere cannot be read: then it is a
    problem. Empty where there is no file."""
    if path.with_name(f"{path.name}-wal").exists():
        note(
            problems,
            f"{path} has a write-ahead log, so another host may be writing to it, and is left out; read it there, or "
            "copy it with its -wal file to a local disk.",
        )
        return []
    return sqlite.read(path, problems, keys) if path.exists() else []


def _cannot_be_written(directory: Path, error: OSError) -> UserError:
    return UserError(f"{directory} cannot be written to ({error.strerror}); give a store in a directory of yours.")
