"""Trace files, each read and analysed once: several large ones by several processes, and what is found is kept. And the
runs that they are of: one trace a rank, which is the slowest, and whose is missing.

`python -m overlap_sweep.trace.files` is one of those processes. Findings are kept by the trace's path and content and
by the code that reads it, see `overlap_sweep.cache`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlap_sweep.cache import find, keep
from overlap_sweep.errors import UserError
from overlap_sweep.trace import PartRow, PhaseSummary, TraceRow, in_words, startup_iterations, summarise
from overlap_sweep.trace.disk import is_gzip
from overlap_sweep.trace.stream import MOST_RANKS

TEXT_BYTES_PER_S = 200e6
GZIP_RATIO = 13
"""Kineto's text over its gzip. Like the line above only for guessing how long a file takes."""

WORTH_A_PROCESS_S = 0.4
"""A process needs about 0.2 s to start."""

_KIND = "traces"
_T = TypeVar("_T")

_NOT_OF_ITS_CONTENT = " cannot be read ("
"""The disk's or the network's problem, which may pass."""

_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
_TENSORBOARD_NAME = re.compile(r"\.pt\.trace\.json(\.gz)?$")
_DIGITS = re.compile(r"\d+")


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
        """Returns the iterations that are in `rows` and `parts` and in no median: see `startup_iterations`."""
        return startup_iterations(self.rows)

    @property
    def steady_rows(self) -> list[TraceRow]:
        """Returns those of `rows` that are no start-up."""
        return [row for row in self.rows if row.iteration not in self.startup]

    @property
    def steady_parts(self) -> list[PartRow]:
        """Returns those of `parts` that are no start-up."""
        return [part for part in self.parts if part.iteration not in self.startup]


class RunRanks(msgspec.Struct, kw_only=True):
    """What was recorded together: one trace a rank."""

    name: str
    """The files' common name, their directory with it."""
    world_size: int | None
    """None when no trace says."""
    ranks: list[int]
    """Whose traces could be analysed."""
    missing: list[int]
    """Whose are not there, or could not be."""
    rows: list[dict[str, Any]]
    """The medians of each phase: which rank is the slowest, which the fastest, and the skew between them, in
    microseconds. Empty with fewer than two ranks."""


def read_trace_files(paths: Sequence[Path], with_parts: bool = True) -> list[TraceFile]:
    """Returns what each trace holds, in the order of `paths`; parts, of which there are dozens a row, only if asked."""
    keys = {path: key_of(path) for path in paths}
    found = {path: file for path, key in keys.items() if (file := _kept(key, path, with_parts))}
    missing = [path for path in keys if path not in found]
    for path, file in zip(missing, _read_all(missing, with_parts), strict=True):
        _keep(keys[path], file, with_parts)
        found[path] = file
    return [found[path] for path in paths]


def read_trace_file(path: Path, with_parts: bool) -> TraceFile:
    """Returns the analysis of a trace, reading it whatever is kept of it."""
    # Whoever reads no trace has no need of numpy.
    from overlap_sweep.trace.activity import activity_of
    from overlap_sweep.trace.kineto import read_trace
    from overlap_sweep.trace.measured import breakdown, overlap_rows

    try:
        trace = read_trace(path)
        activity = activity_of(trace)
        rows = overlap_rows(activity, str(path), trace.rank)
    except UserError as error:
        return TraceFile(path, problem=str(error))
    parts = breakdown(activity, str(path), trace.rank) if with_parts else []
    return TraceFile(path, trace.rank, trace.world_size, rows, parts, trace.warnings)


def of_startup(files: Sequence[TraceFile]) -> list[str]:
    """Returns at most one sentence on what medians leave out as start-up: a sweep may have hundreds of such traces."""
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
    """Starts a process that reads these traces; None where that fails."""
    command = [sys.executable, "-m", "overlap_sweep.trace.files"]
    try:
        with tempfile.TemporaryFile() as request:
            request.write(msgspec.msgpack.encode((list(map(str, paths)), with_parts)))
            request.seek(0)
            return subprocess.Popen(command, stdin=request, stdout=subprocess.PIPE)
    except (OSError, UnicodeError):
        # UnicodeError: a path that is no text.
        return None


def _answers(process: subprocess.Popen[bytes] | None, count: int) -> list[TraceFile] | None:
    """Returns the process's findings; None where their number is not as asked for."""
    try:
        answers = _decoded(process.communicate()[0], list[TraceFile]) if process else []
    except msgspec.MsgspecError:
        return None
    return answers if len(answers) == count else None


def _answer_request() -> None:
    """Reads a request from stdin, and writes what the traces hold to stdout."""
    paths, with_parts = msgspec.msgpack.decode(sys.stdin.buffer.read())
    sys.stdout.buffer.write(_encoded([read_trace_file(Path(path), with_parts) for path in paths]))


def _encoded(found: Any) -> bytes:
    return msgspec.msgpack.encode(found, enc_hook=str)


