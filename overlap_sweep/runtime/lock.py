"""Locks: one sweep at a time in a directory, one job of a cluster at a time on a point."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overlap_sweep.errors import UserError
from overlap_sweep.program import launch_command
from overlap_sweep.results.run_directory import LOCK_FILE, one_line

CLAIM_FILE = ".claim"
"""Lock file in a run directory, held while a cluster's job measures its point."""

ELSEWHERE = "make it writable, or give another directory, as in hydra.{kind}.dir=DIR"
"""Remedy in messages; `kind` is `sweep` or `run`."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


_held: dict[Path, int] = {}
"""Descriptors by lock file, open until this process ends."""


def hold(directory: Path, name: str = LOCK_FILE) -> bool:
    """Locks the directory until this process ends; the kernel unlocks it even after a crash. Returns whether nobody
    held it before.

    UserError if another process holds the lock. Prints a warning if the file system has no locks.
    """
    path = directory.resolve() / name
    descriptor = _held[path] = _locked_or_refused(directory / name)
    is_new = not os.fstat(descriptor).st_size
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    who = f"process {os.getpid()} of {os.environ.get('USER') or os.getuid()} on {platform.node()}"
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{who} since {since}: {launch_command()}".encode(), 0)
    except OSError as error:
        if is_new:
            path.unlink()
        error.filename = str(directory / name)
        raise
    return is_new


def refuse_if_read_only(directory: Path, kind: str) -> None:
    """Raises UserError if the directory, or its nearest existing parent, cannot be written to."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{there} is a file; give a directory.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"{there if there.name else there.absolute()} cannot be written to; {ELSEWHERE.format(kind=kind)}."
        )


@contextmanager
def claimed(directory: Path, patience_s: float) -> Iterator[bool]:
    """Locks the run directory's point for the block; yields whether that worked. Waits up to `patience_s` for another
    process that holds it, such as one on a node that a cluster takes for dead."""
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
    """Returns a descriptor that locks the file while it is open; None if another process holds it. FileNotFoundError if
    its directory is gone."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{path} is a link, which is not followed; give another directory.") from None
            raise UserError(
                f"{path} cannot be written to ({error.strerror}); {ELSEWHERE.format(kind='sweep')}."
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
            warning = f"warning: {path} cannot be locked ({error.strerror}); run only one launch at a time there"
            print(warning, file=sys.stderr)
        if _is_at(path, descriptor):
            return descriptor
        # A launch that was refused removed it meanwhile.
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _locked_or_refused(path: Path) -> int:
    """Returns a descriptor that locks the file while it is open. UserError if another process holds it."""
    descriptor = _locked(path)
    if descriptor is None:
        owner = _written_in(path) or "another process, which has just started"
        mend = "wait for it, end it, or give another directory"
        raise UserError(f"{path.parent} is in use by {owner}; {mend}. If its host is gone, resume in a copy of it.")
    return descriptor


def _written_in(path: Path) -> str:
    try:
        return one_line(path.read_text(errors="replace"))
    except FileNotFoundError:
        return ""
