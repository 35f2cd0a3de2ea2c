"""Analyses trace files, in several processes where that is worth it, caches the results, and groups the traces into
runs: one trace per rank, the slowest rank, missing ranks.

`python -m overlap_sweep.trace.files` is one of these processes. The cache's key has the trace's path and content and
the code that reads it, see `overlap_sweep.cache`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec

from overlap_sweep.cache import code_digest, find, keep
from overlap_sweep.errors import UserError
from overlap_sweep.program import environment_with_package
from overlap_sweep.trace import (
    PartRow,
    PhaseSummary,
    TraceRow,
    nsight_files,
    startup_iterations,
    startup_sentence,
    summarise,
)
from overlap_sweep.trace.disk import RANK_IN_NAME, is_gzip, rank_in_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from overlap_sweep.trace.activity import Activity
    from overlap_sweep.trace.columns import Trace

_T = TypeVar("_T")

Cell = str | int | float | None
"""Cell in a row of a table."""

TEXT_BYTES_PER_S = 200e6
GZIP_RATIO = 13
"""Size of Kineto's text / size of its gzip. Only for estimating how long a file takes, like the line above."""

WORTH_A_PROCESS_S = 0.4
"""Work that justifies a process, which needs about 0.2 s to start."""

_KIND = "traces"

_NOT_ABOUT_CONTENT = " cannot be read ("
"""Marks a problem of the disk or network, which may be temporary."""

_TENSORBOARD_NAME = re.compile(r"\.pt\.trace\.json(\.gz)?$")
_DIGITS = re.compile(r"\d+")


class TraceFile(msgspec.Struct, dict=True):
    """The analysis of one rank's trace, or why there is none."""

    path: Path
    rank: int | None = None
    world_size: int | None = None
    """None, like the rank, if the trace does not record it."""
    rows: list[TraceRow] = []
    """One row per iteration and phase; empty if there is a problem."""
    parts: list[PartRow] = []
    """Parts of the phases, if requested."""
    warnings: list[str] = []
    """A sentence for each reason why only part of it was read."""
    problem: str | None = None
    """A sentence that says why it could not be analysed."""

    @cached_property
    def startup(self) -> list[int]:
        """Returns the iterations of `rows` and `parts` that medians leave out: see `startup_iterations`."""
        return startup_iterations(self.rows)

    @property
    def steady_rows(self) -> list[TraceRow]:
        return [row for row in self.rows if row.iteration not in self.startup]

    @property
    def steady_parts(self) -> list[PartRow]:
        return [part for part in self.parts if part.iteration not in self.startup]


class RunRanks(msgspec.Struct, kw_only=True):
    """The traces of one run, one per rank."""

    name: str
    """Common name of the files, with their directory."""
    world_size: int | None
    """None if no trace records it."""
    ranks: list[int]
    """Ranks with a trace that could be analysed."""
    missing: list[int]
    """Ranks with no trace, or one that could not be analysed."""
    rows: list[dict[str, Cell]]
    """One row per phase, from medians: the slowest and the fastest rank and the skew between them in microseconds.
    Empty with fewer than two ranks."""


def read_trace_files(paths: Sequence[Path], with_parts: bool = True) -> list[TraceFile]:
    """Returns the analysis of each trace, in the order of `paths`. Parts, dozens per row, are optional."""
    keys = keys_of(paths)
    found = {path: file for path, key in keys.items() if (file := cached_file(key, path, with_parts))}
    missing = [path for path in keys if path not in found]
    for path, file in zip(missing, read_each(missing, READER, with_parts), strict=True):
        cache_file(keys[path], file, with_parts)
        found[path] = file
    return [found[path] for path in paths]


READER = f"{__name__}:read_trace_file"


def read_trace_file(path: Path, with_parts: bool) -> TraceFile:
    """Reads a trace and returns its analysis, without the cache."""
    return read_with_trace(path, with_parts)[0]


def read_with_trace(path: Path, with_parts: bool) -> tuple[TraceFile, Trace | None, Activity | None]:
    """Reads a trace and returns its analysis, without the cache, the trace, and its activity; None for both if there is
    a problem."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.trace.activity import activity_of
    from overlap_sweep.trace.iterations import breakdown, overlap_rows
    from overlap_sweep.trace.kineto import read_trace

    try:
        trace = read_trace(path)
        activity = activity_of(trace)
        rows = overlap_rows(activity, str(path), trace.rank)
    except UserError as error:
        return TraceFile(path, problem=str(error)), None, None
    parts = breakdown(activity, str(path), trace.rank) if with_parts else []
    return TraceFile(path, trace.rank, trace.world_size, rows, parts, trace.warnings), trace, activity


def startup_warnings(files: Sequence[TraceFile]) -> list[str]:
    """Returns at most one sentence on start-up iterations: a sweep may have hundreds of traces with some."""
    found = [file for file in files if file.startup]
    if not found:
        return []
    more = "" if len(found) == 1 else f" Also in {len(found) - 1} other trace{'s' if len(found) > 2 else ''}."
    return [f"{startup_sentence(str(found[0].path), found[0].rows, found[0].startup)}{more}"]


def key_of(path: Path) -> str | None:
    """Returns a key of the trace's content and of the code that reads it; None if the file cannot be read."""
    file = nsight_files.file_of(path)
    try:
        status = file.stat()
        return f"{code_digest(__package__)} {_digest(file, status.st_ino, status.st_size, status.st_mtime_ns)}"
    except OSError:
        return None


