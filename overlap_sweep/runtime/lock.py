"""Locks: one sweep at a time in a directory, one Slurm job at a time on a point."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overlap_sweep.errors import UserError
from overlap_sweep.program import launch_command
from overlap_sweep.results.run_directory import LOCK_FILE, one_line

CLAIM_FILE = ".claim"
"""Lock file in a run directory, held while a Slurm job measures its point."""

ELSEWHERE = "make it writable, or give another directory, as in hydra.{kind}.dir=DIR"
"""Remedy in messages; `kind` is `sweep` or `run`."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


_held: dict[Path, int] = {}
"""Descriptors by lock file, open until this process ends."""


def hold(directory: Path) -> None:
    """Locks the directory until this process ends; the kernel unlocks it even after a crash.

    UserError if another process holds the lock. Prints a warning if the file system has no locks.
    """
    path = directory.resolve() / LOCK_FILE
    if path in _held:
        return
    _held[path] = descriptor = _locked_or_refused(directory)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    who = f"process {os.getpid()} of {os.environ.get('USER') or os.getuid()} on {platform.node()}"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{who} since {since}: {launch_command()}".encode(), 0)


def refuse_if_read_only(directory: Path, kind: str) -> None:
    """Raises UserError if the directory, or its nearest existing parent, cannot be written to."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file; give a directory.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"{there if there.name else there.absolute()} cannot be written to; {ELSEWHERE.format(kind=kind)}."
        )


def refuse_if_held(directory: Path) -> None:
    """Raises UserError if another process holds the directory's lock. Writes nothing."""
    path = directory.resolve() / LOCK_FILE
    if path not in _held and path.exists():
        os.close(_locked_or_refused(directory))


@contextmanager
def claimed(directory: Path, patience_s: float) -> Iterator[bool]:
    """Locks the run directory's point for the block; yields whether that worked. Waits up to `patience_s` for another
    process that holds it, such as one on a node that Slurm takes for dead."""
    path = directory / CLAIM_FILE
    deadline = time.monotonic() + patience_s
    while (descriptor := _locked(path)) is None:
        if time.monotonic() > deadline:
            yield False
            return
        time.sleep(1.0)
    try:
        yield True
    finally:
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """Returns a descriptor that locks the file while it is open; None if another process holds it."""
    if path.is_symlink():
        raise UserError(f"{path} is a link; remove it.")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{path} cannot be written to ({error.strerror}); {ELSEWHERE.format(kind='sweep')}.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(f"warning: {path} cannot be locked ({error.strerror}); run only one sweep at a time in this directory")
    return descriptor


def _locked_or_refused(directory: Path) -> int:
    """Returns a descriptor that locks the directory while it is open. UserError if another process holds it."""
    path = directory / LOCK_FILE
    descriptor = _locked(path)
    if descriptor is None:
        owner = one_line(path.read_text(errors="replace")) or "another process, which has just started"
        mend = "wait for it, end it, or give another directory"
        raise UserError(f"{directory} is in use by {owner}; {mend}. If its host is gone, remove {path}.")
    return descriptor