def _decoded(content: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(content, type=kind, dec_hook=lambda path, text: path(text))


def _shares(paths: Sequence[Path], processes: int) -> list[list[Path]]:
    """Deals the paths, largest first, to as many processes as are worth starting."""
    times_s = {path: _guess_s(path) for path in paths}
    count = max(1, min(processes, len(paths), int(sum(times_s.values()) / WORTH_A_PROCESS_S)))
    largest_first = sorted(times_s, key=lambda path: -times_s[path])
    return [largest_first[number::count] for number in range(count)]


def _guess_s(path: Path) -> float:
    try:
        return path.stat().st_size * (GZIP_RATIO if is_gzip(path) else 1) / TEXT_BYTES_PER_S
    except OSError:
        # Reading it will tell.
        return 0.0


def key_of(path: Path) -> str | None:
    """Returns a key for what depends on the trace's content and its reader; None where the file cannot be read."""
    try:
        with path.open("rb") as file:
            return f"{reader_digest()} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError:
        return None


def _kept(key: str | None, path: Path, with_parts: bool) -> TraceFile | None:
    """Returns earlier findings; None where none are kept, or they are damaged."""
    content = find(_KIND, f"{key} {path!r} {with_parts}") if key else None
    try:
        return _decoded(zlib.decompress(content), TraceFile) if content else None
    except (zlib.error, msgspec.MsgspecError):
        return None


def _keep(key: str | None, file: TraceFile, with_parts: bool) -> None:
    """Keeps the findings; those on what is wrong with the trace, too: they may have taken as long as any."""
    if key is None or (file.problem or "").startswith(f"{file.path}{_NOT_OF_ITS_CONTENT}"):
        return
    if (file.warnings or file.problem) and key_of(file.path) != key:
        # Somebody is writing it just now: this was found in more of it than the key is of.
        return
    with suppress(UnicodeError):
        # A path that is no text: it is read again.
        keep(_KIND, f"{key} {file.path!r} {with_parts}", zlib.compress(_encoded(file), 1))


@cache
def reader_digest() -> str:
    """Returns a hash that changes with the code and the kernel classes."""
    files = sorted(resources.files(__package__).iterdir(), key=lambda file: file.name)
    sources = [file.read_bytes() for file in files if file.name.endswith((".py", ".yaml"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def ranks_of(files: Sequence[TraceFile]) -> list[RunRanks]:
    """Returns runs in the order of their first file. Traces without a rank, in themselves or in their names, are in
    none."""
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
    return [_ranks_of_run(name, of_run) for name, of_run in runs.items()]


def rank_of(file: TraceFile) -> int | None:
    """Returns the trace's rank; where it has none, or cannot be read, that of its name or its directory's."""
    if file.rank is not None:
        return file.rank
    in_name = _RANK_IN_NAME.search(file.path.name) or _RANK_IN_NAME.search(file.path.parent.name)
    rank = int(in_name[1]) if in_name else None
    return None if rank is None or rank >= MOST_RANKS else rank


def run_name(path: Path) -> str:
    """Returns the common part of the names of one run's traces: all but the rank, or what may stand for it.

    Where the file's name doesn't say its rank, its directory's may; else the rank may be hidden in any of the name's
    numbers. torch.profiler's own `<host>_<process>.<time>.pt.trace.json` may come from several hosts.
    """
    for part in (path, path.parent):
        if _RANK_IN_NAME.search(part.name):
            return str(part.with_name(_RANK_IN_NAME.sub("rank*", part.name)) / path.relative_to(part))
    if own := _TENSORBOARD_NAME.search(path.name):
        return str(path.with_name(f"*{own[0]}"))
    return str(path.with_name(_DIGITS.sub("*", path.name)))


def _ranks_of_run(name: str, files: dict[int, TraceFile]) -> RunRanks:
    world_size = max((file.world_size or 0 for file in files.values()), default=0) or None
    read = {rank: file for rank, file in sorted(files.items()) if not file.problem}
    missing = sorted(set(range(world_size or max(files) + 1)) - set(read))
    by_phase: dict[str, dict[int, PhaseSummary]] = {}
    for rank, file in read.items():
        for summary in summarise(file.steady_rows):
            by_phase.setdefault(summary.phase, {})[rank] = summary
    rows: list[dict[str, Any]] = []
    for phase, of_phase in by_phase.items() if len(read) > 1 else ():
        slowest, fastest = (pick(of_phase, key=lambda rank: of_phase[rank].span_us) for pick in (max, min))
        summary = of_phase[slowest]
        rows.append(
            {
                "run": name,
                "phase": phase,
                "num_ranks": len(of_phase),
                "world_size": world_size,
                "missing": ",".join(map(str, missing)) or None,
                "slowest_rank": slowest,
                "slowest_us": summary.span_us,
                "fastest_rank": fastest,
                "fastest_us": of_phase[fastest].span_us,
                "skew_us": summary.span_us - of_phase[fastest].span_us,
                "exposed_comm_us": summary.exposed_comm_us,
                "wait_us": summary.wait_us,
                "overlap_ratio": summary.overlap_ratio,
                "startup_iterations": len(read[slowest].startup),
            }
        )
    return RunRanks(name=name, world_size=world_size, ranks=list(read), missing=missing, rows=rows)


if __name__ == "__main__":
    _answer_request()
