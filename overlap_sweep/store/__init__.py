"""A memory of measurements that many jobs share: each kept under what was measured and on what machine.

A SQLite file; on a network file system, where SQLite's shared memory and locks do not reach, a file per job beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Result
from overlap_sweep.store import sqlite
from overlap_sweep.store.files import FileStore, read_files, read_from_afar
from overlap_sweep.store.measurement import Measurement, files_directory, merged

__all__ = ["Measurement", "Store", "StoreReading", "network_file_system", "open_store", "read_store"]

MOUNTS = Path("/proc/self/mountinfo")

NETWORK_TYPES = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "virtiofs", "vboxsf"),
        *("lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "pvfs2", "orangefs", "gfs2", "ocfs2"),
        *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.beegfs", "fuse.juicefs", "fuse.dfuse"),
        *("fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.mount-s3", "fuse.vmhgfs-fuse", "fuse.portal"),
    }
)
"""As the kernel names them: those that several machines may write to at the same time."""


class Store(Protocol):
    """Measurements that many jobs share. Of one process, and of the thread that opened it."""

    notice: str | None
    """What the user should know of it, in a sentence."""
    problems: list[str]
    """A sentence for each kept measurement that could not be read so far; the others are not affected."""

    def add(self, result: Result, directory: Path) -> None:
        """Keeps a measurement, whatever its status; one that is kept already stays as it is. When this returns, it
        survives the end of the process and of the machine. UserError where it cannot be kept."""

    def find(self, point: dict[str, Any], environment: dict[str, Any]) -> Measurement | None:
        """Returns the latest measurement of the same point on an equal machine (`identity`) that is `ok` and not
        launch-bound. `environment` is `identity.machine`'s, or a result's."""

    def measurements(self) -> list[Measurement]:
        """Returns all, oldest first."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class StoreReading:
    """What a store held when it was read."""

    measurements: list[Measurement]
    """Oldest first."""
    problems: list[str]
    """A sentence for each that could not be read."""


def open_store(path: Path) -> Store:
    """Returns the store, to add and to find; made where it is not there. UserError, in one line, for what is no store,
    is of a later version, or cannot be written."""
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is no directory; make it, or give a store elsewhere.")
    kind = network_file_system(path)
    if kind is None:
        return sqlite.SqliteStore(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory; give the store's file, such as {path / 'measurements.sqlite'}.")
    return FileStore(
        path,
        f"{path} lies on {kind}, where SQLite is not safe with several writers; measurements are kept in "
        f"{files_directory(path)}, one file per job, and merged when read.",
    )


def read_store(path: Path) -> StoreReading:
    """To look at, another's or a copy too: nothing is written. UserError for what is no store or is not there."""
    directory = files_directory(path)
    if path.is_dir():
        name = path.with_name(path.name.removesuffix(".d")) if path.suffix == ".d" else path / "measurements.sqlite"
        raise UserError(f"{path} is a directory; give the store's file, such as {name}.")
    if not path.exists() and not directory.is_dir():
        raise UserError(f"{path} does not exist; give the path that launch.py was given as store=.")
    problems: list[str] = []
    if network_file_system(path):
        in_sqlite = read_from_afar(path, problems)
    else:
        in_sqlite = sqlite.read(path, problems) if path.exists() else []
    return StoreReading(merged([*in_sqlite, *read_files(path, problems)]), problems)


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """Returns the type of the network file system that `path` lies on or will lie on, such as `nfs4`; None where it is
    a local one, or not known, as on other systems than Linux.

    `mounts`: the content of a /proc/<pid>/mountinfo, by default this process's.
    """
    if mounts is None:
        if not MOUNTS.exists():
            return None
        mounts = MOUNTS.read_text(errors="surrogateescape")
    kind = _type_at(path.resolve(), mounts)
    return kind if kind in NETWORK_TYPES else None


def _type_at(path: Path, mounts: str) -> str | None:
    """Returns the type of the innermost mount; of several at the same place the last, which hides the others."""
    found, depth = None, -1
    for line in mounts.splitlines():
        own, separator, of_file_system = line.partition(" - ")
        fields = own.split(" ")
        if not separator or len(fields) < 5:
            continue
        mount_point = Path(_unescaped(fields[4]))
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= depth:
            found, depth = of_file_system.split(" ")[0], len(mount_point.parts)
    return found


def _unescaped(text: str) -> str:
    r"""The kernel writes a space as `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
