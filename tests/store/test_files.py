"""A store on a network file system: a file for each writer; and which file systems are such."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import store as store_module
from overlap_sweep.errors import UserError
from overlap_sweep.store import network_file_system, open_store, read_store
from overlap_sweep.store.files import FileStore
from overlap_sweep.store.sqlite import SqliteStore
from tests.store.measured import keep, latest, minutes, result


def measured(path: Path) -> list[int]:
    return minutes(read_store(path).measurements)


def test_a_network_file_system_is_told_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "network_file_system", lambda path: "nfs4")
    with open_store(path) as store:
        assert str(store.notice).startswith(f"{path} lies on nfs4")
        assert f"{path}.d, one file per job" in str(store.notice)
        store.add(result(minute=1), path.parent)
    assert not path.exists()
    assert measured(path) == [1]
    monkeypatch.undo()
    with open_store(path) as store:
        assert store.notice is None
        assert len(store.measurements()) == 1


def test_every_writer_has_a_file_of_its_own_and_a_reader_merges_them(path: Path) -> None:
    with FileStore(path) as one, FileStore(path) as other:
        one.add(result(minute=3), path.parent)
        other.add(result(minute=2), path.parent)
        one.add(result(minute=1), path.parent)
        assert latest(other) == 3
        other.add(result(minute=4), path.parent)
        assert latest(one) == 4
    names = [file.name for file in path.with_name(f"{path.name}.d").iterdir()]
    assert len(names) == 2
    assert all(f"-{os.getpid()}-" in name for name in names)
    assert measured(path) == [1, 2, 3, 4]


def test_a_forked_process_does_not_write_into_its_parents_file(path: Path) -> None:
    with FileStore(path) as store:
        store.add(result(minute=1), path.parent)
        child = os.fork()
        if not child:
            store.add(result(minute=2), path.parent)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert len(list(path.with_name(f"{path.name}.d").iterdir())) == 2
    assert measured(path) == [1, 2]


def test_a_sqlite_file_that_lies_there_already_is_read_too(path: Path) -> None:
    keep(SqliteStore, path, 1, 9)
    with FileStore(path) as files:
        files.add(result(minute=5), path.parent)
        assert latest(files) == 9
        assert len(files.measurements()) == 3
    assert [file.name for file in path.parent.iterdir() if file.name.endswith(("-wal", "-shm"))] == []


def test_a_sqlite_file_that_another_host_may_be_writing_is_left_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(FileStore, path, 1)
    with SqliteStore(path) as writer:
        writer.add(result(minute=2), path.parent)
        monkeypatch.setattr(store_module, "network_file_system", lambda path: "nfs4")
        reading = read_store(path)
        assert minutes(reading.measurements) == [1]
        assert "has a write-ahead log" in reading.problems[0]


def test_a_file_that_cannot_be_read_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(FileStore, path, 1)
    (forbidden,) = path.parent.glob("*.d/*")
    keep(FileStore, path, 2)
    usual = Path.open

    def refusing(self: Path, *arguments: Any, **named: Any) -> Any:
        if self == forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return usual(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", refusing)
    reading = read_store(path)
    assert minutes(reading.measurements) == [2]
    assert reading.problems == [f"{forbidden} cannot be read (Permission denied); it is left out."]
    for kind in (FileStore, SqliteStore):
        with kind(path) as store:
            assert minutes(store.measurements()) == [2]
            assert store.problems == reading.problems


def test_a_full_disk_cuts_one_line_short(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path) as store:
        store.add(result(minute=1), path.parent)
        write = os.write
        with monkeypatch.context() as full:
            full.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:50]))
            with pytest.raises(UserError, match="no room"):
                store.add(result(minute=2), path.parent)
        store.add(result(minute=3), path.parent)
    with FileStore(path) as store:
        assert (latest(store), store.problems) == (3, [])
    assert measured(path) == [1, 3]
    assert read_store(path).problems == []


def test_the_directory_of_files_is_no_store_to_be_given_and_a_file_no_directory(path: Path) -> None:
    keep(FileStore, path, 1)
    directory = path.with_name(f"{path.name}.d")
    with pytest.raises(UserError, match=f"such as {path}"):
        read_store(directory)
    directory.rename(path.with_name("moved"))
    directory.write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        FileStore(path)


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
