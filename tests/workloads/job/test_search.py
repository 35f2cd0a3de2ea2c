"""hydra/sweeper=knobs over a command's placeholders and variables: a script that sleeps, without torch."""

import shlex
import sys
from pathlib import Path

import pytest

from overlap_sweep.results.records import KnobRecord
from overlap_sweep.results.run_directory import RESULT_FILE, read_result
from overlap_sweep.workloads.job.result import JobRun
from tests.sweeps import Launch, launch_here

pytestmark = pytest.mark.end_to_end

SCRIPT = """\
import os, sys, time
step_ms = float(sys.argv[1]) + (4 if os.environ.get("LATE") == "1" else 0)
for number in range(12):
    time.sleep(step_ms / 1000)
    print(f"step: {step_ms * (1 + 0.01 * (number % 3))} ms", flush=True)
"""
"""It says what it slept, not what it took: on a busy machine a single step can take as long as all others."""
TYPED = (
    *("-m", "workload=job", "hydra/sweeper=knobs", "runtime.device=cpu", "profile=none", "search.repeats=2"),
    *("job.attach=false", "job.metric=step: ([0-9.]+) ms", "job.metric_is=milliseconds"),
    *("job.skip_steps=2", "job.steps=8", "+job.values.ms=20,12", "+job.env.LATE=1,0,null"),
)


def test_minutes_end_what_runs_and_leave_the_best_so_far(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SCRIPT)
    launch = Launch(tmp_path / "sweep")
    command = f"job.command={shlex.quote(sys.executable)} -I -S sleeps.py {{ms}}"
    swept = ("+job.values.ms=2,60000,1,3", "+job.env.LATE=null", "search.max_minutes=0.08")
    done = launch.run(*TYPED[:-2], *swept, command, f"job.directory={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert launch.processes() == {}
    found = KnobRecord.read(launch.directory / KnobRecord.FILE)
    (search,) = found.searches
    assert 4.8 < found.elapsed_s < 50
    assert (search.best, search.stopped) == ({}, "search.max_minutes=0.08 is used up")
    # What came after it in the launch was not started.
    assert {one.recorded["job"]["values"]["ms"]: one.status for one in launch.results().values()} == {
        2: "ok",
        60000: "timeout",
    }
    (ended,) = (one for one in launch.results().values() if one.status == "timeout")
    assert ended.reason.startswith("search.max_minutes ended it after ")
    assert ended.earlier_attempts == []


def test_a_search_finds_and_proves_the_fastest_setting_and_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SCRIPT)
    command = f"job.command={shlex.quote(sys.executable)} sleeps.py {{ms}}"
    launch = Launch(tmp_path / "sweep")
    typed = (*TYPED, command, f"job.directory={tmp_path}")
    done = launch.run(*typed)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = KnobRecord.read(launch.directory / KnobRecord.FILE).searches
    assert found.best == {"+job.values.ms": "12", "+job.env.LATE": "0"}
    assert found.proven
    assert found.gain
    assert found.gain.share == pytest.approx(0.5, abs=0.1)
    # Its proof is measured in turns, whatever the settings are.
    written = sorted(launch.directory.glob(f"*/{RESULT_FILE}"), key=lambda path: path.stat().st_mtime_ns)
    points = [read_result(path) for path in written]
    settings = [(point.recorded["job"]["values"]["ms"], point.recorded["job"]["env"]["LATE"]) for point in points]
    turns = [setting for setting in settings if setting in ((20, 1), (12, 0))][-4:]
    assert turns[0] != turns[1]
    assert turns[2] != turns[3]
    (line,) = (line for line in done.stdout.splitlines() if line.strip().startswith("python launch.py"))
    best = launch_here(*shlex.split(line)[2:], f"hydra.run.dir={tmp_path / 'best'}")
    assert best.returncode == 0, best.stderr
    again = launch.run(*typed)
    assert KnobRecord.read(launch.directory / KnobRecord.FILE).reused == found.points, again.stdout
    assert launch.results().keys() == {point.name for point in points}
    assert all(isinstance(point.measured, JobRun) for point in points)
