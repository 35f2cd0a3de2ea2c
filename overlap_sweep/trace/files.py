"""Trace files, each read and analysed once: several large ones by several processes, and what is found is kept.

`python -m overlap_sweep.trace.files` is one of those processes. Kept is by the trace's content and by the code that
reads it, as Parquet, see `overlap_sweep.cache`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlap_sweep.cache import find as find_bytes
from overlap_sweep.cache import keep as keep_bytes
from overlap_sweep.errors import UserError
from overlap_sweep.trace.activity import activity_of
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.overlap import PartRow, TraceRow, breakdown, in_words, overlap_rows, startup_iterations
from overlap_sweep.trace.stream import is_gzip

TEXT_BYTES_PER_S = 200e6
GZIP_RATIO = 13
"""Kineto's text over its gzip. Like the line above only for guessing how long a file takes."""

WORTH_A_PROCESS_S = 0.4
"""A process needs about 0.2 s to start."""

_KIND = "traces"
_HEAD = b"findings"

_PATH = "\0"
"""In front of a kept sentence, for where the trace lies: all sentences about it begin so, and it may be moved."""

_NOT_OF_ITS_CONTENT = f"{_PATH} cannot be read ("
"""The disk's or the network's problem, which may pass."""

_Row = TypeVar("_Row", TraceRow, PartRow)


class TraceFile(msgspec.Struct, dict=True):
    """What one rank's trace holds, or why it holds nothing."""

    path: Path
    rank: int | None = None
    world_size: int | None = None
    """None, like the rank, when the trace doesn't say."""
    rows: list[TraceRow] = []
    """Per iteration and phase; empty where there is a problem."""
    parts: list[PartRow] = []
    """Where they were asked for."""
    warnings: list[str] = []
    """One sentence for each reason why it was read only in part."""
    problem: str | None = None
    """In a sentence, why it could not be analysed."""

    @cached_property
    def startup(self) -> list[int]:
        """Iterations that are in `rows` and `parts` and in no median: see `startup_iterations`."""
        return startup_iterations(self.rows)

    @property
    def steady_rows(self) -> list[TraceRow]:
        """Those of `rows` that are no start-up."""
        return [row for row in self.rows if row.iteration not in self.startup]

    @property
    def steady_parts(self) -> list[PartRow]:
        """Those of `parts` that are no start-up."""
        return [part for part in self.parts if part.iteration not in self.startup]


class _Request(msgspec.Struct):
    """What another process is asked for."""

    paths: list[str]
    with_parts: bool


def read_trace_files(paths: Sequence[Path], with_parts: bool = True) -> list[TraceFile]:
    """Returns what each trace holds, in the order of `paths`; parts, of which there are dozens a row, only if asked."""
    keys = {path: _key_of(path) for path in paths}
    found = {path: file for path, key in keys.items() if (file := _kept(key, path, with_parts))}
    missing = [path for path in keys if path not in found]
    for path, file in zip(missing, _read_all(missing, with_parts), strict=True):
        _keep(keys[path], file, with_parts)
        found[path] = file
    return [found[path] for path in paths]


def read_trace_file(path: Path, with_parts: bool) -> TraceFile:
    """Reads and analyses a trace, whatever is kept of it."""
    try:
        trace = read_trace(path)
        activity = activity_of(trace)
        rows = overlap_rows(activity, str(path), trace.rank)
    except UserError as error:
        return TraceFile(path, problem=str(error))
    parts = breakdown(activity, str(path), trace.rank) if with_parts else []
    return TraceFile(path, trace.rank, trace.world_size, rows, parts, trace.warnings)


def of_startup(files: Sequence[TraceFile]) -> list[str]:
    """Returns at most one sentence, of what medians leave out as start-up: a sweep may have hundreds of such traces."""
    found = [file for file in files if file.startup]
    if not found:
        return []
    more = "" if len(found) == 1 else f" The same of {len(found) - 1} other trace{'s' if len(found) > 2 else ''}."
    return [f"{in_words(str(found[0].path), found[0].rows, found[0].startup)}{more}"]


def _read_all(paths: Sequence[Path], with_parts: bool) -> list[TraceFile]:
    """Reads traces, by several processes where that is worth it.

    They are a program of our own instead of multiprocessing's, which would run the main module of whoever calls this
    again.
    """
    shares = _shares(paths, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    others = [_ask(share, with_parts) for share in shares[1:]]
    found = {path: read_trace_file(path, with_parts) for path in shares[0]}
    for share, process in zip(shares[1:], others, strict=True):
        # One that was killed has said so on stderr, if anything; what it was asked for is done here.
        files = _answers(process, len(share)) or [read_trace_file(path, with_parts) for path in share]
        found |= zip(share, files, strict=True)
    return [found[path] for path in paths]


def _ask(paths: Sequence[Path], with_parts: bool) -> subprocess.Popen[bytes] | None:
    """Starts a process that reads these traces; None where that cannot be, or it ends at once."""
    command = [sys.executable, "-m", "overlap_sweep.trace.files"]
    try:
        request = msgspec.msgpack.encode(_Request([str(path) for path in paths], with_parts))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except (OSError, UnicodeError):
        # UnicodeError: a path that is no text.
        return None
    try:
        assert process.stdin
        process.stdin.write(request)
        process.stdin.close()
    except OSError:
        process.kill()
    process.stdin = None
    return process


def _answers(process: subprocess.Popen[bytes] | None, count: int) -> list[TraceFile] | None:
    """Returns what the process found; None where that is not as many as asked for."""
    if process is None:
        return None
    answered, _ = process.communicate()
    try:
        answers = msgspec.msgpack.decode(answered, type=list[TraceFile], dec_hook=lambda kind, value: kind(value))
    except msgspec.MsgspecError:
        return None
    return answers if len(answers) == count else None


def _answer_request() -> None:
    """Reads a request from stdin, and writes what the traces hold to stdout."""
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=_Request)
    found = [read_trace_file(Path(path), asked.with_parts) for path in asked.paths]
    sys.stdout.buffer.write(msgspec.msgpack.encode(found, enc_hook=str))


