"""A launcher that goes while its Slurm jobs wait or run, and the one that comes after it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.sweep import SlurmSweep, ok, points

# While these jobs wait or run, Slurm comes to their limits.
pytestmark = pytest.mark.usefixtures("time_limited")

THREE = ("num_sm=1,2,3",)
EVERYTHING = points(1, 2, 3, 4, 5, 6)
# The second waits for the first to end.
TWO_JOBS = ("num_sm=1,2,3,4,5,6", "hydra.launcher.points_per_job=3", "hydra.launcher.array_parallelism=1")


@pytest.fixture(scope="module")
def begun(new_sweep: Callable[..., SlurmSweep]) -> dict[str, SlurmSweep]:
    """Sweeps that are held in their second point."""
    arguments = {"two jobs": TWO_JOBS, "dying": THREE, "interrupted": THREE, "other": THREE, "some": THREE}
    sweeps = {name: new_sweep() for name in arguments}
    for name, sweep in sweeps.items():
        sweep.hold("tp2_sm2")
        sweep.start(*arguments[name])
    for sweep in sweeps.values():
        sweep.wait_until_begun("tp2_sm2")
    return sweeps


def test_after_a_killed_launcher_the_next_adopts_its_jobs(slurm: Slurm, begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["two jobs"]
    sweep.kill_launcher()
    jobs, resume = sweep.jobs(), f"resume={sweep.launch.directory}"
    assert sorted(jobs.values()) == ["PENDING", "RUNNING"]

    # Another launcher would measure the same points.
    refused = sweep.run("num_sm=1,2,3,4,5,6", resume, torchrun=True)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: Slurm jobs work in {sweep.launch.directory}; ")
    assert all(job in line for job in jobs)

    second = sweep.start(*TWO_JOBS, resume)
    slurm.wait_for(lambda: second.poll() is None and sweep.is_locked(), "the second launcher", 120)
    sweep.release()
    done = sweep.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    # The point that was held may have ended before the launcher looked.
    (kept,) = re.findall(r"measured before: ([12]) of 6 points", done.stdout)
    assert f"{6 - int(kept)} points are left to jobs of an earlier launch: {', '.join(jobs)}" in done.stdout
    assert sweep.statuses() == ok(EVERYTHING)
    assert sweep.measured() == dict.fromkeys(EVERYTHING, 1)
    assert sweep.jobs().keys() == jobs.keys()
    assert sweep.records() == {}


def test_an_adopted_job_that_dies_is_replaced_and_new_points_get_new_jobs(begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["dying"]
    sweep.kill_launcher()
    (job,) = sweep.jobs()
    second = sweep.start("num_sm=1,2,3,4", f"resume={sweep.launch.directory}")
    sweep.wait_until_begun("tp2_sm4")

    # Meanwhile nobody else may work in the directory.
    third = sweep.launch.run("-m", "num_sm=1,2")
    assert third.returncode == 1
    assert f"{sweep.launch.directory} is in use by process {second.pid} " in third.stderr

    sweep.kill(job)
    sweep.release()
    done = sweep.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(points(1, 2, 3, 4))
    assert sweep.measured() == {"tp2_sm1": 1, "tp2_sm2": 2, "tp2_sm3": 1, "tp2_sm4": 1}


def test_ctrl_c_leaves_the_jobs_and_after_they_are_cancelled_any_launcher_may_go_on(
    slurm: Slurm, begun: dict[str, SlurmSweep]
) -> None:
    sweep = begun["interrupted"]
    sweep.signal_launcher(signal.SIGINT)
    done = sweep.finish()
    assert done.returncode == 130
    jobs = sweep.jobs()
    assert list(jobs.values()) == ["RUNNING"]
    assert f"end them with: scancel {' '.join(jobs)}" in done.stdout
    assert "Traceback" not in done.stderr
    assert "go on with: python launch.py" in done.stderr

    slurm.cancel(*jobs)
    sweep.wait_for_empty_queue()
    sweep.release()
    done = sweep.run(*THREE, f"resume={sweep.launch.directory}", torchrun=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured before: 1 of 3 points" in done.stdout
    assert sweep.statuses() == ok(points(1, 2, 3))


def test_a_job_of_another_configuration_is_not_taken_for_this_one(slurm: Slurm, begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["other"]
    sweep.kill_launcher()
    (job,) = sweep.jobs()
    other = (*THREE, "workload.repeats=5", f"resume={sweep.launch.directory}")
    refused = sweep.run(*other)
    assert refused.returncode == 1
    assert f"error: Slurm job {job} measures tp2_sm1 with another configuration; " in refused.stderr
    assert sweep.jobs().keys() == {job}
    slurm.cancel(job)
    sweep.wait_for_empty_queue()
    sweep.release()
    again = sweep.run(*other)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {result.point["workload"]["repeats"] for result in sweep.results().values()} == {5}


def test_who_asks_for_some_of_a_jobs_points_leaves_it_the_others(begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["some"]
    sweep.kill_launcher()
    sweep.hold("tp2_sm3")
    jobs, resume = sweep.jobs().keys(), f"resume={sweep.launch.directory}"
    sweep.start("num_sm=2", resume)
    sweep.release("tp2_sm2")
    assert sweep.finish().returncode == 0
    assert sweep.records().keys() == jobs, "it is at work still"
    sweep.start(*THREE, resume)
    sweep.wait_until_begun("tp2_sm3")
    sweep.release()
    assert sweep.finish().returncode == 0
    assert sweep.jobs().keys() == jobs
    assert sweep.measured() == dict.fromkeys(points(1, 2, 3), 1)
