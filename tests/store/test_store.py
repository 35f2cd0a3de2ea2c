"""Adding to a store, finding in it, and reading what others wrote."""

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.store import Store, read_store
from tests.analyze import files_below
from tests.store.measured import ENVIRONMENT, added, environment, keep, latest, minutes, result, start_writer


def files(path: Path) -> list[Path]:
    """Those of the writers, sorted by name."""
    return sorted(path.with_name(f"{path.name}.d").iterdir())


def all_minutes(path: Path) -> list[int]:
    return minutes(read_store(path).measurements)


def spoil(path: Path, number: int, old: str, new: str) -> None:
    """Replaces text in one of the measurements that are kept, counted from 0; nothing as `old` stands for all of it."""
    (file,) = files(path)
    lines = file.read_text().splitlines(keepends=True)
    lines[number] = lines[number].replace(old or lines[number].strip(), new)
    file.write_text("".join(lines))


def test_what_is_added_is_found_again(path: Path, tmp_path: Path) -> None:
    given = result(num_sm=8, time_us=80.0, relative_error={"output": 1e-7, "input gradient": None})
    with Store(path) as store:
        assert store.find(given.point, ENVIRONMENT) is None
        store.add(given, tmp_path / "run")
        found = store.find(given.point, ENVIRONMENT)
    assert found
    assert (found.result, found.directory, found.host) == (given, str(tmp_path / "run"), "node7")
    assert found.added > "2026"
    with Store(path) as store:
        assert store.find(given.point, ENVIRONMENT) == found
        assert read_store(path).measurements == [found]
        assert store.problems == []


def test_only_the_same_point_on_an_equal_machine_is_found(path: Path) -> None:
    with Store(path) as store:
        store.add(result(num_sm=8), path.parent)
        point = result(num_sm=8).point
        assert store.find(result(num_sm=4).point, ENVIRONMENT) is None
        assert store.find(point, environment(driver="580.2")) is None
        # What does not change what is measured.
        assert store.find(point, environment(host="node8")) is not None
        assert store.find(replace(point, runtime=replace(point.runtime, timeout_s=5.0)), ENVIRONMENT) is not None


def test_the_latest_that_may_stand_for_a_new_one_is_found(path: Path) -> None:
    with Store(path) as store:
        for minute, time_us in ((2, 102.0), (5, 105.0), (1, 101.0)):
            store.add(result(time_us=time_us, minute=minute), path.parent)
        store.add(result(minute=7, launch_bound=True), path.parent)
        store.add(result(minute=8, status="failed", measured=None, objective_us=None), path.parent)
        found = store.find(result().point, ENVIRONMENT)
        assert found is not None
        assert found.result.objective_us == 105.0
        assert minutes(read_store(path).measurements) == [1, 2, 5, 7, 8]


def test_a_measurement_that_is_added_twice_is_kept_once(path: Path, tmp_path: Path) -> None:
    with Store(path) as store:
        store.add(result(), tmp_path / "here")
        store.add(result(), tmp_path / "moved there")
        # Started in the same second, but another one.
        store.add(result(wall_s=1.25), tmp_path / "here")
    with Store(path) as store:
        store.add(result(), tmp_path / "here")
        assert len(read_store(path).measurements) == 2


def test_several_processes_add_at_once_and_one_that_is_killed_loses_nothing_that_it_added(path: Path) -> None:
    victim, *others = (
        start_writer(path, first, count) for first, count in ((1, 10**6), (2 * 10**6, 60), (3 * 10**6, 60))
    )
    assert victim.stdout
    for _ in range(20):
        victim.stdout.readline()
    os.kill(victim.pid, signal.SIGKILL)
    rest = added(victim)
    last = rest[-1] if rest else 20
    said = [number for other in others for number in added(other)]
    assert ([other.returncode for other in others], len(said)) == ([0, 0], 120)
    with Store(path) as store:
        found = {measurement.result.recorded["num_sm"] for measurement in read_store(path).measurements}
        # The one that was being added may be there or not.
        assert {*range(1, last + 1), *said} <= found <= {*range(1, last + 2), *said}
        assert all(store.find(result(num_sm=number).point, ENVIRONMENT) for number in said)
        store.add(result(num_sm=7, minute=9), path.parent)
        assert len(read_store(path).measurements) == len(found) + 1
        assert store.problems == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="directory"):
        Store(tmp_path / "nowhere" / "m.sqlite")


