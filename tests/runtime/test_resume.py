"""Going on with a sweep: only what is missing or failed is measured."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import LOCK_FILE, last_sweep
from tests.analyze import analyze
from tests.faults.injection import TINY, faulty_launch, journal, set_plan
from tests.faults.sitecustomize import JOURNAL
from tests.sweeps import Launch, launch_here

pytestmark = pytest.mark.faults

NUMBERS = "num_sm=1,2,3,4,5"


class Begun(NamedTuple):
    """A sweep that can be gone on with again and again."""

    root: Path
    launch: Launch
    done: subprocess.CompletedProcess[str]

    def measured(self) -> list[int]:
        """The points that workers ran in the last launch."""
        return sorted({run["num_sm"] for run in journal(self.root)})

    def resume(self, *arguments: str, numbers: str = NUMBERS) -> subprocess.CompletedProcess[str]:
        (self.root / "faults" / JOURNAL).unlink()
        return self.launch.run("-m", numbers, *TINY, f"resume={self.launch.directory}", *arguments)

    def contents(self) -> dict[str, bytes]:
        return {path.parent.name: path.read_bytes() for path in self.launch.directory.glob("*/result.json")}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """One of its points failed, and the directory of another cannot be written."""
    root = tmp_path_factory.mktemp("begun")
    launch = faulty_launch(root, [{"num_sm": 2, "fault": "raises", "rank": None}], light=True)
    launch.directory.mkdir()
    in_the_way = launch.directory / "tp2_sm6"
    in_the_way.write_text("a file where a directory should be")
    done = launch.run("-m", "num_sm=1,2,3,4,5,6", *TINY, "runtime.retries=0")
    in_the_way.unlink()
    set_plan(root, [])
    return Begun(root, launch, done)


def test_a_point_that_fails_and_a_directory_that_cannot_be_written_cost_their_point_only(begun: Begun) -> None:
    """The first of several here that go on with the same sweep."""
    done = begun.done
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "1 missing: " in done.stderr
    assert "File exists" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("4 ok, 1 failed, 1 missing; resume with: python launch.py ")
    statuses = {name: result.status for name, result in begun.launch.results().items()}
    assert statuses == {**{f"tp2_sm{number}": "ok" for number in (1, 3, 4, 5)}, "tp2_sm2": "failed"}


def test_only_what_failed_is_measured(begun: Begun) -> None:
    before = begun.contents()
    done = begun.resume("runtime.timeout_s=200", "runtime.retries=3", "runtime.timeout_factor=7")
    assert done.returncode == 0
    assert "already measured: 4 of 5 points" in done.stdout
    assert "[1/1] ok      tp2_sm2" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("5 ok; next")
    assert begun.measured() == [2]
    after = begun.contents()
    assert {name for name in after if after[name] != before.get(name)} == {"tp2_sm2"}


def test_what_power_loss_left_is_measured_again_and_points_are_added(begun: Begun) -> None:
    directory, before = begun.launch.directory, begun.contents()
    cut, empty, lost, gone = (directory / f"tp2_sm{number}" for number in (1, 2, 3, 4))
    (cut / "result.json").write_bytes(before["tp2_sm1"][:-500])
    (cut / ".result.json.7.tmp").write_bytes(before["tp2_sm1"][:500])
    (empty / "result.json").write_bytes(b"")
    (lost / "result.json").unlink()
    (lost / ".hydra" / "config.yaml").write_bytes(b"")
    (lost / ".tp_comm_overlap_cfg.yaml.7.tmp").write_bytes(b"")
    shutil.rmtree(gone)
    gone.mkdir()
    analysed = analyze(directory)
    assert analysed.returncode == 0
    errors = analysed.stderr.splitlines()
    assert len(errors) == 3
    assert all(line.startswith("warning: ") for line in errors)
    done = begun.resume(numbers="num_sm=1,2,3,4,5,6")
    assert done.returncode == 0, done.stderr
    assert "already measured: 1 of 6 points" in done.stdout
    assert begun.measured() == [1, 2, 3, 4, 6]
    after = begun.contents()
    assert {name for name in after if after[name] == before.get(name)} == {"tp2_sm5"}
    assert {result.status for result in begun.launch.results().values()} == {"ok"}
    assert not list(directory.rglob("*.tmp"))


def test_a_sweep_that_was_moved_goes_on_where_it_is_and_the_last_is_found(begun: Begun, tmp_path: Path) -> None:
    moved = tmp_path / "multirun" / "2026-01-02" / "10-00-00"
    shutil.copytree(begun.launch.directory, moved, copy_function=shutil.copy2)
    done = launch_here("-m", NUMBERS, *TINY, "resume=last", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "already measured: 5 of 5 points" in done.stdout
    assert done.stdout.splitlines()[-1] == f"5 ok; next: open {moved.relative_to(tmp_path)}/report.html"
    assert list(tmp_path.glob("multirun/*/*")) == [moved]
    assert (moved / "report.html").is_file()
    assert begun.contents() == {path.parent.name: path.read_bytes() for path in moved.glob("*/result.json")}


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
        (("-m", "resume=multirun/old", "hydra.sweep.dir=multirun/new"), "hydra.sweep.dir=multirun/new: give only one."),
        (("-m", "hydra.sweep.subdir=../x"), "hydra.sweep.subdir=../x leaves "),
        (("-m", "resume=multirun/old", "hydra.sweep.subdir=out"), "hydra.sweep.subdir=out leaves "),
    ],
)
def test_a_wrong_place_is_one_clear_error(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "multirun" / "old").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "multirun" / "old" / "out").symlink_to(tmp_path / "outside")
    done = launch_here(*arguments, "tp_size=1", "method=none", *TINY[:-1], cwd=tmp_path)
    assert done.returncode == (2 if "only one" in says else 1)
    (error,) = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert not list(tmp_path.rglob("result.json"))
    assert not list((tmp_path / "outside").iterdir())
    assert not (tmp_path / "x").exists()
