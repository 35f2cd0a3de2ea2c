from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.store import open_store, read_store
from overlap_sweep.store import sqlite as sqlite_module
from overlap_sweep.store.files import FileStore
from overlap_sweep.store.sqlite import SqliteStore
from tests.store.measured import ENVIRONMENT, keep, latest, minutes, result


def change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_an_empty_file_becomes_a_write_ahead_log(path: Path) -> None:
    path.touch()
    keep(SqliteStore, path, 1)
    assert minutes(read_store(path).measurements) == [1]
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()


def test_only_writers_wait_for_a_writer_and_not_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(SqliteStore, path, 1)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with SqliteStore(path) as store:
        assert latest(store)
    assert minutes(read_store(path).measurements) == [1]
    assert time.monotonic() - started < 5
    monkeypatch.setattr(sqlite_module, "BUSY_S", 0.05)
    with SqliteStore(path) as store, pytest.raises(UserError, match="another program has locked it"):
        store.add(result(minute=2), path.parent)
    writer.close()


@pytest.mark.parametrize("opened", [open_store, read_store])
def test_what_is_no_store(path: Path, opened: Callable[[Path], object], tmp_path: Path) -> None:
    path.write_text("measurements = 1\n" * 100)
    with pytest.raises(UserError, match="file is not a database"):
        opened(path)
    with pytest.raises(UserError, match="is a directory"):
        opened(tmp_path)
    others = tmp_path / "optuna.db"
    change(others, "CREATE TABLE studies (name TEXT)")
    with pytest.raises(UserError, match=r"optuna.db is no store"):
        opened(others)
    assert sqlite3.connect(others).execute("PRAGMA journal_mode").fetchone() == ("delete",)
    later = tmp_path / "later.sqlite"
    keep(SqliteStore, later, 1)
    change(later, "PRAGMA user_version = 2")
    with pytest.raises(UserError, match="has schema 2"):
        opened(later)


def test_one_that_was_cut_short(path: Path) -> None:
    keep(SqliteStore, path, *range(30))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="restore it from a copy"):
        read_store(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_one_that_may_not_be_written(path: Path) -> None:
    keep(SqliteStore, path, 1)
    path.chmod(0o444)
    with pytest.raises(UserError, match="may write to"):
        open_store(path).add(result(minute=2), path.parent)


def test_another_ones_columns_are_not_believed(path: Path) -> None:
    keep(SqliteStore, path, 1, 2)
    change(path, "UPDATE measurement SET result = replace(result, '\"num_sm\":4', '\"num_sm\":5') WHERE id = 2")
    with SqliteStore(path) as store:
        assert latest(store) == 1


def test_a_copy_of_a_store_that_was_being_written(path: Path, tmp_path: Path) -> None:
    there = tmp_path / "laptop"
    there.mkdir()
    with SqliteStore(path) as store:
        store.add(result(minute=1), path.parent)
        for name in (path.name, f"{path.name}-wal"):
            shutil.copy(path.with_name(name), there)
    assert minutes(read_store(there / path.name).measurements) == [1]


def test_what_lies_in_files_beside_it_is_taken_over(path: Path) -> None:
    with FileStore(path) as files:
        files.add(result(minute=1), path.parent)
        with SqliteStore(path) as store:
            assert minutes(store.measurements()) == [1]
        # Its writer still lives.
        files.add(result(minute=2), path.parent)
        (file,) = path.with_name(f"{path.name}.d").iterdir()
        whole = file.read_bytes()
        file.write_bytes(whole + b'{"result": {"na')
        with SqliteStore(path) as store:
            assert minutes(store.measurements()) == [1, 2]
            assert store.problems == []
        file.write_bytes(whole)
        files.add(result(minute=3), path.parent)
    with SqliteStore(path) as store:
        assert minutes(store.measurements()) == [1, 2, 3]
        assert store.find(result().point, ENVIRONMENT) == store.measurements()[-1]
    file.write_bytes(file.read_bytes() + b"{}\n")
    with SqliteStore(path) as store:
        assert minutes(store.measurements()) == [1, 2, 3]
        assert [str(file) in problem for problem in store.problems] == [True]
    assert minutes(read_store(path).measurements) == [1, 2, 3]
