"""store= and reuse= of launch.py."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_sweep.identity import point_identity
from overlap_sweep.store import read_store
from tests.faults.injection import TINY, faulty_launch, journal
from tests.sweeps import ROOT, Launch

pytestmark = pytest.mark.end_to_end

SWEEP = ("-m", "num_sm=1,2", *TINY)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep in `sweep`, and `store.sqlite` with what it measured; one point failed."""
    root = tmp_path_factory.mktemp("stored")
    launch = faulty_launch(root, [{"num_sm": 3, "fault": "raises", "rank": None}])
    swept = launch.run("-m", "num_sm=1,2,3", *TINY, "runtime.retries=0", f"store={root}/store.sqlite")
    assert "2 ok, 1 failed" in swept.stdout, swept.stderr
    return root


def again(root: Path, directory: str, *arguments: str) -> tuple[Launch, subprocess.CompletedProcess[str]]:
    environment = {"OVERLAP_SWEEP_FAULTS": str(root / "faults"), "PYTHONPATH": str(ROOT / "tests" / "faults")}
    launch = Launch(root / directory, environment)
    return launch, launch.run(*arguments, f"store={root}/store.sqlite")


def names(root: Path) -> list[str]:
    return [Path(measurement.directory).name for measurement in read_store(root / "store.sqlite").measurements]


def test_a_store_gets_every_measurement_once(stored: Path) -> None:
    assert sorted(names(stored)) == ["tp2_sm1", "tp2_sm2"]
    _, done = again(stored, "sweep", *SWEEP)
    assert "measured before: 2 of 2" in done.stdout
    assert sorted(names(stored)) == ["tp2_sm1", "tp2_sm2"]


def test_what_was_measured_without_it_is_added_when_the_sweep_goes_on(stored: Path, tmp_path: Path) -> None:
    later = f"store={tmp_path}/later.sqlite"
    for _ in range(2):
        done = Launch(stored / "sweep").run(*SWEEP, later)
        assert "measured before: 2 of 2" in done.stdout
        measured = read_store(tmp_path / "later.sqlite").measurements
        assert sorted(Path(one.directory).name for one in measured) == ["tp2_sm1", "tp2_sm2"]


def test_what_it_knows_is_not_measured(stored: Path) -> None:
    before = journal(stored)
    launch, done = again(stored, "reusing", *SWEEP, "reuse=true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("2 ok; analyse with")
    assert journal(stored) == before
    assert not (launch.directory / "workers.log").exists()
    measured = {path.parent.name for path in (stored / "sweep").glob("*/result.json")}
    originals = Launch(stored / "sweep").results()
    for name, result in launch.results().items():
        original = originals[name]
        assert name in measured
        assert result.status == "ok"
        assert (result.times, result.started) == (original.times, original.started)
        assert point_identity(result.point) == point_identity(original.point)
        assert result.point["runtime"]["retries"] == 1
        assert str(result.reused_from).startswith(f"{stored}/store.sqlite: measured {original.started} on ")
        assert str(result.reused_from).endswith(f" in {stored}/sweep/{name}")
        assert result.traces == []
    assert sorted(names(stored)) == ["tp2_sm1", "tp2_sm2"]
    analysed = subprocess.run(
        [sys.executable, "analyze.py", str(launch.directory)], cwd=ROOT, capture_output=True, text=True
    )
    assert analysed.returncode == 0, analysed.stderr
    assert "TP=2" in analysed.stdout
    _, resumed = again(stored, "reusing", *SWEEP, "reuse=true")
    assert "measured before: 2 of 2" in resumed.stdout


def test_only_what_it_does_not_know_is_measured(stored: Path) -> None:
    before = len(journal(stored))
    launch, done = again(stored, "more", "-m", "num_sm=1,4", *TINY, "reuse=true")
    assert done.returncode == 0, done.stderr
    assert {run["num_sm"] for run in journal(stored)[before:]} == {4}
    assert {name: bool(result.reused_from) for name, result in launch.results().items()} == {
        "tp2_sm1": True,
        "tp2_sm4": False,
    }
    assert sorted(names(stored)) == ["tp2_sm1", "tp2_sm2", "tp2_sm4"]


def test_what_failed_is_not_reused(stored: Path) -> None:
    before = len(journal(stored))
    _, done = again(stored, "failing", "-m", "num_sm=3", *TINY, "runtime.retries=0", "reuse=true")
    assert done.returncode == 1
    assert {run["num_sm"] for run in journal(stored)[before:]} == {3}


def test_a_single_point_is_reused_too(stored: Path) -> None:
    launch, done = again(stored, "one", "num_sm=1", *TINY, "reuse=true")
    assert done.returncode == 0, done.stderr
    (result,) = launch.results().values()
    assert result.reused_from


def a_text(path: Path) -> None:
    path.write_text("no database, but long enough to be taken for one at first sight\n" * 100)


def another_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (id INTEGER)")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("mode", [("-m",), ()], ids=["sweep", "point"])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (a_text, "file is not a database"),
        (another_database, "is no store of measurements"),
        (Path.mkdir, "a directory"),
    ],
)
def test_what_is_no_store_is_one_clear_error(tmp_path: Path, make: object, says: str, mode: tuple[str, ...]) -> None:
    make(tmp_path / "store")  # type: ignore[operator]
    assert_refused(tmp_path, says, *mode, f"store={tmp_path}/store")


@pytest.mark.parametrize("mode", [("-m",), ()], ids=["sweep", "point"])
def test_a_store_that_is_nowhere_is_one_clear_error(tmp_path: Path, mode: tuple[str, ...]) -> None:
    assert_refused(tmp_path, "/nowhere", *mode, "store=/nowhere/store.sqlite")


@pytest.mark.parametrize("mode", [("-m",), ()], ids=["sweep", "point"])
def test_reuse_needs_a_store(tmp_path: Path, mode: tuple[str, ...]) -> None:
    assert_refused(tmp_path, "reuse=true needs a store; give store=<file>.", *mode, "reuse=true")


def assert_refused(tmp_path: Path, says: str, *arguments: str) -> None:
    """In one line, before anything is started."""
    launch = faulty_launch(tmp_path)
    done = launch.run(*arguments, "num_sm=1", *TINY)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert journal(tmp_path) == []
    assert launch.results() == {}