def _shares(paths: Sequence[Path], processes: int) -> list[list[Path]]:
    """Divides paths among processes so that each reads about as long; one share where more are not worth starting."""
    times_s = {path: _guess_s(path) for path in paths}
    count = max(1, min(processes, len(paths), int(sum(times_s.values()) / WORTH_A_PROCESS_S)))
    shares: list[list[Path]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for path in sorted(times_s, key=lambda path: -times_s[path]):
        least = loads.index(min(loads))
        shares[least].append(path)
        loads[least] += times_s[path]
    return shares


def _guess_s(path: Path) -> float:
    try:
        return path.stat().st_size * (GZIP_RATIO if is_gzip(path) else 1) / TEXT_BYTES_PER_S
    except OSError:
        # Reading it will tell.
        return 0.0


def _key_of(path: Path) -> str | None:
    """Returns what the trace's findings are kept by; None where the file cannot be read."""
    try:
        with path.open("rb") as file:
            return f"{_reader()} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError:
        return None


def _kept(key: str | None, path: Path, with_parts: bool) -> TraceFile | None:
    """Returns what was found before; None where nothing is kept, or what is kept is damaged."""
    rows = find_bytes(_KIND, f"{key} rows") if key else None
    parts = find_bytes(_KIND, f"{key} parts") if key and with_parts else b""
    if rows is None or parts is None:
        return None
    try:
        found, head = _read(rows, TraceRow, path)
        head["warnings"] = [_with_path(warning, path) for warning in head["warnings"]]
        if head["problem"] is not None:
            return TraceFile(path, **head | {"problem": _with_path(head["problem"], path)})
        of_parts = _read(parts, PartRow, path)[0] if with_parts else []
        if not found or (with_parts and not of_parts):
            raise ValueError("a trace without rows would have a problem")
        return TraceFile(path, **head, rows=found, parts=of_parts)
    except Exception:
        # Whatever a damaged file makes its readers raise: the trace is there to be read again.
        return None


def _keep(key: str | None, file: TraceFile, with_parts: bool) -> None:
    """Keeps what was found; what is wrong with the trace, too: that may have taken as long as anything else to find."""
    if key is None:
        return
    warnings = [_without_path(warning, file.path) for warning in file.warnings]
    problem = None if file.problem is None else _without_path(file.problem, file.path)
    if None in warnings or (file.problem and (problem is None or problem.startswith(_NOT_OF_ITS_CONTENT))):
        return
    if (warnings or problem) and _key_of(file.path) != key:
        # Somebody is writing it just now: this was found in more of it than the key is of.
        return
    head = {"rank": file.rank, "world_size": file.world_size, "warnings": warnings, "problem": problem}
    keep_bytes(_KIND, f"{key} rows", _written(file.rows, TraceRow, head))
    if with_parts:
        keep_bytes(_KIND, f"{key} parts", _written(file.parts, PartRow, {}))


def _without_path(sentence: str, path: Path) -> str | None:
    """None where it isn't the sentence's beginning, or not only that."""
    rest = sentence.removeprefix(str(path))
    return _PATH + rest if rest != sentence and rest[:1] in (" ", ":") else None


def _with_path(sentence: str, path: Path) -> str:
    if not sentence.startswith(_PATH):
        raise ValueError("a sentence about a trace begins with its path")
    return str(path) + sentence.removeprefix(_PATH)


@cache
def _reader() -> str:
    """Returns a hash that changes with the code and the kernel classes."""
    files = sorted(resources.files(__package__).iterdir(), key=lambda file: file.name)
    sources = [file.read_bytes() for file in files if file.name.endswith((".py", ".yaml"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def _written(rows: Sequence[_Row], kind: type[_Row], head: dict[str, Any]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    # A path need not be text. What was found doesn't depend on it.
    columns = [name for name in kind.__struct_fields__ if name != "file"]
    table = pyarrow.table({name: [getattr(row, name) for row in rows] for name in columns})
    stream = io.BytesIO()
    table = table.replace_schema_metadata({_HEAD: json.dumps(head)})
    parquet.write_table(
        table, stream, compression="none", use_dictionary=False, write_statistics=False, write_page_checksum=True
    )
    return stream.getvalue()


def _read(content: bytes, kind: type[_Row], path: Path) -> tuple[list[_Row], dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    file = parquet.ParquetFile(pyarrow.BufferReader(content), page_checksum_verification=True)
    table = file.read(use_threads=False)
    rows = msgspec.convert([{"file": str(path), **row} for row in table.to_pylist()], list[kind])  # type: ignore[valid-type]
    return rows, json.loads(table.schema.metadata[_HEAD])


if __name__ == "__main__":
    _answer_request()
