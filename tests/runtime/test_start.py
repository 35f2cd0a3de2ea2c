"""Launches that begin in the same moment: each has a directory of its own, and none removes what is another's."""

from pathlib import Path

import pytest

from overlap_sweep.results.run_directory import LOCK_FILE, last_sweep
from overlap_sweep.runtime.start import Beginning, make_new
from tests.sweeps import launch_here, start_here, wait_for

SKIPPED = ("workload=layer", "backend=torch", "layer.variants=[none,default]", "runtime.device=cpu")
"""Points that are skipped, which takes a moment."""
REFUSED = ("num_sm=0,1", "runtime.device=cpu")


def contents(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize(
    "count", [2, pytest.param(3, marks=pytest.mark.faults), pytest.param(8, marks=pytest.mark.faults)]
)
def test_launches_at_once_have_a_directory_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """One in two is refused, and leaves nothing."""
    arguments = [("-m", *(REFUSED if number % 2 else (*SKIPPED, "repetition=0,1"))) for number in range(2 * count)]
    launches = [start_here(*each, cwd=tmp_path) for each in arguments]
    done = [launch.wait() for launch in launches]
    assert "Traceback" not in "".join(one.stdout + one.stderr for one in done)
    assert [one.stderr.startswith("error: num_sm=0 is out of range") for one in done] == [False, True] * count
    sweeps = sorted(tmp_path.glob("multirun/*/*"))
    assert len(sweeps) == count
    for sweep in sweeps:
        assert contents(sweep) >= {LOCK_FILE, "multirun.yaml"}
        assert len(list(sweep.glob("*/result.json"))) == 2
    # The points' own records name the directory that they are in, whatever the time's name was.
    for record in tmp_path.glob("multirun/*/*/*/.hydra/hydra.yaml"):
        assert f"output_dir: {record.parents[1]}\n" in record.read_text()
    monkeypatch.chdir(tmp_path)
    assert last_sweep() in {sweep.relative_to(tmp_path) for sweep in sweeps}


def test_single_points_at_once_have_a_directory_each(tmp_path: Path) -> None:
    launches = [start_here(*SKIPPED, cwd=tmp_path) for _ in range(3)]
    done = [launch.wait() for launch in launches]
    assert "Traceback" not in "".join(one.stdout + one.stderr for one in done)
    assert len(list(tmp_path.glob("multirun/*/*/*/result.json"))) == 3
    assert len(list(tmp_path.glob("multirun/*/*"))) == 3


@pytest.mark.parametrize(
    ("kind", "lock"), [(("-m", "repetition=0", "hydra.sweep.dir=same"), ".lock"), (("hydra.run.dir=same",), ".claim")]
)
def test_of_launches_into_the_same_directory_one_goes_on(tmp_path: Path, kind: tuple[str, ...], lock: str) -> None:
    script = tmp_path / "wait.sh"
    script.write_text(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done\n")
    job = ("workload=job", f"job.command=bash {script}", "job.ranks=1", "runtime.device=cpu", "runtime.retries=0")
    launches = [start_here(*kind, *job, cwd=tmp_path) for _ in range(4)]
    wait_for(lambda: sum(launch.has_ended for launch in launches) == 3)
    (winner,) = [launch for launch in launches if not launch.has_ended]
    refused = [launch.wait() for launch in launches if launch is not winner]
    for one in (*refused, launch_here(*kind, *job, cwd=tmp_path)):
        (error,) = one.stderr.splitlines()
        assert error.startswith("error: same is in use by ")
        assert one.returncode == 1
        assert not one.stdout
    wait_for(lambda: list(tmp_path.rglob("worker.log")))
    assert (tmp_path / "same" / lock).read_text().startswith(f"process {winner.pid} of ")
    (tmp_path / "go").touch()
    done = winner.wait()
    assert "0 ok, 1 failed" in done.stdout
    assert lock in contents(tmp_path / "same")


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    day, time = tmp_path / "2026-11-24", tmp_path / "2026-11-24" / "18-05-21"
    assert make_new(time) == [day, time]
    (day / "18-05-21_2").write_text("also a file counts")
    assert make_new(time) == [day / "18-05-21_3"]


def test_only_what_was_made_is_removed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    beginning = Beginning.of(tmp_path / "there" / "new" / "sweep", LOCK_FILE)
    (beginning.directory / "multirun.yaml").touch()
    beginning.restore()
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    earlier = Beginning.of(tmp_path / "there", LOCK_FILE)
    (earlier.directory / "notes.txt").touch()
    earlier.restore()
    assert contents(tmp_path / "there") == {LOCK_FILE, "notes.txt"}
