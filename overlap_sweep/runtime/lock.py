"""What a process holds until it ends, however that is: locks of sweeps' directories and, in a cluster's job, of points;
and temporary directories, of which the next start removes what a killed process has left."""

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import stat
import sys
import tempfile
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

PREFIX = "overlap_sweep_"
"""Start of the names of private directories."""
_ALIVE = ".alive"
"""File in a private directory that is locked as long as the process lives that made it."""

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


class PrivateDirectory:
    """A temporary directory of this process that nobody else can read, until `remove`."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # Another start may have taken it for abandoned before it was locked.
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path / _ALIVE, os.O_RDWR | os.O_CREAT, 0o600)
                # On file systems without locks nobody can take it for abandoned either.
                with contextlib.suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if (self.path / _ALIVE).exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Removes the directory with all that is in it."""
        remove_private(self.path)
        os.close(self._lock)


def remove_private(directory: Path) -> None:
    """Removes a private directory. If this is killed meanwhile, the next start removes the rest."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _ALIVE:
                path.unlink(missing_ok=True)
        (directory / _ALIVE).unlink(missing_ok=True)
        directory.rmdir()


def _remove_abandoned(folder: Path) -> None:
    """Removes what killed processes of this user have left in the folder."""
    for path in folder.glob(f"{PREFIX}*"):
        # It may be somebody else's, be locked, or vanish at any moment.
        with contextlib.suppress(OSError):
            # One look, which follows no link: in a sticky folder nobody can exchange what is ours.
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if not any(path.iterdir()):
                path.rmdir()
                continue
            lock = os.open(path / _ALIVE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_private(path)
            finally:
                os.close(lock)
