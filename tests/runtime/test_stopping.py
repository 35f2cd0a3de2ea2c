"""Stopped by a signal, now or after the point that is running: no process outlives a sweep."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from overlap_sweep.gpus import visible_gpus
from tests.faults.injection import TINY, faulty_launch, journal
from tests.faults.sitecustomize import HOLD
from tests.sweeps import ROOT, Launch, launch_here, wait_for

pytestmark = pytest.mark.faults

SWEEP = ("-m", "num_sm=1,2,3,4", "runtime.retries=0", "runtime.timeout_factor=0", *TINY)
# Its workers would come to an end a moment after being told to stop.
DAWDLES = {"num_sm": 2, "fault": "dawdles", "times": 1, "rank": None}
REAL = ("sigusr2 to all", "sigterm to all", "launcher killed")


class Running(NamedTuple):
    """A sweep whose second point of four is running."""

    folder: Path
    launch: Launch
    process: subprocess.Popen[str]

    def runs_of(self, num_sm: int) -> int:
        """On how many ranks the point was begun."""
        return sum(run["num_sm"] == num_sm for run in journal(self.folder))

    def finished(self) -> dict[str, int]:
        """By name when the point's result was written."""
        return {path.parent.name: path.stat().st_mtime_ns for path in self.launch.directory.glob("*/result.json")}

    def release(self) -> None:
        (self.folder / "faults" / HOLD / "tp2_sm2").unlink()

    def end(self) -> tuple[str, str]:
        """What the launcher printed. None of its processes is left, and none of their temporary files."""
        stdout, stderr = self.process.communicate(timeout=60)
        wait_for(lambda: not self.launch.processes(), 20)
        wait_for(lambda: not list((self.folder / "tmp").glob("overlap_sweep_*")), 5)
        return stdout, stderr


def send(number: signal.Signals, *pids: int) -> None:
    for pid in sorted(pids, reverse=True):
        os.kill(pid, number)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """Sweeps that are held in their second point, by how they are to be stopped."""
    found: dict[str, Running] = {}
    for name in (*REAL, "sigterm to launcher", "ctrl-c"):
        folder = tmp_path_factory.mktemp("running")
        (folder / "tmp").mkdir()
        launch = faulty_launch(folder, [DAWDLES], light=name not in REAL)
        launch.environment["TMPDIR"] = str(folder / "tmp")
        (folder / "faults" / HOLD / "tp2_sm2").touch()
        found[name] = Running(folder, launch, launch.start(*SWEEP))
    for one in found.values():
        wait_for(lambda one=one: one.runs_of(2) == 2, 120)
    yield found
    for one in found.values():
        one.process.kill()
        one.process.communicate()


def test_a_second_launch_is_refused_and_the_first_not_disturbed(running: dict[str, Running]) -> None:
    one = running["ctrl-c"]
    files = [path for path in one.launch.directory.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    second = launch_here("-m", "num_sm=3", *TINY, f"hydra.sweep.dir={one.launch.directory}")
    assert second.returncode == 1
    (error,) = second.stderr.splitlines()
    assert re.match(rf"error: .*sweep is in use by process {one.process.pid} of \S+ on \S+ since .*: ", error)
    assert "launch.py -m num_sm=1,2,3,4" in error
    assert before == {path: path.read_bytes() for path in files}


def test_sigusr2_stops_after_the_running_point_and_the_printed_command_goes_on(running: dict[str, Running]) -> None:
    """Sent to every process, as cluster managers do."""
    one = running["sigusr2 to all"]
    send(signal.SIGUSR2, *one.launch.processes())
    one.release()
    _, stderr = one.end()
    assert one.process.returncode == 128 + signal.SIGUSR2
    before = one.finished()
    assert sorted(before) == ["tp2_sm1", "tp2_sm2"]
    assert {(result.status, len(result.earlier_attempts)) for result in one.launch.results().values()} == {("ok", 0)}
    heard, told, command = stderr.splitlines()
    assert heard == "SIGUSR2: stops after the running point"
    assert told.startswith("interrupted: 2 ok, 2 missing; ")
    assert command.startswith("resume with: python launch.py -m num_sm=1,2,3,4")

    arguments = [sys.executable, *shlex.split(command.removeprefix("resume with: "))[1:]]
    environment = {**os.environ, **one.launch.environment, "OVERLAP_SWEEP_LIGHT": "1"}
    again = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1].startswith("4 ok; next")
    assert before.items() <= one.finished().items()
    assert (one.runs_of(2), one.runs_of(4)) == (2, 2)


@pytest.mark.parametrize(
    ("name", "number", "status"),
    [
        ("sigterm to launcher", signal.SIGTERM, 128 + signal.SIGTERM),
        ("sigterm to all", signal.SIGTERM, 128 + signal.SIGTERM),
        ("ctrl-c", signal.SIGINT, 130),
    ],
)
def test_a_signal_stops_now_and_keeps_what_is_finished(
    running: dict[str, Running], name: str, number: signal.Signals, status: int
) -> None:
    one = running[name]
    processes = one.launch.processes() if name.endswith("all") else [one.process.pid]
    one.release()
    told_at = time.monotonic()
    send(number, *processes)
    _, stderr = one.end()
    assert time.monotonic() - told_at < 30
    assert one.process.returncode == status
    assert "Traceback" not in stderr
    assert stderr.splitlines()[0].startswith("interrupted: 1 ok, 3 missing; finished results are kept")
    assert sorted(one.finished()) == ["tp2_sm1"]
    assert {result.status for result in one.launch.results().values()} == {"ok"}


def test_a_killed_launcher_leaves_nothing(running: dict[str, Running]) -> None:
    one = running["launcher killed"]
    one.process.kill()
    one.end()
    assert sorted(one.finished()) == ["tp2_sm1"]


def test_a_group_that_cannot_start_fails_the_point_with_the_reason(tmp_path: Path) -> None:
    if visible_gpus():
        pytest.skip("needs a machine without a GPU")
    launch = Launch(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    done = launch.run("tp_size=1", "method=none", "runtime.retries=0")
    (result,) = launch.results().values()
    assert result.status == "failed"
    assert "PyTorch sees no GPU" in str(result.error).splitlines()[0]
    assert "PyTorch sees no GPU" in done.stdout
    assert done.returncode == 1
