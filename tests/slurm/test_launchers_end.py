"""A launcher that goes while its Slurm jobs wait or run, and the one that comes after it."""

from __future__ import annotations

import signal

import pytest

from tests.slurm.cluster import GPUS_PER_NODE, NODES, Slurm
from tests.slurm.sweep import SlurmSweep, ok, points

EVERYTHING = points(1, 2, 3, 4, 5, 6)
TWO_JOBS = ("num_sm=1,2,3,4,5,6", "hydra.launcher.points_per_job=3", f"hydra.launcher.gpus_per_node={GPUS_PER_NODE}")


@pytest.fixture
def one_node_taken(slurm: Slurm) -> str:
    """So that the second job of two that want a node each has to wait; the id of what takes it."""
    job = slurm.submit("sleep 600", f"--nodelist={NODES[1]}", gpus=GPUS_PER_NODE)
    slurm.wait_for_state(job, "RUNNING")
    return job


def test_after_a_killed_launcher_the_next_adopts_its_jobs(slurm: Slurm, sweep: SlurmSweep, one_node_taken: str) -> None:
    sweep.hold("tp2_sm2")
    first = sweep.start(*TWO_JOBS)
    sweep.wait_until_begun("tp2_sm2")
    first.kill()
    first.communicate()
    jobs = sweep.jobs()
    assert sorted(jobs.values()) == ["PENDING", "RUNNING"]
    resume = f"resume={sweep.launch.directory}"

    # Another launcher would measure the same points.
    refused = sweep.run(*(argument for argument in TWO_JOBS if "hydra.launcher" not in argument), resume, torchrun=True)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"error: Slurm jobs work in {sweep.launch.directory}; go on with hydra/launcher=slurm")
    assert all(job in line for job in jobs)

    second = sweep.start(*TWO_JOBS, resume)
    slurm.wait_for(lambda: second.poll() is None and sweep.is_locked(), "the second launcher")
    slurm.cancel(one_node_taken)
    sweep.release()
    done = sweep.finish(second)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured before: 1 of 6 points" in done.stdout
    assert f"slurm: 5 points are left to jobs of an earlier launch: {', '.join(jobs)}" in done.stdout
    assert sweep.statuses() == ok(EVERYTHING)
    assert sweep.measured() == dict.fromkeys(EVERYTHING, 1)
    assert sweep.jobs().keys() == jobs.keys()
    assert sweep.records() == {}


def test_an_adopted_job_that_dies_is_replaced_and_new_points_get_new_jobs(sweep: SlurmSweep) -> None:
    sweep.hold("tp2_sm2")
    first = sweep.start("num_sm=1,2,3")
    sweep.wait_until_begun("tp2_sm2")
    first.kill()
    first.communicate()
    (job,) = sweep.jobs()
    second = sweep.start("num_sm=1,2,3,4", f"resume={sweep.launch.directory}")
    sweep.wait_until_begun("tp2_sm4")
    sweep.kill(job)
    sweep.release()
    done = sweep.finish(second)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(points(1, 2, 3, 4))
    assert sweep.measured() == {"tp2_sm1": 1, "tp2_sm2": 2, "tp2_sm3": 1, "tp2_sm4": 1}


def test_ctrl_c_leaves_the_jobs_and_says_how_to_end_them(sweep: SlurmSweep, one_node_taken: str) -> None:
    sweep.hold("tp2_sm2")
    process = sweep.start(*TWO_JOBS)
    sweep.wait_until_begun("tp2_sm2")
    process.send_signal(signal.SIGINT)
    done = sweep.finish(process, timeout_s=20)
    assert done.returncode == 130
    jobs = sweep.jobs()
    assert sorted(jobs.values()) == ["PENDING", "RUNNING"]
    assert f"jobs go on without this process; end them with: scancel {' '.join(jobs)}" in done.stdout
    assert "Traceback" not in done.stderr
    assert f"resume={sweep.launch.directory}" in done.stderr or "go on with: python launch.py" in done.stderr


def test_after_cancelled_jobs_any_launcher_may_go_on(slurm: Slurm, sweep: SlurmSweep) -> None:
    sweep.hold("tp2_sm2")
    process = sweep.start("num_sm=1,2,3")
    sweep.wait_until_begun("tp2_sm2")
    process.send_signal(signal.SIGINT)
    sweep.finish(process, timeout_s=20)
    slurm.cancel(*sweep.jobs())
    sweep.wait_for_empty_queue()
    sweep.release()
    done = sweep.run("num_sm=1,2,3", f"resume={sweep.launch.directory}", torchrun=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measured before: 1 of 3 points" in done.stdout
    assert sweep.statuses() == ok(points(1, 2, 3))


def test_two_launchers_do_not_share_a_directory(sweep: SlurmSweep) -> None:
    sweep.hold("tp2_sm1")
    first = sweep.start("num_sm=1,2")
    sweep.wait_until_begun("tp2_sm1")
    second = sweep.run("num_sm=1,2")
    assert second.returncode == 1
    assert f"{sweep.launch.directory} is in use by process {first.pid} " in second.stderr
    sweep.release()
    done = sweep.finish(first)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.measured() == dict.fromkeys(points(1, 2), 1)
