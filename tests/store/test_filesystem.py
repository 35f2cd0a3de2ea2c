from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.store.filesystem import network_file_system

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:30 / /home rw shared:2 master:3 - nfs4 server:/export/home rw,vers=4.2
31 30 8:2 / /home/local rw - xfs /dev/sdb1 rw
32 22 0:31 / /lustre rw - lustre 10.0.0.1@tcp:/fs rw
33 22 0:32 / /my\040share rw - cifs //server/share rw
34 22 0:33 / /remote rw - fuse.sshfs host:/ rw
35 22 0:34 / /twice rw - nfs server:/a rw
36 22 0:35 / /twice rw - tmpfs none rw
37 22 0:36 / /shm rw - tmpfs tmpfs rw
half a line
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data/m.sqlite", None),
        ("/home/ann/m.sqlite", "nfs4"),
        ("/home", "nfs4"),
        ("/homes/m.sqlite", None),
        ("/home/local/m.sqlite", None),
        ("/lustre/a/b/m.sqlite", "lustre"),
        ("/my share/m.sqlite", "cifs"),
        ("/remote/m.sqlite", "fuse.sshfs"),
        ("/twice/m.sqlite", None),
        ("/shm/../lustre/m.sqlite", "lustre"),
    ],
)
def test_the_innermost_mount_counts(path: str, expected: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == expected


def test_a_link_is_followed_and_where_nothing_is_known_of_mounts_it_is_local(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/lustre")
    assert network_file_system(tmp_path / "link" / "m.sqlite", MOUNTS) == "lustre"
    assert network_file_system(Path("/home/m.sqlite"), "") is None
    assert isinstance(network_file_system(tmp_path), str | None)
