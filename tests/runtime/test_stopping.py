"""Told to stop by a signal: now, or after the point that is running."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.injection import TINY, faulty_launch, journal
from tests.sweeps import ROOT, Launch, wait_for

pytestmark = pytest.mark.faults


def runs_of(tmp_path: Path, num_sm: int) -> int:
    """On how many ranks the point was begun."""
    return sum(run["num_sm"] == num_sm for run in journal(tmp_path))


def finished(launch: Launch) -> dict[str, int]:
    """By name when the point's result was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in launch.directory.glob("*/result.json")}


def as_printed(command: str, launch: Launch) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, *shlex.split(command)[1:]]
    environment = {**os.environ, **launch.environment}
    return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("to_all", [False, True], ids=["to the launcher", "to every process"])
def test_sigusr2_stops_after_the_running_point(tmp_path: Path, to_all: bool) -> None:
    launch = faulty_launch(tmp_path, [{"num_sm": 2, "fault": "dawdles", "times": 1}])
    process = launch.start("-m", "num_sm=1,2,3,4", *TINY)
    wait_for(lambda: runs_of(tmp_path, 2) == 2)
    for pid in sorted(launch.processes(), reverse=True) if to_all else [process.pid]:
        os.kill(pid, signal.SIGUSR2)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR2
    assert sorted(finished(launch)) == ["tp2_sm1", "tp2_sm2"]
    assert {result.status for result in launch.results().values()} == {"ok"}
    assert not any(result.earlier_attempts for result in launch.results().values())
    told, command = stderr.splitlines()
    assert told == "interrupted: 2 ok, 2 missing; finished results are kept"
    assert command.startswith("go on with: python launch.py -m num_sm=1,2,3,4")
    assert launch.processes() == {}
    if not to_all:
        return
    before = finished(launch)
    again = as_printed(command.removeprefix("go on with: "), launch)
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1].startswith("4 ok; analyse with")
    assert before.items() <= finished(launch).items()
    assert (runs_of(tmp_path, 2), runs_of(tmp_path, 4)) == (2, 2)


@pytest.mark.parametrize("to_all", [False, True], ids=["to the launcher", "to every process"])
def test_sigterm_stops_now(tmp_path: Path, to_all: bool) -> None:
    launch = faulty_launch(tmp_path, [{"num_sm": 2, "fault": "hangs", "times": 1}])
    process = launch.start("-m", "num_sm=1,2,3", *TINY)
    wait_for(lambda: runs_of(tmp_path, 2) == 2)
    told_at = time.monotonic()
    for pid in sorted(launch.processes(), reverse=True) if to_all else [process.pid]:
        os.kill(pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - told_at < 10
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in stderr
    assert stderr.splitlines()[0] == "interrupted: 1 ok, 2 missing; finished results are kept"
    assert sorted(finished(launch)) == ["tp2_sm1"]
    wait_for(lambda: not launch.processes(), 5)


def test_a_point_that_is_running_leaves_no_result_when_stopped(tmp_path: Path) -> None:
    """Its workers would come to an end a moment later."""
    launch = faulty_launch(tmp_path, [{"num_sm": 1, "fault": "dawdles", "rank": None}])
    process = launch.start("-m", "num_sm=1", *TINY)
    wait_for(lambda: runs_of(tmp_path, 1) == 2)
    process.terminate()
    process.communicate(timeout=60)
    assert launch.processes() == {}
    assert finished(launch) == {}
