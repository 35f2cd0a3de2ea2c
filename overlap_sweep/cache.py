"""Bytes that are slow to make, kept between runs under the digest of what they were made from.

In `$OVERLAP_SWEEP_CACHE`, else in `overlap_sweep` below `$XDG_CACHE_HOME` or `~/.cache`. May be deleted at any time.
What is kept is believed, scripts of report.html among it, so a directory that others may write to is not used.
"""

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path


def cache_root() -> Path:
    """Returns the cache's directory, whether it exists or not."""
    if own := os.environ.get("OVERLAP_SWEEP_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "overlap_sweep"


def cache_directory(kind: str) -> Path | None:
    """Returns the directory for this kind of entry, made if need be; None where nothing can be kept."""
    try:
        directory = cache_root() / kind
        directory.parent.parent.mkdir(parents=True, exist_ok=True)
        for made in (directory.parent, directory):
            made.mkdir(mode=0o700, exist_ok=True)
        is_ours = all(map(_only_we_write, (directory.parent, directory)))
    except (OSError, RuntimeError):
        # RuntimeError: there is no home.
        return None
    return directory if is_ours else None


def _only_we_write(directory: Path) -> bool:
    status = directory.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def cached_bytes(kind: str, key: bytes | str, make: Callable[[], bytes]) -> bytes:
    """Returns what `make` returns for `key`, which must hold all that it depends on; from the cache if that can be read
    and written."""
    content = find(kind, key)
    if content is None:
        content = make()
        keep(kind, key, content)
    return content


def find(kind: str, key: bytes | str) -> bytes | None:
    """Returns the content kept under the key, or None."""
    directory = cache_directory(kind)
    try:
        return (directory / _name(key)).read_bytes() if directory else None
    except OSError:
        return None


def keep(kind: str, key: bytes | str, content: bytes) -> None:
    """Writes the content, whole or not at all, whoever else writes the same."""
    directory = cache_directory(kind)
    if directory is None:
        return
    try:
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".")
    except OSError:
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(directory / _name(key))
    except OSError:
        Path(temporary).unlink(missing_ok=True)


@cache
def code_digest(package: str) -> str:
    """Returns a hash of the package's own code and data, without packages inside of it."""
    files = sorted(resources.files(package).iterdir(), key=lambda file: file.name)
    sources = [file.read_bytes() for file in files if file.name.endswith((".py", ".yaml"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def _name(key: bytes | str) -> str:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()
