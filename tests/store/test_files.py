from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.store import open_store, opening, read_store
from overlap_sweep.store.files import FileStore
from overlap_sweep.store.sqlite import SqliteStore
from tests.store.measured import ENVIRONMENT, result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "measurements.sqlite"


def keep(path: Path, *minutes: int) -> Path:
    """The file that they are in."""
    before = set(path.parent.glob("*.d/*"))
    with FileStore(path) as store:
        for minute in minutes:
            store.add(result(minute=minute), path.parent)
    (file,) = set(path.parent.glob("*.d/*")) - before
    return file


def times(path: Path) -> list[str | None]:
    return [measurement.result.started for measurement in read_store(path).measurements]


def started(*minutes: int) -> list[str]:
    return [f"2026-11-20T21:{minute:02}:00+00:00" for minute in minutes]


def test_a_network_file_system_is_told_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "network_file_system", lambda path: "nfs4")
    with open_store(path) as store:
        assert store.notice == (
            f"{path} lies on nfs4, where SQLite is not safe with several writers; measurements are kept in {path}.d, "
            "one file per job, and merged when read."
        )
        store.add(result(minute=1), path.parent)
    assert not path.exists()
    assert times(path) == started(1)
    monkeypatch.undo()
    with open_store(path) as store:
        assert store.notice is None
        assert len(store.measurements()) == 1


def test_every_writer_has_a_file_of_its_own_and_a_reader_merges_them(path: Path) -> None:
    with FileStore(path) as one, FileStore(path) as other:
        one.add(result(minute=3), path.parent)
        other.add(result(minute=2), path.parent)
        one.add(result(minute=1), path.parent)
        found = other.find(result().point, ENVIRONMENT)
        assert found is not None
        assert found.result.started == started(3)[0]
        other.add(result(minute=4), path.parent)
        found = one.find(result().point, ENVIRONMENT)
        assert found is not None
        assert found.result.started == started(4)[0]
    names = [file.name for file in path.with_name("measurements.sqlite.d").iterdir()]
    assert len(names) == 2
    assert all(f"-{os.getpid()}-" in name for name in names)
    assert times(path) == started(1, 2, 3, 4)


def test_a_forked_process_does_not_write_into_its_parents_file(path: Path) -> None:
    with FileStore(path) as store:
        store.add(result(minute=1), path.parent)
        child = os.fork()
        if not child:
            store.add(result(minute=2), path.parent)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert len(list(path.with_name("measurements.sqlite.d").iterdir())) == 2
    assert times(path) == started(1, 2)


def test_a_line_that_was_cut_short_at_the_end_is_skipped(path: Path) -> None:
    file = keep(path, 1, 2)
    file.write_bytes(file.read_bytes()[:-100])
    reading = read_store(path)
    assert [m.result.started for m in reading.measurements] == started(1)
    assert reading.problems == []
    keep(path, 3)
    with FileStore(path) as store:
        assert store.find(result().point, ENVIRONMENT) is not None
        assert store.problems == []
    assert times(path) == started(1, 3)


def test_a_broken_line_before_the_end_is_named(path: Path) -> None:
    file = keep(path, 1, 2, 3)
    first, second, third = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second[: len(second) // 2] + b"\n" + third)
    reading = read_store(path)
    assert [m.result.started for m in reading.measurements] == started(1, 3)
    assert len(reading.problems) == 1
    assert reading.problems[0].startswith(f"{file}, byte {len(first)} cannot be read")
    for kind in (FileStore, SqliteStore):
        with kind(path) as store:
            found = store.find(result().point, ENVIRONMENT)
            assert found is not None
            assert found.result.started == started(3)[0]
            assert len(store.measurements()) == 2
            assert store.problems == reading.problems


def test_a_result_of_a_later_version_is_named(path: Path) -> None:
    file = keep(path, 1)
    file.write_bytes(file.read_bytes().replace(b'"schema":1', b'"schema":9'))
    assert "has schema 9" in read_store(path).problems[0]


def test_a_sqlite_file_that_lies_there_already_is_read_too(path: Path) -> None:
    with SqliteStore(path) as store:
        store.add(result(minute=1), path.parent)
        store.add(result(minute=9), path.parent)
    with FileStore(path) as files:
        files.add(result(minute=5), path.parent)
        found = files.find(result().point, ENVIRONMENT)
        assert found is not None
        assert found.result.started == started(9)[0]
        assert len(files.measurements()) == 3
    assert [file.name for file in path.parent.iterdir() if file.name.endswith(("-wal", "-shm"))] == []


def test_a_sqlite_file_that_another_host_may_be_writing_is_left_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(path, 1)
    with SqliteStore(path) as writer:
        writer.add(result(minute=2), path.parent)
        monkeypatch.setattr(opening, "network_file_system", lambda path: "nfs4")
        reading = read_store(path)
        assert [m.result.started for m in reading.measurements] == started(1)
        assert "has a write-ahead log" in reading.problems[0]


def test_a_file_that_cannot_be_read_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = keep(path, 1)
    keep(path, 2)
    usual = Path.open

    def refusing(self: Path, *arguments: Any, **named: Any) -> Any:
        if self == forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return usual(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", refusing)
    reading = read_store(path)
    assert [m.result.started for m in reading.measurements] == started(2)
    assert reading.problems == [f"{forbidden} cannot be read (Permission denied); it is left out."]
    for kind in (FileStore, SqliteStore):
        with kind(path) as store:
            assert len(store.measurements()) == 1
            assert store.problems == reading.problems


def test_no_directory_can_be_made(path: Path) -> None:
    path.with_name("measurements.sqlite.d").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        FileStore(path)


def test_a_full_disk_loses_that_measurement_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path) as store:
        store.add(result(minute=1), path.parent)
        write = os.write
        with monkeypatch.context() as full:
            full.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:50]))
            with pytest.raises(UserError, match="no room"):
                store.add(result(minute=2), path.parent)
        store.add(result(minute=3), path.parent)
    assert times(path) == started(1, 3)
    assert read_store(path).problems == []


def test_the_directory_of_files_is_no_store_to_be_given(path: Path) -> None:
    keep(path, 1)
    with pytest.raises(UserError, match=f"give the store's file, such as {path}"):
        read_store(path.with_name("measurements.sqlite.d"))
