"""Launchers that go while their Slurm jobs wait or run, those that come after them, and jobs that reach their limit."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from tests.slurm.cluster import Slurm
from tests.slurm.sweep import SlurmSweep, ok, points

pytestmark = pytest.mark.slurm

THREE = ("num_sm=1,2,3",)
# The second waits for the first to end.
TWO_JOBS = ("num_sm=1,2,3,4,5,6", "hydra.launcher.points_per_job=3", "hydra.launcher.array_parallelism=1")
WRONG = {"num_sm": 1, "fault": "wrong_numbers", "rank": None}


@pytest.fixture(scope="module")
def time_limited(new_sweep: Callable[..., SlurmSweep]) -> dict[str, SlurmSweep]:
    """Sweeps whose jobs reach their time limit beside the other tests here: Slurm looks at limits every half minute."""
    long = new_sweep(plan=[{"fault": "dawdles", "rank": 0}, WRONG])
    limits = ("hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=30")
    long.start(f"num_sm={','.join(map(str, range(1, 19)))}", *limits)
    hanging = new_sweep()
    hanging.hold("tp2_sm1")
    hanging.start(*THREE, "runtime.retries=0")
    # The first is told to make room when Slurm looks for the last time half a minute before its end.
    for sweep, seconds in ((long, 50), (hanging, 1)):
        sweep.wait_until_begun("tp2_sm1")
        sweep.end_in(seconds)
    return {"long": long, "hanging": hanging}


@pytest.fixture(scope="module")
def begun(new_sweep: Callable[..., SlurmSweep], time_limited: dict[str, SlurmSweep]) -> dict[str, SlurmSweep]:
    """Sweeps that are held in their second point."""
    arguments = {"two jobs": TWO_JOBS, "dying": THREE, "interrupted": THREE, "some": THREE}
    sweeps = {name: new_sweep() for name in arguments}
    for name, sweep in sweeps.items():
        sweep.hold("tp2_sm2")
        sweep.start(*arguments[name])
    for sweep in sweeps.values():
        sweep.wait_until_begun("tp2_sm2")
    return sweeps


def test_after_a_killed_launcher_the_next_adopts_its_jobs(begun: dict[str, SlurmSweep]) -> None:
    sweep, everything = begun["two jobs"], points(1, 2, 3, 4, 5, 6)
    sweep.kill_launcher()
    jobs, resume = sweep.jobs(), f"resume={sweep.launch.directory}"
    assert sorted(jobs.values()) == ["PENDING", "RUNNING"]

    # Another launcher would measure the same points.
    refused = sweep.run("num_sm=1,2,3,4,5,6", resume, torchrun=True, status=1)
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: Slurm jobs are running in {sweep.launch.directory}; ")
    assert all(job in line for job in jobs)

    second, said = sweep.start(*TWO_JOBS, resume), ""
    assert second.stdout
    while "of an earlier launch" not in said:
        said += (line := second.stdout.readline())
        assert line, said
    sweep.release()
    sweep.finish()
    (kept,) = re.findall(r"already measured: (\d) of 6 points", said)
    assert f"{6 - int(kept)} points are in jobs of an earlier launch: {', '.join(jobs)}" in said
    assert sweep.statuses() == ok(everything)
    assert sweep.measured() == dict.fromkeys(everything, 1)
    assert sweep.jobs().keys() == jobs.keys()
    assert sweep.records() == {}


def test_an_adopted_job_that_dies_is_replaced_and_new_points_get_new_jobs(begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["dying"]
    sweep.kill_launcher()
    (job,) = sweep.jobs()
    sweep.start("num_sm=1,2,3,4", f"resume={sweep.launch.directory}")
    sweep.wait_until_begun("tp2_sm4")
    sweep.kill(job)
    sweep.release()
    sweep.finish()
    assert sweep.statuses() == ok(points(1, 2, 3, 4))
    assert sweep.measured() == {"tp2_sm1": 1, "tp2_sm2": 2, "tp2_sm3": 1, "tp2_sm4": 1}


def test_ctrl_c_leaves_the_jobs_and_after_they_are_cancelled_any_launcher_may_go_on(
    slurm: Slurm, begun: dict[str, SlurmSweep]
) -> None:
    sweep = begun["interrupted"]
    done = sweep.end_launcher(signal.SIGINT, 130)
    jobs, resume = sweep.jobs(), f"resume={sweep.launch.directory}"
    assert list(jobs.values()) == ["RUNNING"]
    assert f"cancel with: scancel {' '.join(jobs)}" in done.stdout
    assert "Traceback" not in done.stderr
    assert "resume with: python launch.py" in done.stderr

    # The job is not taken for one of another configuration.
    refused = sweep.run(*THREE, "workload.repeats=5", resume, status=1)
    assert f"error: Slurm job {' '.join(jobs)} measures tp2_sm1 with a different configuration; " in refused.stderr
    assert sweep.jobs().keys() == jobs.keys()

    slurm.run("scancel", *jobs)
    sweep.wait_for_empty_queue()
    sweep.release()
    done = sweep.run(*THREE, resume, torchrun=True)
    assert "already measured: 1 of 3 points" in done.stdout
    assert sweep.statuses() == ok(points(1, 2, 3))


def test_who_asks_for_some_of_a_jobs_points_leaves_it_the_others(begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["some"]
    sweep.kill_launcher()
    sweep.hold("tp2_sm3")
    jobs, resume = sweep.jobs().keys(), f"resume={sweep.launch.directory}"
    sweep.start("num_sm=2", resume)
    sweep.release("tp2_sm2")
    sweep.finish()
    assert sweep.records().keys() == jobs, "it is at work still"
    sweep.start(*THREE, resume)
    sweep.wait_until_begun("tp2_sm3")
    sweep.release()
    sweep.finish()
    assert sweep.jobs().keys() == jobs
    assert sweep.measured() == dict.fromkeys(points(1, 2, 3), 1)


def test_a_job_makes_room_before_its_time_is_up_and_goes_on_later(time_limited: dict[str, SlurmSweep]) -> None:
    """A point that failed before is not tried again."""
    sweep, everything = time_limited["long"], points(*range(1, 19))
    sweep.finish(1)
    assert sweep.statuses() == {**ok(everything), "tp2_sm1": "failed"}
    # Not even one that was begun and given up.
    assert sweep.measured() == dict.fromkeys(everything, 1)
    assert len(sweep.jobs()) == 1, "queued again, not replaced"
    assert sweep.restarts() >= 1


def test_a_point_that_no_job_has_the_time_for_fails_alone(time_limited: dict[str, SlurmSweep]) -> None:
    sweep = time_limited["hanging"]
    sweep.finish(1)
    assert sweep.statuses() == {**ok(points(2, 3)), "tp2_sm1": "timeout"}
    assert "TIMEOUT" in str(sweep.results()["tp2_sm1"].error)
