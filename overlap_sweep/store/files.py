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
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.run_directory import Result, flush
from overlap_sweep.store import sqlite
from overlap_sweep.store.measurement import (
    Measurement,
    decoded,
    encoded,
    environment_key,
    files_directory,
    line_files,
    merged,
    new_measurement,
    note,
    whole_lines,
)


class _Place(NamedTuple):
    """Where a measurement stands that may be reused."""

    measured: str
    file: Path
    offset: int
    length: int


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
        self._places: dict[tuple[str, str], list[_Place]] = {}
        try:
            self._directory.mkdir(exist_ok=True)
        except OSError as error:
            raise _cannot_be_written(self._directory, error) from None
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise UserError(f"{self._directory} cannot be written to; give a store in a directory of yours.")

    def add(self, result: Result, directory: Path) -> None:
        line = encoded(new_measurement(result, directory)) + b"\n"
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
        keys = point_key(point), environment_key(environment)
        of_files = [self._at(place) for place in self._places.get(keys, [])[-1:]]
        found = [*of_files, *read_from_afar(self._path, self.problems, keys)]
        return max(found, key=lambda measurement: measurement.measured, default=None)

    def measurements(self) -> list[Measurement]:
        return merged([*read_from_afar(self._path, self.problems), *read_files(self._path, self.problems)])

    def close(self) -> None:
        """Adding opens another file."""
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
            for line in whole_lines(file, self.problems, self._read_up_to.get(file, 0)):
                self._read_up_to[file] = line.end
                try:
                    measurement = decoded(line.text, f"{file}, byte {line.start}")
                except UserError as error:
                    note(self.problems, str(error))
                    continue
                if measurement.reusable:
                    place = _Place(measurement.measured, file, line.start, len(line.text))
                    places = self._places.setdefault((measurement.point_key, measurement.environment_key), [])
                    places.append(place)
                    places.sort(key=lambda one: one.measured)

    def _at(self, place: _Place) -> Measurement:
        with place.file.open("rb") as file:
            file.seek(place.offset)
            return decoded(file.read(place.length), f"{place.file}, byte {place.offset}")


def read_files(path: Path, problems: list[str]) -> Iterator[Measurement]:
    """All that lies in files beside the store's path. What cannot be read becomes a problem."""
    for file in line_files(files_directory(path)):
        for line in whole_lines(file, problems):
            try:
                yield decoded(line.text, f"{file}, byte {line.start}")
            except UserError as error:
                note(problems, str(error))


def read_from_afar(path: Path, problems: list[str], keys: tuple[str, str] | None = None) -> list[Measurement]:
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
