"""What a store keeps of one measurement, and when two are the same one."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import environment_identity, key_of, point_key
from overlap_sweep.results.run_directory import Result, decoded_result, one_line

LEFT_OUT = "it is left out"
"""What is done about what cannot be read."""


class Measurement(msgspec.Struct, frozen=True, dict=True):
    """One result, and where it comes from."""

    result: Result
    directory: str
    """The run directory, absolute, on `host`; it may be gone."""
    host: str
    """Where it was measured."""
    added: str
    """When it came into the store, UTC, ISO 8601."""

    @property
    def measured(self) -> str:
        """Returns when it was started, UTC, ISO 8601; of results that don't tell, when they were added."""
        return self.result.started or self.added

    @cached_property
    def keys(self) -> Keys:
        return keys_of(self.result.point, self.result.environment)

    @property
    def measurement_key(self) -> str:
        """Returns what is equal for the same measurement, wherever its directory was moved and however often it was
        added."""
        return key_of(
            {
                "point": self.keys.point,
                "environment": self.keys.environment,
                "host": self.host,
                "started": self.result.started,
                "wall_s": self.result.wall_s,
                "objective_us": self.result.objective_us,
            }
        )

    @property
    def reusable(self) -> bool:
        """Whether its time may stand for a new measurement."""
        return self.result.status == "ok" and not self.result.launch_bound

    def encoded(self) -> bytes:
        """Returns a line of JSON, without a line feed in it or after it."""
        return msgspec.json.encode(self)


class _Encoded(msgspec.Struct):
    """A measurement whose result may be of an earlier schema."""

    result: msgspec.Raw
    directory: str
    host: str
    added: str


class Keys(NamedTuple):
    """Equal for measurements of the same point on equal machines."""

    point: str
    environment: str


def keys_of(point: dict[str, Any], environment: dict[str, Any]) -> Keys:
    return Keys(point_key(point), key_of(environment_identity(environment)))


def new_measurement(result: Result, directory: Path) -> Measurement:
    """Returns the measurement of a result that comes into a store now."""
    host = result.environment.get("host")
    return Measurement(
        result=result,
        directory=str(directory.absolute()),
        host=host if isinstance(host, str) else platform.node(),
        added=datetime.now(UTC).isoformat(),
    )


def decoded(line: bytes, where: str) -> Measurement:
    """Returns what was `encoded`. UserError, which begins with `where`, when it is something else."""
    try:
        read = msgspec.json.decode(line, type=_Encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where} cannot be read ({one_line(error)}); {LEFT_OUT}.") from None
    return Measurement(decoded_result(bytes(read.result), where, LEFT_OUT), read.directory, read.host, read.added)


def note(problems: list[str], problem: str) -> None:
    """Adds the problem once, however often it is come across."""
    if problem not in problems:
        problems.append(problem)


def merged(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Returns each measurement once, oldest first."""
    once = {measurement.measurement_key: measurement for measurement in measurements}
    return sorted(once.values(), key=lambda measurement: measurement.measured)


class Line(NamedTuple):
    """Of a file of measurements."""

    start: int
    """In bytes from the file's beginning."""
    end: int
    """Where the next one begins."""
    measurement: Measurement | None
    """None where it cannot be read."""


def files_directory(path: Path) -> Path:
    """Returns where the files lie beside a store's path."""
    return path.with_name(f"{path.name}.d")


def line_files(directory: Path) -> list[Path]:
    """Returns the files of measurements, sorted by name; none where there is no such directory."""
    return sorted(path for path in directory.glob("*.jsonl") if path.is_file())


def read_lines(file: Path, problems: list[str], start: int = 0) -> Iterator[Line]:
    """Yields lines from byte `start` on; a file that has become shorter than that is read from its beginning.

    A last line without a line feed is left out: it is being written, or its writer ended while writing it and never
    took it for kept. What cannot be read becomes a problem.
    """
    try:
        with file.open("rb") as content:
            if start > file.stat().st_size:
                start = 0
            content.seek(start)
            for text in content:
                end = start + len(text)
                if text.endswith(b"\n"):
                    yield Line(start, end, _decoded_or_noted(text[:-1], f"{file}, byte {start}", problems))
                start = end
    except OSError as error:
        note(problems, f"{file} cannot be read ({error.strerror}); {LEFT_OUT}.")


def _decoded_or_noted(line: bytes, where: str, problems: list[str]) -> Measurement | None:
    try:
        return decoded(line, where)
    except UserError as error:
        note(problems, str(error))
        return None
