"""A store of measurements that many jobs share, keyed by point and machine.

Every writing process appends lines of JSON to its own file in the directory `<path>.d`; readers merge the files. There
are no locks, so network file systems work too, and no file is removed.
"""

import contextlib
import os
import platform
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Self

import msgspec

from overlap_sweep.config import ResolvedPoint
from overlap_sweep.errors import UserError
from overlap_sweep.program import analyze_program
from overlap_sweep.results.identity import environment_identity, key_of, point_key
from overlap_sweep.results.run_directory import Result, decoded_result, flush, one_line

LEFT_OUT = "it is left out"
"""Ending of the messages about unreadable measurements."""


def keys_of(point: ResolvedPoint, environment: Mapping[str, object]) -> tuple[str, str]:
    """Returns keys that are equal for measurements of the same point on equal machines."""
    return point_key(point), key_of(environment_identity(environment))


class Measurement(msgspec.Struct, frozen=True, dict=True):
    """One result and its origin."""

    result: Result
    directory: str
    """Absolute path of the run directory on `host`; it may no longer exist."""
    host: str
    """Host that measured it."""
    added: str
    """Time when it was added to the store, UTC, ISO 8601."""

    @property
    def measured(self) -> str:
        """Returns the time when the measurement started, UTC, ISO 8601; if unknown, when it was added."""
        return self.result.started or self.added

    @cached_property
    def keys(self) -> tuple[str, str]:
        return keys_of(self.result.point, self.result.environment)

    @property
    def identity(self) -> tuple[object, ...]:
        """Returns a key that is equal for the same measurement, even if its directory moved or it was added twice."""
        return (*self.keys, self.host, self.result.started, self.result.wall_s, self.result.objective_us)

    @property
    def reusable(self) -> bool:
        """Returns whether it may replace a new measurement."""
        return self.result.status == "ok" and not self.result.launch_bound


class _Encoded(msgspec.Struct):
    """A measurement with an undecoded result, which may have an earlier schema."""

    result: msgspec.Raw
    directory: str
    host: str
    added: str


@dataclass(frozen=True)
class StoreReading:
    """The content of a store."""

    measurements: list[Measurement]
    """All measurements, oldest first."""
    problems: list[str]
    """One sentence for each measurement that could not be read."""


class Store:
    """A store open for adding and finding measurements, for one process and thread."""

    def __init__(self, path: Path) -> None:
        """Opens the store, or creates it. UserError if the path is no store or cannot be written."""
        if not path.parent.is_dir():
            raise UserError(f"{path.parent} is not a directory; create it, or give another store=.")
        self.problems: list[str] = []
        """One sentence for each measurement that could not be read so far; the others are not affected."""
        self._directory = _files_directory(path)
        self._writing: tuple[int, int] | None = None
        self._read_up_to: dict[Path, int] = {}
        self._latest: dict[tuple[str, str], tuple[str, bytes]] = {}
        """Start time and JSON line of the reusable measurement of each key; decoded it would take several times the
        memory."""
        try:
            self._directory.mkdir(exist_ok=True)
        except OSError as error:
            raise self._cannot_be_written(error.strerror) from None
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise self._cannot_be_written("Permission denied")

    def add(self, result: Result, directory: Path) -> None:
        """Adds a measurement of any status and flushes it to disk. UserError if it cannot be written."""
        host, now = result.machine.host or platform.node(), datetime.now(UTC).isoformat()
        line = msgspec.json.encode(Measurement(result, str(directory.absolute()), host, now)) + b"\n"
        try:
            descriptor = self._descriptor()
            written = os.write(descriptor, line)
            os.fsync(descriptor)
        except OSError as error:
            self.close()
            raise self._cannot_be_written(error.strerror) from None
        if written < len(line):
            # The next measurement would be read as the rest of this line.
            self.close()
            raise UserError(f"{self._directory} has no space for a measurement; free some.")

    def find(self, point: ResolvedPoint, environment: Mapping[str, object]) -> Measurement | None:
        """Returns the latest `ok`, not launch-bound measurement of the same point on an identical machine (`identity`).
        `environment` is `identity.machine`'s or a result's."""
        for file in _line_files(self._directory):
            for end, measurement in _read_lines(file, self.problems, self._read_up_to.get(file, 0)):
                self._read_up_to[file] = end
                if measurement and measurement.reusable:
                    earlier, _ = self._latest.get(measurement.keys, ("", b""))
                    if measurement.measured >= earlier:
                        self._latest[measurement.keys] = measurement.measured, msgspec.json.encode(measurement)
        _, line = self._latest.get(keys_of(point, environment), ("", b""))
        return _decoded(line, str(self._directory), self.problems) if line else None

    def close(self) -> None:
        """Closes the file that is being written; `add` opens a new one."""
        if self._writing:
            _, descriptor = self._writing
            self._writing = None
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _descriptor(self) -> int:
        """Returns the descriptor of this process's own file; a forked process must not write to its parent's."""
        if self._writing and self._writing[0] == os.getpid():
            return self._writing[1]
        host = re.sub(r"[^A-Za-z0-9-]+", "-", platform.node())
        path = self._directory / f"{host}-{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._writing = os.getpid(), descriptor
        flush(self._directory)
        return descriptor

    def _cannot_be_written(self, reason: str | None) -> UserError:
        return UserError(f"{self._directory} cannot be written to ({reason}); give a store= in a writable directory.")


