"""Temporary directories that nobody else can read. What a killed process has left of them, the next start removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

PREFIX = "overlap_sweep_"
_LOCK = ".alive"
"""File that is locked as long as the process lives that made the directory."""


class PrivateDirectory:
    """A directory of this process, until `remove`."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            # Another start may have taken it for abandoned before it was locked.
            with contextlib.suppress(FileNotFoundError):
                self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
                # On file systems without locks nobody can take it for abandoned either.
                with contextlib.suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if (self.path / _LOCK).exists():
                    return
                os.close(self._lock)

    def remove(self) -> None:
        """Removes the directory with all that is in it."""
        remove(self.path)
        os.close(self._lock)


def remove(directory: Path) -> None:
    """Removes a private directory. If this is killed meanwhile, the next start removes the rest."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK:
                path.unlink(missing_ok=True)
        (directory / _LOCK).unlink(missing_ok=True)
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
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path)
            finally:
                os.close(lock)
