"""Reads many traces, in several processes where that is worth it.

`python -m overlap_sweep.trace.processes` is one of these processes.
"""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlap_sweep.program import environment_with_package
from overlap_sweep.trace.disk import is_gzip

TEXT_BYTES_PER_S = 200e6
GZIP_RATIO = 13
"""Size of Kineto's text / size of its gzip. Only for estimating how long a file takes, like the line above."""

WORTH_A_PROCESS_S = 0.4
"""Work that justifies a process, which needs about 0.2 s to start."""

_T = TypeVar("_T")


def read_each(paths: Sequence[Path], reader: str, kind: type[_T], *arguments: bool | str) -> list[_T]:
    """Returns what the function named `reader`, as `module:function`, returns for each path and the arguments.

    `kind`: the type of the results, which msgspec encodes. The processes run this module instead of using
    multiprocessing, which would run the caller's main module again.
    """
    shares = _shares(paths, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    others = [_start(share, reader, arguments) for share in shares[1:]]
    read = pkgutil.resolve_name(reader)
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


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else (value.dtype.str, value.shape, value.tobytes())


def _of_plain(kind: Any, plain: Any) -> Any:
    if kind is Path:
        return Path(plain)
    # Imported here, because numpy is only needed to read traces.
    import numpy as np

    dtype, shape, content = plain
    # A copy, because an array over bytes cannot be written.
    return np.frombuffer(content, dtype).reshape(shape).copy()


def _start(paths: Sequence[Path], reader: str, arguments: Sequence[object]) -> subprocess.Popen[bytes] | None:
    """Starts a process that reads these traces; None if it cannot be started."""
    command = [sys.executable, "-m", "overlap_sweep.trace.processes"]
    try:
        with tempfile.TemporaryFile() as request:
            request.write(msgspec.msgpack.encode((list(map(str, paths)), reader, arguments)))
            request.seek(0)
            return subprocess.Popen(command, stdin=request, stdout=subprocess.PIPE, env=environment_with_package())
    except (OSError, UnicodeError):
        # UnicodeError: a path that is not valid text.
        return None


def _results(process: subprocess.Popen[bytes] | None, count: int, kind: type[_T]) -> list[_T] | None:
    """Returns the process's results; None if it failed."""
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
    try:
        return path.stat().st_size * (GZIP_RATIO if is_gzip(path) else 1) / TEXT_BYTES_PER_S
    except OSError:
        # Reading it will report the error.
        return 0.0


if __name__ == "__main__":
    _serve_request()
