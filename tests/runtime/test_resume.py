"""Going on with a sweep: only what is missing or failed is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import LOCK_FILE, last_sweep
from tests.faults.injection import TINY, faulty_launch, journal
from tests.faults.sitecustomize import JOURNAL, PLAN
from tests.sweeps import ROOT, Launch

pytestmark = pytest.mark.faults

SWEEP = ("-m", "num_sm=1,2,3,4,5", *TINY)


class Begun(NamedTuple):
    """A sweep one of whose points failed, and that can be gone on with again and again."""

    root: Path
    launch: Launch

    def measured(self) -> list[int]:
        """The points that workers ran since this was asked last."""
        found = sorted({run["num_sm"] for run in journal(self.root)})
        (self.root / "faults" / JOURNAL).unlink(missing_ok=True)
        return found

    def resume(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        launch = Launch(self.launch.directory, {**self.launch.environment, **environment})
        return launch.run(*SWEEP, f"resume={self.launch.directory}", *arguments)

    def contents(self) -> dict[str, bytes]:
        return {path.parent.name: path.read_bytes() for path in self.launch.directory.glob("*/result.json")}


@pytest.fixture(scope="module")
def begun_once(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    root = tmp_path_factory.mktemp("begun")
    launch = faulty_launch(root, [{"num_sm": 2, "fault": "raises", "rank": None}])
    begun = Begun(root, launch)
    done = launch.run(*SWEEP, "runtime.retries=0")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("4 ok, 1 failed; analyse with: python analyze.py ")
    return begun


@pytest.fixture
def begun(begun_once: Begun) -> Iterator[Begun]:
    begun_once.measured()
    yield begun_once
    (begun_once.root / "faults" / PLAN).write_text("[]")


def test_only_what_failed_is_measured(begun: Begun) -> None:
    """The first of several here that go on with the same sweep."""
    before = begun.contents()
    done = begun.resume("runtime.timeout_s=100", "runtime.retries=0")
    assert done.returncode == 1
    assert "measured before: 4 of 5 points" in done.stdout
    assert begun.measured() == [2]
    (begun.root / "faults" / PLAN).write_text("[]")
    done = begun.resume("runtime.timeout_s=200", "runtime.retries=3", "runtime.timeout_factor=7")
    assert done.returncode == 0
    assert "[1/1] ok      tp2_sm2" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("5 ok; analyse with")
    assert begun.measured() == [2]
    after = begun.contents()
    assert {name for name in after if after[name] != before.get(name)} == {"tp2_sm2"}


def test_what_power_loss_left_is_measured_again(begun: Begun) -> None:
    directory, before = begun.launch.directory, begun.contents()
    cut, empty, lost, gone = (directory / f"tp2_sm{number}" for number in (1, 2, 3, 4))
    (cut / "result.json").write_bytes(before["tp2_sm1"][:-500])
    (cut / ".result.json.7.tmp").write_bytes(before["tp2_sm1"][:500])
    (empty / "result.json").write_bytes(b"")
    (lost / "result.json").unlink()
    (lost / ".hydra" / "config.yaml").write_bytes(b"")
    (lost / ".tp_comm_overlap_cfg.yaml.7.tmp").write_bytes(b"")
    for path in sorted(gone.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    analysed = subprocess.run([sys.executable, "analyze.py", str(directory)], cwd=ROOT, capture_output=True, text=True)
    assert analysed.returncode == 1
    errors = analysed.stderr.splitlines()
    assert len(errors) == 3
    assert all(line.startswith("error: ") and "measure the point again" in line for line in errors)
    done = begun.resume()
    assert done.returncode == 0, done.stderr
    assert "measured before: 1 of 5 points" in done.stdout
    assert begun.measured() == [1, 2, 3, 4]
    after = begun.contents()
    assert {name for name in after if after[name] == before[name]} == {"tp2_sm5"}
    assert {result.status for result in begun.launch.results().values()} == {"ok"}
    assert not list(directory.rglob("*.tmp"))


def test_in_another_environment_all_is_measured_again(begun: Begun) -> None:
    before = begun.contents()
    done = begun.resume(NCCL_MAX_CTAS="7")
    assert done.returncode == 0
    assert "measured before" not in done.stdout
    assert begun.measured() == [1, 2, 3, 4, 5]
    assert not before.items() & begun.contents().items()
    # And so that the next test finds what it expects.
    assert begun.resume().returncode == 0


def test_a_sweep_that_was_moved_goes_on_where_it_is(begun: Begun) -> None:
    before = begun.contents()
    moved = Begun(begun.root, Launch(begun.root / "moved", begun.launch.environment))
    begun.measured()
    begun.launch.directory.rename(moved.launch.directory)
    try:
        done = moved.resume()
        assert done.returncode == 0
        assert moved.measured() == []
        assert moved.contents() == before
        assert done.stdout.splitlines()[-1].startswith("5 ok; analyse with")
    finally:
        moved.launch.directory.rename(begun.launch.directory)


def test_more_points_are_added_to_it(begun: Begun) -> None:
    done = begun.resume("num_sm=5,6")
    assert done.returncode == 0
    assert "measured before: 1 of 2 points" in done.stdout
    assert begun.measured() == [6]


def launch_py(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In another working directory, where its multirun/ is."""
    command = [sys.executable, str(ROOT / "launch.py"), *arguments]
    return subprocess.run(command, cwd=directory, env=os.environ.copy(), capture_output=True, text=True, timeout=120)