def read_store(path: Path) -> StoreReading:
    """Returns the content of a store without writing to it. UserError if the path is no store or does not exist."""
    directory = _files_directory(path)
    if not directory.is_dir():
        raise UserError(f"{path} does not exist; give the path that launch.py had as store=.")
    problems: list[str] = []
    once: dict[tuple[object, ...], Measurement] = {}
    for file in _line_files(directory):
        once |= {found.identity: found for _, found in _read_lines(file, problems) if found}
    return StoreReading(sorted(once.values(), key=lambda measurement: measurement.measured), problems)


def _files_directory(path: Path) -> Path:
    """Returns the store's directory. UserError if the path itself, which only names the store, exists."""
    if path.is_dir():
        name = path.with_name(path.name.removesuffix(".d")) if path.suffix == ".d" else path / "measurements"
        raise UserError(f"{path} is a directory; give the store's name, such as {name}.")
    if path.exists():
        export = f"`{analyze_program()} history {path} --format csv`"
        raise UserError(
            f"{path} is a file; give another path. If an earlier version wrote it, export it there with {export}."
        )
    return path.with_name(f"{path.name}.d")


def _line_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*.jsonl") if path.is_file())


def _read_lines(file: Path, problems: list[str], start: int = 0) -> Iterator[tuple[int, Measurement | None]]:
    """Yields the end and the measurement of every line from byte `start` on; None for a line that cannot be read, which
    is added to `problems`.

    A last line without a line feed is left out: it is still being written, or its writer died.
    """
    with _noting(problems, str(file)), file.open("rb") as content:
        content.seek(start)
        for text in content:
            end = start + len(text)
            if text.endswith(b"\n"):
                yield end, _decoded(text[:-1], f"{file}, byte {start}", problems)
            start = end


def _decoded(line: bytes, where: str, problems: list[str]) -> Measurement | None:
    with _noting(problems, where):
        read = msgspec.json.decode(line, type=_Encoded)
        return Measurement(decoded_result(bytes(read.result), where, LEFT_OUT), read.directory, read.host, read.added)
    return None


@contextlib.contextmanager
def _noting(problems: list[str], where: str) -> Iterator[None]:
    """Adds read errors to `problems`, each once."""
    try:
        yield
        return
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{where} cannot be read ({one_line(error)}); {LEFT_OUT}."
    except OSError as error:
        problem = f"{where} cannot be read ({error.strerror}); {LEFT_OUT}."
    except UserError as error:
        problem = str(error)
    if problem not in problems:
        problems.append(problem)
