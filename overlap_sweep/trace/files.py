"""Trace files, each read and analysed once: several large ones by several processes, and the findings are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec

from overlap_sweep.trace import kept_findings
from overlap_sweep.trace.breakdown import PartRow
from overlap_sweep.trace.content import is_gzip
from overlap_sweep.trace.findings import Findings, find, request_for
from overlap_sweep.trace.overlap import TraceRow
from overlap_sweep.trace.startup import in_words, startup_iterations

TEXT_BYTES_PER_S = 200e6
GZIP_RATIO = 13
"""Kineto's text over its gzip. Like the line above only for guessing how long a file takes."""

WORTH_A_PROCESS_S = 0.4
"""A process needs about 0.2 s to start."""


@dataclass(frozen=True)
class TraceFile:
    """One rank's trace."""

    path: Path
    rank: int | None = None
    world_size: int | None = None
    """None, like the rank, when the trace doesn't say."""
    rows: list[TraceRow] = field(default_factory=list)
    """Per iteration and phase; empty where there is a problem."""
    parts: list[PartRow] = field(default_factory=list)
    """Where they were asked for."""
    warnings: list[str] = field(default_factory=list)
    """One sentence for each reason why it was read only in part."""
    problem: str | None = None
    """In a sentence, why it could not be analysed."""

    @cached_property
    def startup(self) -> list[int]:
        """Iterations that are in `rows` and `parts` and in no median: see `startup`."""
        return startup_iterations(self.rows)

    @property
    def steady_rows(self) -> list[TraceRow]:
        """Those of `rows` that are no start-up."""
        return [row for row in self.rows if row.iteration not in self.startup]

    @property
    def steady_parts(self) -> list[PartRow]:
        """Those of `parts` that are no start-up."""
        return [part for part in self.parts if part.iteration not in self.startup]


def read_trace_files(paths: Sequence[Path], with_parts: bool = True) -> list[TraceFile]:
    """In the order of `paths`. Without parts, of which there are dozens for every row, theirs are empty."""
    keys = [kept_findings.key_of(path) for path in paths]
    known = {path: kept_findings.load(key, path, with_parts) for path, key in zip(paths, keys, strict=True)}
    missing = [path for path, findings in known.items() if findings is None]
    fresh = dict(zip(missing, _find_all(missing, with_parts), strict=True))
    for path, key in zip(paths, keys, strict=True):
        if path in fresh:
            kept_findings.keep(key, path, fresh[path], with_parts)
    found = {path: findings or fresh[path] for path, findings in known.items()}
    return [TraceFile(path, **msgspec.structs.asdict(found[path])) for path in paths]


def of_startup(files: Sequence[TraceFile]) -> list[str]:
    """At most one sentence: what is left out of medians as start-up. A sweep may have hundreds of such traces."""
    found = [file for file in files if file.startup]
    if not found:
        return []
    more = "" if len(found) == 1 else f" The same of {len(found) - 1} other trace{'s' if len(found) > 2 else ''}."
    return [f"{in_words(str(found[0].path), found[0].rows, found[0].startup)}{more}"]


def _find_all(paths: Sequence[Path], with_parts: bool) -> list[Findings]:
    """In the order of `paths`. A program of our own instead of multiprocessing: that would run the main module of
    whoever calls this again."""
    shares = _shares(paths, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    others = [_ask(share, with_parts) for share in shares[1:]]
    found = {path: find(path, with_parts) for path in shares[0]}
    for share, process in zip(shares[1:], others, strict=True):
        # One that was killed has said so on stderr, if anything; what it was asked for is done here.
        found |= zip(share, _answers(process, len(share)) or [find(path, with_parts) for path in share], strict=True)
    return [found[path] for path in paths]


def _ask(paths: Sequence[Path], with_parts: bool) -> subprocess.Popen[bytes] | None:
    """None where no process can be started, or it ends at once."""
    command = [sys.executable, "-m", "overlap_sweep.trace.findings"]
    try:
        request = request_for(paths, with_parts)
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


def _answers(process: subprocess.Popen[bytes] | None, count: int) -> list[Findings] | None:
    """None where there are not as many."""
    if process is None:
        return None
    answered, _ = process.communicate()
    try:
        answers = msgspec.msgpack.decode(answered, type=list[Findings])
    except msgspec.MsgspecError:
        return None
    return answers if len(answers) == count else None


def _shares(paths: Sequence[Path], processes: int) -> list[list[Path]]:
    """What each process reads, about as long as the others; one share where more are not worth starting."""
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