@lru_cache
def _digest(path: Path, *_status: int) -> str:
    """Returns a digest of the file's content, which all ranks of a recording share."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keys_of(paths: Sequence[Path]) -> dict[Path, str | None]:
    """Returns the key of each trace."""
    files = {path: nsight_files.file_of(path) for path in paths}
    with ThreadPoolExecutor() as pool:
        keys = dict(zip(dict.fromkeys(files.values()), pool.map(key_of, dict.fromkeys(files.values())), strict=True))
    return {path: keys[file] for path, file in files.items()}


def cached_file(key: str | None, path: Path, with_parts: bool) -> TraceFile | None:
    """Returns the cached analysis; None if there is none or it is damaged."""
    return cached(_KIND, f"{key} {path!r} {with_parts}", TraceFile) if key else None


def cache_file(key: str | None, file: TraceFile, with_parts: bool) -> None:
    """Caches the analysis, also of a damaged trace, which may have taken as long."""
    if is_of(key, file):
        cache(_KIND, f"{key} {file.path!r} {with_parts}", file)


def cached(kind: str, key: str, type_: type[_T]) -> _T | None:
    """Returns the value that was kept under the key; None if there is none or it is damaged."""
    content = find(kind, key)
    try:
        return decoded(zlib.decompress(content), type_) if content else None
    except (zlib.error, msgspec.MsgspecError):
        return None


def cache(kind: str, key: str, value: object) -> None:
    with suppress(UnicodeError):
        # A path that is not valid text: it is read again next time.
        keep(kind, key, zlib.compress(encoded(value), 1))


def is_of(key: str | None, file: TraceFile) -> bool:
    """Returns whether the file was analysed with the content of the key."""
    if key is None or (file.problem or "").startswith(f"{file.path}{_NOT_ABOUT_CONTENT}"):
        return False
    # A file that is still being written has more content than the key.
    return not (file.warnings or file.problem) or key_of(file.path) == key


def runs_of(files: Iterable[TraceFile]) -> dict[str, dict[int, TraceFile]]:
    """Returns the traces by name of the run, in the order of their first file, and by rank. Traces whose rank is
    unknown are in none."""
    runs: dict[str, dict[int, TraceFile]] = {}
    for file in {file.path: file for file in files}.values():
        if (rank := rank_of(file)) is None:
            continue
        name = common = run_name(file.path)
        # A second trace of the same rank belongs to another run of that name.
        numbers = itertools.count(2)
        while rank in runs.setdefault(name, {}):
            name = f"{common} ({next(numbers)})"
        runs[name][rank] = file
    return runs


def missing_ranks(files: Mapping[int, TraceFile]) -> list[int]:
    """Returns the ranks of a run with no trace, or one that could not be analysed."""
    world_size = world_size_of(files.values()) or max(files) + 1
    return [rank for rank in range(world_size) if rank not in files or files[rank].problem]


def world_size_of(files: Iterable[TraceFile]) -> int | None:
    """Returns the number of ranks of a run; None if no trace records it."""
    return max((file.world_size or 0 for file in files), default=0) or None


def rank_of(file: TraceFile) -> int | None:
    """Returns the trace's rank; if it records none, the rank in its name or its directory's name."""
    return file.rank if file.rank is not None else rank_in_name(file.path)


def run_name(path: Path) -> str:
    """Returns the common part of the names of one run's traces: the name without the rank.

    If the file's name has no rank, its directory's name may have one; else any number in the name may be the rank.
    torch.profiler's own `<host>_<process>.<time>.pt.trace.json` may come from several hosts. Ranks of one recording of
    Nsight Systems are a run, with those of other nodes.
    """
    if nsight_files.file_of(path) != path:
        return nsight_files.run_name(path)
    for part in (path, path.parent):
        if RANK_IN_NAME.search(part.name):
            return str(part.with_name(RANK_IN_NAME.sub("rank*", part.name)) / path.relative_to(part))
    if own := _TENSORBOARD_NAME.search(path.name):
        return str(path.with_name(f"*{own[0]}"))
    return str(path.with_name(_DIGITS.sub("*", path.name)))


def read_each(paths: Sequence[Path], reader: str, *arguments: bool | str) -> list[Any]:
    """Returns what the function named `reader`, as `module:function`, returns for each path and the arguments, of the
    annotated type, which msgspec encodes. All processes import it at the same time. They run this module instead of
    using multiprocessing, which would run the caller's main module again."""
    shares = _shares(paths, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    others = [_start(share, reader, arguments) for share in shares[1:]]
    read = pkgutil.resolve_name(reader)
    kind = get_type_hints(read)["return"]
    found = {path: read(path, *arguments) for path in shares[0]}
    for share, process in zip(shares[1:], others, strict=True):
        # The files of a process that was killed are read here.
        results = _results(process, len(share), kind) or [read(path, *arguments) for path in share]
        found |= zip(share, results, strict=True)
    return [found[path] for path in paths]


def encoded(found: object) -> bytes:
    """Returns MessagePack of a value that msgspec knows, with paths and numpy arrays in it."""
    return msgspec.msgpack.encode(found, enc_hook=_plain)


def decoded(content: bytes, kind: type[_T]) -> _T:
    """Returns the value of that type. MsgspecError where the content is not one."""
    return msgspec.msgpack.decode(content, type=kind, dec_hook=_of_plain)


_Plain = str | tuple[str, tuple[int, ...], bytes]
"""A path, or type, shape and content of an array."""


def _plain(value: Path | NDArray[np.generic]) -> _Plain:
    return str(value) if isinstance(value, Path) else (value.dtype.str, value.shape, value.tobytes())


def _of_plain(kind: type, plain: _Plain) -> Path | NDArray[np.generic]:
    if isinstance(plain, str):
        return Path(plain)
    # Imported here, because numpy is only needed to read traces.
    import numpy as np

    dtype, shape, content = plain
    # A copy, because an array over bytes cannot be written.
    return np.frombuffer(content, dtype).reshape(shape).copy()


def _start(paths: Sequence[Path], reader: str, arguments: Sequence[object]) -> subprocess.Popen[bytes] | None:
    """Starts a process that reads these traces; None if it cannot be started."""
    command = [sys.executable, "-m", "overlap_sweep.trace.files"]
    try:
        with tempfile.TemporaryFile() as request:
            request.write(msgspec.msgpack.encode((list(map(str, paths)), reader, arguments)))
            request.seek(0)
            return subprocess.Popen(command, stdin=request, stdout=subprocess.PIPE, env=environment_with_package())
    except (OSError, UnicodeError):
        # UnicodeError: a path that is not valid text.
        return None


def _results(process: subprocess.Popen[bytes] | None, count: int, kind: type[_T]) -> list[_T] | None:
    try:
        # mypy does not take a list of a type that is a variable.
        found = decoded(process.communicate()[0], list[kind]) if process else []  # type: ignore[valid-type]
    except msgspec.MsgspecError:
        return None
    return found if len(found) == count else None


def _serve_request() -> None:
    """Reads the traces named on stdin and writes what the reader returns to stdout."""
    paths, reader, arguments = msgspec.msgpack.decode(sys.stdin.buffer.read())
    read = pkgutil.resolve_name(reader)
    sys.stdout.buffer.write(encoded([read(Path(path), *arguments) for path in paths]))


def _shares(paths: Sequence[Path], processes: int) -> list[list[Path]]:
    """Returns a list of paths for each process worth starting, dealt out largest first."""
    times_s = {path: _guess_s(path) for path in paths}
    count = max(1, min(processes, len(paths), int(sum(times_s.values()) / WORTH_A_PROCESS_S)))
    largest_first = sorted(times_s, key=lambda path: -times_s[path])
    return [largest_first[number::count] for number in range(count)]


def _guess_s(path: Path) -> float:
    path = nsight_files.file_of(path)
    try:
        return path.stat().st_size * (GZIP_RATIO if is_gzip(path) else 1) / TEXT_BYTES_PER_S
    except OSError:
        # Reading it will report the error.
        return 0.0


def ranks_of(files: Iterable[TraceFile]) -> list[RunRanks]:
    """Returns runs in the order of their first file. Traces whose rank is unknown are in none."""
    return [_ranks_of_run(name, by_rank) for name, by_rank in runs_of(files).items()]


def _ranks_of_run(name: str, files: dict[int, TraceFile]) -> RunRanks:
    world_size, missing = world_size_of(files.values()), missing_ranks(files)
    read = {rank: file for rank, file in sorted(files.items()) if not file.problem}
    by_phase: dict[str, dict[int, PhaseSummary]] = {}
    for rank, file in read.items():
        for summary in summarise(file.steady_rows):
            by_phase.setdefault(summary.phase, {})[rank] = summary
    rows: list[dict[str, Cell]] = []
    for phase, summaries in by_phase.items() if len(read) > 1 else ():
        slowest, fastest = (pick(summaries, key=lambda rank: summaries[rank].span_us) for pick in (max, min))
        summary = summaries[slowest]
        rows.append(
            {
                "run": name,
                "phase": phase,
                "num_ranks": len(summaries),
                "world_size": world_size,
                "missing": ",".join(map(str, missing)) or None,
                "slowest_rank": slowest,
                "slowest_us": summary.span_us,
                "fastest_rank": fastest,
                "fastest_us": summaries[fastest].span_us,
                "skew_us": summary.span_us - summaries[fastest].span_us,
                "exposed_comm_us": summary.exposed_comm_us,
                "wait_us": summary.wait_us,
                "overlap_ratio": summary.overlap_ratio,
                "startup_iterations": len(read[slowest].startup),
            }
        )
    return RunRanks(name=name, world_size=world_size, ranks=list(read), missing=missing, rows=rows)


if __name__ == "__main__":
    _serve_request()
