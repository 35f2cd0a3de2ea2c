"""Which file system a path lies on: SQLite's shared memory and locks do not reach across a network."""

from __future__ import annotations

import re
from pathlib import Path

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


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type of the network file system that `path` lies on or will lie on, such as `nfs4`; None where it is a local
    one, or not known, as on other systems than Linux.

    `mounts`: the content of a /proc/<pid>/mountinfo, by default this process's.
    """
    if mounts is None:
        if not MOUNTS.exists():
            return None
        mounts = MOUNTS.read_text(errors="surrogateescape")
    kind = _type_at(path.resolve(), mounts)
    return kind if kind in NETWORK_TYPES else None


def _type_at(path: Path, mounts: str) -> str | None:
    """Of the innermost mount; of several at the same place the last, which hides the others."""
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
