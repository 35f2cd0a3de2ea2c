"""The user's own command in Slurm's jobs: where they run, what fails of them, and a search over its knobs."""

import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from overlap_sweep.optimizer.answer import Answer
from overlap_sweep.results.records import KnobRecord
from overlap_sweep.workloads.job.result import JobRun
from tests.optimizer.training import optimizing
from tests.slurm.cluster import Slurm
from tests.sweeps import Launch, wait_for

pytestmark = pytest.mark.slurm

SCRIPT = """\
import os, sys, time
print(os.environ["SLURM_JOB_ID"])
print(os.environ.get("INTERPRETER"))
if sys.argv[1] == "none":
    raise ValueError("no such time")
for _ in range(12):
    time.sleep(float(sys.argv[1]) / 1000)
    print(f"ms: {sys.argv[1]}", flush=True)
time.sleep(600)
"""
TYPED = (
    *("-m", "workload=job", "hydra/launcher=slurm", "hydra.launcher.poll_s=0.5", "runtime.device=cpu", "profile=none"),
    *("job.attach=false", "job.metric=ms: ([0-9.]+)", "job.metric_is=milliseconds", "job.skip_steps=2", "job.steps=8"),
    *("runtime.retries=0", f"job.command={shlex.quote(sys.executable)} sleeps.py {{ms}}"),
)


def test_a_command_runs_in_slurms_jobs_and_can_be_searched_there(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(SCRIPT)
    launch = Launch(tmp_path / "sweep", dict(slurm.environment))
    where = (f"job.directory={tmp_path}", f"hydra.launcher.name={launch.tag}")
    # As a Python in a container would be.
    other = f'+hydra.launcher.python="env INTERPRETER=other {sys.executable}"'
    done = launch.run(*TYPED, *where, other, "+job.values.ms=9,none,7", "hydra.launcher.points_per_job=2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 ok, 1 failed; " in done.stdout
    results = {result.recorded["job"]["values"]["ms"]: result for result in launch.results().values()}
    assert results[9].measured_as(JobRun).step.median_us == 9000.0
    assert results[7].measured_as(JobRun).step.median_us == 7000.0
    assert "ValueError: no such time" in str(results["none"].error)
    logs = [(launch.directory / result.name / "worker.log").read_text() for result in results.values()]
    assert len({log.splitlines()[0] for log in logs}) == 2
    assert {log.splitlines()[1] for log in logs} == {"other"}
    # Nothing is left of commands that would have gone on. The job itself may end a little after its last result.
    wait_for(lambda: not launch.processes(), 30)
    search = Launch(tmp_path / "search", dict(slurm.environment))
    done = search.run(*TYPED, *where, "+job.values.ms=9,7", "hydra/sweeper=knobs", "search.repeats=1")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = KnobRecord.read(search.directory / KnobRecord.FILE).searches
    assert found.best == {"+job.values.ms": "7"}


def test_a_command_is_optimized_in_slurms_jobs(slurm: Slurm, tmp_path: Path) -> None:
    through = ("--levers=test.a_ms", "--runs=6", "hydra/launcher=slurm", "hydra.launcher.poll_s=0.5")
    with optimizing(tmp_path, "--format=json", *through, environment=slurm.environment) as process:
        stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    answer = msgspec.json.decode(stdout, type=Answer)
    (gain,) = (one.gain for one in answer.trials if one.settings == {"test.a_ms": 10})
    assert gain
    assert gain > 0.3
    assert "slurm: submitted" in stderr
