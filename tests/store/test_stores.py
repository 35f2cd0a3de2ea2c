"""What every kind of store does."""

from __future__ import annotations

import os
import signal
import sqlite3
from pathlib import Path

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.store import read_store
from tests.analyze import files_below
from tests.store.measured import ENVIRONMENT, KINDS, added, environment, keep, latest, minutes, result, start_writer


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
        found = store.find(given.point, ENVIRONMENT)
    assert found
    assert (found.result, found.directory, found.host) == (given, str(tmp_path / "run"), "node7")
    assert found.added > "2026"
    with KINDS[kind](path) as store:
        assert store.find(given.point, ENVIRONMENT) == found
        assert store.measurements() == [found]
        assert (store.problems, store.notice) == ([], None)


def test_only_the_same_point_on_an_equal_machine_is_found(kind: str, path: Path) -> None:
    with KINDS[kind](path) as store:
        store.add(result(num_sm=8), path.parent)
        point = result(num_sm=8).point
        assert store.find(result(num_sm=4).point, ENVIRONMENT) is None
        assert store.find(point, environment(driver="580.2")) is None
        # What does not change what is measured.
        assert store.find(point, environment(host="node8")) is not None
        assert store.find({**point, "runtime": {**point["runtime"], "timeout_s": 5.0}}, ENVIRONMENT) is not None


def test_the_latest_that_may_stand_for_a_new_one_is_found(kind: str, path: Path) -> None:
    with KINDS[kind](path) as store:
        for minute, time_us in ((2, 102.0), (5, 105.0), (1, 101.0)):
            store.add(result(time_us=time_us, minute=minute), path.parent)
        store.add(result(minute=7, launch_bound=True), path.parent)
        store.add(result(minute=8, status="failed", measured=None, objective_us=None), path.parent)
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


def test_several_processes_add_at_once_and_one_that_is_killed_loses_nothing_that_it_added(
    kind: str, path: Path
) -> None:
    victim, *others = (
        start_writer(kind, path, first, count) for first, count in ((1, 10**6), (2 * 10**6, 60), (3 * 10**6, 60))
    )
    assert victim.stdout
    for _ in range(20):
        victim.stdout.readline()
    os.kill(victim.pid, signal.SIGKILL)
    rest = added(victim)
    last = rest[-1] if rest else 20
    said = [number for other in others for number in added(other)]
    assert ([other.returncode for other in others], len(said)) == ([0, 0], 120)
    with KINDS[kind](path) as store:
        found = {measurement.result.point["num_sm"] for measurement in store.measurements()}
        # The one that was being added may be there or not.
        assert {*range(1, last + 1), *said} <= found <= {*range(1, last + 2), *said}
        assert all(store.find(result(num_sm=number).point, ENVIRONMENT) for number in said)
        store.add(result(num_sm=7, minute=9), path.parent)
        assert len(store.measurements()) == len(found) + 1
        assert store.problems == []


def test_a_directory_that_is_not_there(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="directory"):
        KINDS[kind](tmp_path / "nowhere" / "m.sqlite")


def test_it_is_read_while_a_writer_has_it_open_and_reading_leaves_nothing_behind(kind: str, path: Path) -> None:
    with KINDS[kind](path) as store:
        for minute in (1, 2):
            store.add(result(minute=minute), path.parent)
            assert minutes(read_store(path).measurements) == list(range(1, minute + 1))
    before = files_below(path.parent)
    assert minutes(read_store(path).measurements) == [1, 2]
    with pytest.raises(UserError, match="does not exist"):
        read_store(path.with_name("other.sqlite"))
    assert files_below(path.parent) == before


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", '{"schema": 1, "na', "cannot be read"),
        ("", "{}", "cannot be read"),
        ("", '{"a":' * 100_000, "cannot be read"),
        ('"runtime":{', '"run":{', "missing required field `runtime`"),
        ('"fwd":{', '"forward":{', "no fwd times"),
        ('"tp_size":2', '"tp_size":"two"', "`$.point.tp_size`"),
        ('"packages":{', '"packages":[1],"others":{', "`$.environment.packages`"),
        ('"schema":2', '"schema":9', "has schema 9"),
    ],
    ids=["cut short", "empty", "deep", "no point", "no times", "no size", "no packages", "later version"],
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


def test_what_a_former_version_added_is_read(kind: str, path: Path) -> None:
    keep(KINDS[kind], path, 1)
    spoil(kind, path, 0, '"measured":{"workload":"operator",', '"training":null,')
    spoil(kind, path, 0, '}},"warnings"', '},"warnings"')
    spoil(kind, path, 0, '"schema":2', '"schema":1')
    (found,) = read_store(path).measurements
    assert found.result == result(minute=1)