def test_it_is_read_while_a_writer_has_it_open_and_reading_leaves_nothing_behind(path: Path) -> None:
    with Store(path) as store:
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
        ('"runtime":{', '"run":{', "no device that it ran on"),
        ('"fwd":{', '"forward":{', "no fwd times"),
        ('"tp_size":2', '"tp_size":"two"', "`$.point.tp_size`"),
        ('"packages":{', '"packages":[1],"others":{', "`$.environment.packages`"),
        ('"schema":2', '"schema":1', "has schema 1"),
        ('"schema":2', '"schema":9', "has schema 9"),
    ],
    ids=[
        "cut short",
        "empty",
        "deep",
        "no point",
        "no times",
        "no size",
        "no packages",
        "earlier version",
        "later version",
    ],
)
def test_what_cannot_be_read_is_named_and_the_rest_is_there(path: Path, old: str, new: str, says: str) -> None:
    keep(path, 1, 2, 3)
    spoil(path, 1, old, new)
    reading = read_store(path)
    assert minutes(reading.measurements) == [1, 3]
    (problem,) = reading.problems
    assert problem.startswith(str(path))
    assert says in problem
    spoil(path, 2, old, new)
    with Store(path) as store:
        assert latest(store) == 1
        assert minutes(read_store(path).measurements) == [1]
        assert len(store.problems) == 2


def test_every_writer_has_a_file_of_its_own_and_a_reader_merges_them(path: Path) -> None:
    with Store(path) as one, Store(path) as other:
        one.add(result(minute=3), path.parent)
        other.add(result(minute=2), path.parent)
        one.add(result(minute=1), path.parent)
        assert latest(other) == 3
        other.add(result(minute=4), path.parent)
        assert latest(one) == 4
    names = [file.name for file in files(path)]
    assert len(names) == 2
    assert all(f"-{os.getpid()}-" in name for name in names)
    assert all_minutes(path) == [1, 2, 3, 4]


def test_a_forked_process_does_not_write_into_its_parents_file(path: Path) -> None:
    with Store(path) as store:
        store.add(result(minute=1), path.parent)
        child = os.fork()
        if not child:
            store.add(result(minute=2), path.parent)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert len(files(path)) == 2
    assert all_minutes(path) == [1, 2]


def test_a_file_that_cannot_be_read_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(path, 1)
    (forbidden,) = path.parent.glob("*.d/*")
    keep(path, 2)
    usual = Path.open

    def refusing(self: Path, *arguments: Any, **named: Any) -> Any:
        if self == forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return usual(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", refusing)
    reading = read_store(path)
    assert minutes(reading.measurements) == [2]
    assert reading.problems == [f"{forbidden} cannot be read (Permission denied); it is left out."]
    with Store(path) as store:
        assert latest(store) == 2
        assert store.problems == reading.problems


def test_a_full_disk_cuts_one_line_short(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(path) as store:
        store.add(result(minute=1), path.parent)
        write = os.write
        with monkeypatch.context() as full:
            full.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:50]))
            with pytest.raises(UserError, match="no space"):
                store.add(result(minute=2), path.parent)
        store.add(result(minute=3), path.parent)
    with Store(path) as store:
        assert (latest(store), store.problems) == (3, [])
    assert all_minutes(path) == [1, 3]
    assert read_store(path).problems == []


def test_the_directory_of_files_is_no_store_to_be_given_and_a_file_no_directory(path: Path) -> None:
    keep(path, 1)
    directory = path.with_name(f"{path.name}.d")
    with pytest.raises(UserError, match=f"such as {path}"):
        read_store(directory)
    directory.rename(path.with_name("moved"))
    directory.write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        Store(path)


@pytest.mark.parametrize("opened", [Store, read_store])
def test_what_is_no_store(path: Path, opened: Callable[[Path], object], tmp_path: Path) -> None:
    path.write_text("measurements = 1\n" * 100)
    with pytest.raises(
        UserError, match=f"If an earlier version wrote it, export it there with `.* history {path} --format csv`"
    ):
        opened(path)
    with pytest.raises(UserError, match="is a directory"):
        opened(tmp_path)
