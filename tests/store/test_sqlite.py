from __future__ import annotations

import os
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.store import Measurement, open_store, read_store
from overlap_sweep.store import sqlite as sqlite_module
from overlap_sweep.store.files import FileStore
from overlap_sweep.store.sqlite import SqliteStore
from tests.analyze import files_below
from tests.store.measured import ENVIRONMENT, result


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "measurements.sqlite"


def keep(path: Path, *minutes: int) -> None:
    with SqliteStore(path) as store:
        for minute in minutes:
            store.add(result(minute=minute), path.parent)


def change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def minutes(measurements: list[Measurement]) -> list[int]:
    return [int(measurement.measured[14:16]) for measurement in measurements]


def test_it_is_a_write_ahead_log_that_is_flushed(path: Path) -> None:
    keep(path, 1)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()


def test_a_reader_does_not_wait_for_a_writer(path: Path) -> None:
    keep(path, 1)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    started = time.monotonic()
    with SqliteStore(path) as store:
        assert store.find(result().point, ENVIRONMENT) is not None
    assert minutes(read_store(path).measurements) == [1]
    assert time.monotonic() - started < 5
    writer.close()


def test_a_lock_that_is_never_given_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(path, 1)
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(sqlite_module, "BUSY_S", 0.05)
    with SqliteStore(path) as store, pytest.raises(UserError, match="another program has locked it"):
        store.add(result(minute=2), path.parent)
    writer.close()


@pytest.mark.parametrize("opened", [open_store, read_store])
def test_what_is_no_store(path: Path, opened: object, tmp_path: Path) -> None:
    assert callable(opened)
    path.write_text("measurements = 1\n" * 100)
    with pytest.raises(UserError, match=r"measurements.sqlite cannot be used as a store \(file is not a database\)"):
        opened(path)
    with pytest.raises(UserError, match="is a directory; give the store's file"):
        opened(tmp_path)
    others = tmp_path / "optuna.db"
    change(others, "CREATE TABLE studies (name TEXT)")
    with pytest.raises(UserError, match=r"optuna.db is no store of measurements"):
        opened(others)
    assert sqlite3.connect(others).execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.parametrize("opened", [open_store, read_store])
def test_one_of_a_later_version(path: Path, opened: object) -> None:
    assert callable(opened)
    keep(path, 1)
    change(path, "PRAGMA user_version = 2")
    with pytest.raises(UserError, match="has schema 2, this version reads up to 1; update overlap_sweep"):
        opened(path)


def test_one_that_was_cut_short(path: Path) -> None:
    keep(path, *range(30))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"cannot be used as a store .*restore it from a copy"):
        read_store(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_one_that_may_not_be_written(path: Path) -> None:
    keep(path, 1)
    path.chmod(0o444)
    with pytest.raises(UserError, match="may write to"):
        open_store(path).add(result(minute=2), path.parent)


def test_rows_that_cannot_be_read_are_named_and_the_rest_is_there(path: Path) -> None:
    keep(path, *range(6))
    deep = '{"a":' * 100_000
    change(
        path,
        'UPDATE measurement SET result = \'{"schema": 1, "na\' WHERE id = 2',
        "UPDATE measurement SET result = '{}' WHERE id = 3",
        """UPDATE measurement SET result = replace(result, '"runtime":{', '"run":{') WHERE id = 4""",
        f"UPDATE measurement SET result = '{deep}' WHERE id = 5",
    )
    reading = read_store(path)
    assert minutes(reading.measurements) == [0, 5]
    assert len(reading.problems) == 4
    assert all(f"{path}, row {number} " in problem for number, problem in enumerate(reading.problems, 2))
    with SqliteStore(path) as store:
        found = store.find(result().point, ENVIRONMENT)
        assert found is not None
        assert minutes([found]) == [5]


def test_another_ones_columns_are_not_believed(path: Path) -> None:
    keep(path, 1, 2)
    change(path, "UPDATE measurement SET result = replace(result, '\"num_sm\":4', '\"num_sm\":5') WHERE id = 2")
    with SqliteStore(path) as store:
        found = store.find(result().point, ENVIRONMENT)
        assert found is not None
        assert minutes([found]) == [1]


def test_an_empty_file_becomes_a_store(path: Path) -> None:
    path.touch()
    keep(path, 3)
    assert minutes(read_store(path).measurements) == [3]


def test_reading_leaves_nothing_behind(path: Path) -> None:
    keep(path, 1, 2)
    before = files_below(path.parent)
    assert minutes(read_store(path).measurements) == [1, 2]
    assert files_below(path.parent) == before
    with pytest.raises(UserError, match="does not exist"):
        read_store(path.with_name("other.sqlite"))
    assert files_below(path.parent) == before


def test_reading_while_a_writer_has_it_open(path: Path) -> None:
    with SqliteStore(path) as store:
        store.add(result(minute=1), path.parent)
        assert minutes(read_store(path).measurements) == [1]
        store.add(result(minute=2), path.parent)
        assert minutes(read_store(path).measurements) == [1, 2]


def test_a_copy_of_a_store_that_was_being_written(path: Path, tmp_path: Path) -> None:
    there = tmp_path / "laptop"
    there.mkdir()
    with SqliteStore(path) as store:
        store.add(result(minute=1), path.parent)
        for name in ("measurements.sqlite", "measurements.sqlite-wal"):
            shutil.copy(path.with_name(name), there)
    assert minutes(read_store(there / "measurements.sqlite").measurements) == [1]


def test_what_lies_in_files_beside_it_is_taken_over(path: Path) -> None:
    with FileStore(path) as files:
        files.add(result(minute=1), path.parent)
        with SqliteStore(path) as store:
            assert minutes(store.measurements()) == [1]
        # Its writer still lives.
        files.add(result(minute=2), path.parent)
        (file,) = path.with_name("measurements.sqlite.d").iterdir()
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
    assert file.exists()
    assert minutes(read_store(path).measurements) == [1, 2, 3]