def test_a_directory_that_cannot_be_written_costs_its_point_only(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "sweep")
    launch.directory.mkdir()
    (launch.directory / "tp2_sm1").write_text("a file where a directory should be")
    done = launch.run("-m", "num_sm=1,2", *TINY)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "1 missing: " in done.stderr
    assert "File exists" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 ok, 1 missing; go on with: python launch.py ")
    assert launch.results()["tp2_sm2"].status == "ok"


def test_the_last_sweep_is_found(tmp_path: Path) -> None:
    sweep = ("-m", "tp_size=1", "method=none", *TINY)
    assert launch_py(tmp_path, *sweep, "num_sm=1").returncode == 0
    (first,) = tmp_path.glob("multirun/*/*")
    done = launch_py(tmp_path, *sweep, "num_sm=1,2", "resume=last")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("multirun/*/*")) == [first]
    assert "measured before: 1 of 2 points" in done.stdout
    assert done.stdout.splitlines()[-1] == f"2 ok; analyse with: python analyze.py {first.relative_to(tmp_path)}"


def test_the_last_is_the_one_worked_on_last(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no sweep below"):
        last_sweep(tmp_path)
    for age, name in enumerate(["2026-01-02/10-00-00", "2026-01-03/10-00-00", "named"]):
        (tmp_path / name).mkdir(parents=True)
        lock = tmp_path / name / LOCK_FILE
        lock.touch()
        os.utime(lock, (10**9 - age, 10**9 - age))
    (tmp_path / "no sweep").mkdir()
    assert last_sweep(tmp_path) == tmp_path / "2026-01-02/10-00-00"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("resume=multirun/old",), "error: resume= goes on with a sweep; add -m."),
        (("-m", "resume=nowhere"), "error: nowhere does not exist; give the directory of an earlier sweep"),
        (("-m", "resume=last"), "error: there is no sweep below multirun; give its directory: resume=<directory>."),
        (
            ("-m", "resume=multirun/old", "hydra.sweep.dir=multirun/new"),
            "error: resume=multirun/old and hydra.sweep.dir=multirun/new: give only one.",
        ),
        (("-m", "resume=file"), "error: file "),
        (("-m", "hydra.sweep.subdir=../x"), "is not inside of "),
        (("-m", "hydra.sweep.subdir=/tmp/x"), "is not inside of "),
        (("-m", "resume=multirun/old", "hydra.sweep.subdir=out"), "is not inside of "),
        (("-m", "resume=multirun/old", "hydra.sweep.subdir=out/further"), "is not inside of "),
    ],
)
def test_a_wrong_place_is_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "multirun" / "old").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "multirun" / "old" / "out").symlink_to(tmp_path / "outside")
    done = launch_py(tmp_path, *arguments, "tp_size=1", "method=none", *TINY[:-1])
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert not list(tmp_path.rglob("result.json"))
    assert not list((tmp_path / "outside").iterdir())
    assert not (tmp_path / "x").exists()
