"""What every kind of store does."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.store import Store, read_store
from overlap_sweep.store.files import FileStore
from overlap_sweep.store.sqlite import SqliteStore
from tests.analyze import files_below
from tests.store.measured import ENVIRONMENT, added, environment, keep, latest, minutes, result, start_writer

KINDS: dict[str, Callable[[Path], Store]] = {"sqlite": SqliteStore, "files": FileStore}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def spoil(kind: str, path: Path, number: int, old: str, new: str) -> None:
    """Replaces text in one of the measurements that are kept, counted from 0; nothing as `old` stands for all of it."""
    if kind == "files":
        (file,) = path.with_name(f"{path.name}.d").iterdir()
        lines = file.read_text().splitlines(keepends=True)
        lines[number] = lines[number].replace(old or lines[number].strip(), new)
        file.write_text("".join(lines))
    else:
        connection = sqlite3.connect(path)
        changed = "replace(result, ?, ?)" if old else "coalesce(nullif(?, ''), ?)"
        connection.execute(f"UPDATE measurement SET result = {changed} WHERE id = ?", (old, new, number + 1))
        connection.commit()
        connection.close()


def test_what_is_added_is_found_again(kind: str, path: Path, tmp_path: Path) -> None:
    given = result(num_sm=8, time_us=80.0, relative_error={"output": 1e-7, "input gradient": None})
    with KINDS[kind](path) as store:
        assert store.find(given.point, ENVIRONMENT) is None
        store.add(given, tmp_path / "run")
        assert store.find(given.point, ENVIRONMENT) is not None
    with KINDS[kind](path) as store:
        found = store.find(given.point, ENVIRONMENT)
        assert found is not None
        assert found.result == given
        assert (found.directory, found.host) == (str(tmp_path / "run"), "node7")
        assert found.added > "2026"
        assert store.measurements() == [found]
        assert (store.problems, store.notice) == ([], None)


def test_only_the_same_point_on_an_equal_machine_is_found(kind: str, path: Path) -> None:
    with KINDS[kind](path) as store:
        store.add(result(num_sm=8), path.parent)
        point = result(num_sm=8).point
        assert store.find(result(num_sm=4).point, ENVIRONMENT) is None
        for changes in ({"driver": "580.2"}, {"links": ["SYS"]}, {"gpus": ["NVIDIA H100"]}):
            assert store.find(point, environment(**changes)) is None
        assert store.find(point, environment(packages={"torch": "2.13.0"})) is None
        # What does not change what is measured.
        assert store.find(point, environment(host="node8")) is not None
        assert store.find({**point, "runtime": {**point["runtime"], "timeout_s": 5.0}}, ENVIRONMENT) is not None


def test_the_latest_that_may_stand_for_a_new_one_is_found(kind: str, path: Path) -> None:
    with KINDS[kind](path) as store:
        for minute, time_us in ((2, 102.0), (5, 105.0), (1, 101.0)):
            store.add(result(time_us=time_us, minute=minute), path.parent)
        store.add(result(minute=7, launch_bound=True), path.parent)
        store.add(result(minute=8, status="failed", times={}, objective_us=None), path.parent)
        found = store.find(result().point, ENVIRONMENT)
        assert found is not None
        assert found.result.objective_us == 105.0
        assert minutes(store.measurements()) == [1, 2, 5, 7, 8]


def test_a_measurement_that_is_added_twice_is_kept_once(kind: str, path: Path, tmp_path: Path) -> None:
    with KINDS[kind](path) as store:
        store.add(result(), tmp_path / "here")
        store.add(result(), tmp_path / "moved there")
        # Started in the same second, but another one.
        store.add(result(wall_s=1.25), tmp_path / "here")
    with KINDS[kind](path) as store:
        store.add(result(), tmp_path / "here")
        assert len(store.measurements()) == 2


def test_a_result_that_describes_no_point_is_refused(kind: str, path: Path) -> None:
    given = result()
    given.point = {"tp_size": 2}
    with KINDS[kind](path) as store, pytest.raises(UserError, match="describes no measurement"):
        store.add(given, path.parent)


def test_several_processes_add_at_once(kind: str, path: Path) -> None:
    writers = [start_writer(kind, path, first, 30) for first in (1000, 2000, 3000)]
    said = [number for writer in writers for number in added(writer)]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert len(said) == 90
    with KINDS[kind](path) as store:
        assert sorted(m.result.point["num_sm"] for m in store.measurements()) == sorted(said)
        assert all(store.find(result(num_sm=i).point, ENVIRONMENT) for i in said)
        assert store.problems == []


def test_a_writer_that_is_killed_loses_nothing_that_it_added(kind: str, path: Path) -> None:
    victim, other = start_writer(kind, path, 1, 10**6), start_writer(kind, path, 2 * 10**6, 60)
    assert victim.stdout
    for _ in range(20):
        victim.stdout.readline()
    os.kill(victim.pid, signal.SIGKILL)
    rest = added(victim)
    with KINDS[kind](path) as store:
        # The one that was being added may be there or not.
        last = rest[-1] if rest else 20
        found = {m.result.point["num_sm"] for m in store.measurements() if m.result.point["num_sm"] < 10**6}
        assert set(range(1, last + 1)) <= found <= set(range(1, last + 2))
        store.add(result(num_sm=7, minute=9), path.parent)
        assert len(added(other)) == 60
        assert len(store.measurements()) == len(found) + 61
        assert store.problems == []


def test_a_directory_that_is_not_there(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="directory"):
        KINDS[kind](tmp_path / "nowhere" / "m.sqlite")


def test_reading_leaves_nothing_behind(kind: str, path: Path) -> None:
    keep(KINDS[kind], path, 1, 2)
    before = files_below(path.parent)
    assert minutes(read_store(path).measurements) == [1, 2]
    assert files_below(path.parent) == before
    with pytest.raises(UserError, match="does not exist"):
        read_store(path.with_name("other.sqlite"))
    assert files_below(path.parent) == before


def test_it_can_be_read_while_a_writer_has_it_open(kind: str, path: Path) -> None:
    with KINDS[kind](path) as store:
        store.add(result(minute=1), path.parent)
        assert minutes(read_store(path).measurements) == [1]
        store.add(result(minute=2), path.parent)
        assert minutes(read_store(path).measurements) == [1, 2]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", '{"schema": 1, "na', "cannot be read"),
        ("", "{}", "cannot be read"),
        ("", '{"a":' * 100_000, "cannot be read"),
        ('"runtime":{', '"run":{', "describes no measurement"),
        ('"schema":1', '"schema":9', "has schema 9"),
    ],
    ids=["cut short", "empty", "deep", "no point", "later version"],
)
def test_what_cannot_be_read_is_named_and_the_rest_is_there(
    kind: str, path: Path, old: str, new: str, says: str
) -> None:
    keep(KINDS[kind], path, 1, 2, 3)
    spoil(kind, path, 1, old, new)
    reading = read_store(path)
    assert minutes(reading.measurements) == [1, 3]
    (problem,) = reading.problems
    assert problem.startswith(str(path))
    assert says in problem
    spoil(kind, path, 2, old, new)
    with KINDS[kind](path) as store:
        assert latest(store) == 1
        assert minutes(store.measurements()) == [1]
        assert len(store.problems) == 2
