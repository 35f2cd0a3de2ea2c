"""What happens to the jobs of a sweep costs no result, and nothing is measured twice without need."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import GPUS_PER_NODE, Slurm
from tests.slurm.sweep import SlurmSweep, ok, points

HALF_A_NODE = f"hydra.launcher.gpus_per_node={GPUS_PER_NODE // 2}"
WHOLE_NODE = f"hydra.launcher.gpus_per_node={GPUS_PER_NODE}"


def test_a_sweep_survives_all_at_once(slurm: Slurm, sweep: SlurmSweep) -> None:
    # Two jobs on one node and one on the other, each held in its second point of three.
    numbers = range(1, 10)
    everything, held = points(*numbers), points(2, 5, 8)
    sweep.hold(*held)
    arguments = ("num_sm=1,2,3,4,5,6,7,8,9", "hydra.launcher.points_per_job=3", HALF_A_NODE)
    process = sweep.start(*arguments)
    sweep.wait_until_begun(*held)
    nodes = sweep.jobs("%N")
    (lone,) = (job for job, node in nodes.items() if list(nodes.values()).count(node) == 1)
    killed, cancelled = sorted(nodes.keys() - {lone})
    points_of = sweep.records()

    # Preempted: told to stop, the job finishes the point that it is at.
    high = slurm.submit("sleep 3", f"--nodelist={nodes[lone]}", partition="high", gpus=GPUS_PER_NODE)
    slurm.wait_for(lambda: sweep.preempted(lone), f"the preemption of job {lone}")
    sweep.release(*points_of[lone])
    slurm.wait_for_state(high, "RUNNING", "COMPLETED", timeout_s=40)
    sweep.kill(killed)
    slurm.cancel(cancelled)
    slurm.restart_controller()
    sweep.release()
    done = sweep.finish(process)

    finished, tried, never = points_of[cancelled]
    lost = {tried, never}
    assert sweep.statuses() == ok([point for point in everything if point not in lost])
    assert f"2 missing: Slurm job {cancelled} was cancelled" in done.stderr.splitlines()
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("7 ok, 2 missing; go on with: python launch.py ")
    # Again only what was killed in the midst of its measurement.
    again = points_of[killed][1]
    assert sweep.measured() == {point: 1 + (point == again) for point in everything if point != never}
    assert sweep.measured("ok") == dict.fromkeys(set(everything) - lost, 1)
    (attempt,) = sweep.results()[again].earlier_attempts
    assert f"Slurm job {killed} ended: FAILED" in attempt.error
    assert sweep.records() == {}
    sweep.wait_for_empty_queue()

    resumed = sweep.run(*arguments, f"resume={sweep.launch.directory}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "measured before: 7 of 9 points" in resumed.stdout
    assert sweep.statuses() == ok(everything)
    assert sweep.measured("ok") == dict.fromkeys(everything, 1)
    assert finished not in lost


def test_points_of_a_waiting_job_that_is_cancelled_are_left_out(slurm: Slurm, sweep: SlurmSweep) -> None:
    """Slurm forgets a cancelled element of an array at once if it has not begun."""
    slurm.submit("sleep 600", "--nodelist=n2", gpus=GPUS_PER_NODE)
    sweep.hold("tp2_sm1")
    process = sweep.start("num_sm=1,2,3,4", "hydra.launcher.points_per_job=1", WHOLE_NODE)
    sweep.wait_until_begun("tp2_sm1")
    waiting = [sweep.job_of(point) for point in points(2, 3)]
    slurm.cancel(*waiting)
    sweep.release()
    done = sweep.finish(process)
    assert done.returncode == 1
    assert sweep.statuses() == ok(points(1, 4))
    assert sorted(done.stderr.splitlines()) == [f"1 missing: Slurm job {job} was cancelled" for job in waiting]
    assert sweep.measured() == dict.fromkeys(points(1, 4), 1)


def test_a_job_that_never_gets_to_a_point_is_tried_again_and_then_failed(sweep: SlurmSweep) -> None:
    setup = 'hydra.launcher.setup=["echo no such module >&2","exit 3"]'
    done = sweep.run("num_sm=1,2", setup, "runtime.retries=1")
    assert done.returncode == 1
    assert sweep.statuses() == dict.fromkeys(points(1, 2), "failed")
    assert len(sweep.jobs()) == 2
    last = list(sweep.jobs())[-1]
    for result in sweep.results().values():
        assert str(result.error).splitlines() == [f"Slurm job {last} ended: FAILED (NonZeroExitCode)", "no such module"]
    assert done.stdout.splitlines()[-1].startswith("0 ok, 2 failed; ")
    assert sweep.records() == {}


def test_a_dead_process_says_so_in_its_points_errors(sweep: SlurmSweep) -> None:
    (sweep.faults / "dead_on_arrival").touch()
    done = sweep.run("num_sm=1,2", "runtime.retries=0")
    assert done.returncode == 1
    assert sweep.statuses() == dict.fromkeys(points(1, 2), "failed")
    assert len(sweep.jobs()) == 1
    assert "dead on arrival" in str(sweep.results()["tp2_sm1"].error)


def test_a_point_that_kills_its_job_fails_alone(sweep: SlurmSweep) -> None:
    sweep.let_kill("tp2_sm2")
    done = sweep.run("num_sm=1,2,3,4", "runtime.retries=1")
    assert done.returncode == 1
    assert sweep.statuses() == {**ok(points(1, 3, 4)), "tp2_sm2": "failed"}
    assert sweep.measured() == {**dict.fromkeys(points(1, 3, 4), 1), "tp2_sm2": 2}
    result = sweep.results()["tp2_sm2"]
    jobs = list(sweep.jobs())
    assert len(jobs) == 3
    assert str(result.error).startswith(f"Slurm job {jobs[1]} ended: FAILED")
    (attempt,) = result.earlier_attempts
    assert attempt.error.startswith(f"Slurm job {jobs[0]} ended: FAILED")
    assert attempt.where.endswith(f"Slurm job {jobs[0]}")
    assert done.stdout.splitlines()[-1].startswith("3 ok, 1 failed; ")


def test_a_node_that_fails_costs_no_result(slurm: Slurm, sweep: SlurmSweep) -> None:
    held = points(2, 5)
    sweep.hold(*held)
    process = sweep.start("num_sm=1,2,3,4,5,6", "hydra.launcher.points_per_job=3", WHOLE_NODE)
    sweep.wait_until_begun(*held)
    (there,) = (job for job, node in sweep.jobs("%N").items() if node == "n2")
    (again,) = set(sweep.records()[there]) & set(held)
    slurm.fail_node("n2")
    sweep.release()
    done = sweep.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    everything = points(1, 2, 3, 4, 5, 6)
    assert sweep.statuses() == ok(everything)
    assert sweep.measured() == {point: 1 + (point == again) for point in everything}
    (attempt,) = sweep.results()[again].earlier_attempts
    assert attempt.error == "the job that measured it was ended and queued again"


def test_while_the_controller_is_away_jobs_go_on(slurm: Slurm, sweep: SlurmSweep) -> None:
    sweep.hold("tp2_sm1", "tp2_sm3")
    process = sweep.start("num_sm=1,2,3")
    sweep.wait_until_begun("tp2_sm1")
    slurm.stop_controller()
    sweep.release("tp2_sm1")
    slurm.wait_for(lambda: sweep.statuses() == ok(points(1, 2)), "the results")
    slurm.start_controller()
    sweep.release()
    done = sweep.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.measured() == dict.fromkeys(points(1, 2, 3), 1)


def test_a_job_that_is_killed_while_the_controller_is_away_is_replaced(slurm: Slurm, sweep: SlurmSweep) -> None:
    sweep.hold("tp2_sm2")
    process = sweep.start("num_sm=1,2,3")
    sweep.wait_until_begun("tp2_sm2")
    (job,) = sweep.jobs()
    slurm.stop_controller()
    sweep.kill(job)
    sweep.release()
    slurm.start_controller()
    done = sweep.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(points(1, 2, 3))
    assert sweep.measured() == {"tp2_sm1": 1, "tp2_sm2": 2, "tp2_sm3": 1}


@pytest.mark.parametrize("poll_s", [1, 11])
def test_without_sacct_a_killed_job_is_replaced(sweep_without_sacct: SlurmSweep, poll_s: int) -> None:
    """Also where squeue has forgotten the job when the launcher looks for it again."""
    sweep = sweep_without_sacct
    sweep.hold("tp2_sm2", "tp2_sm5")
    process = sweep.start("num_sm=1,2,3,4,5,6", "hydra.launcher.points_per_job=3", f"hydra.launcher.poll_s={poll_s}")
    sweep.wait_until_begun("tp2_sm2", "tp2_sm5")
    sweep.kill(sweep.job_of("tp2_sm2"))
    sweep.release()
    done = sweep.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(points(1, 2, 3, 4, 5, 6))
    assert sweep.measured() == {**dict.fromkeys(points(1, 3, 4, 5, 6), 1), "tp2_sm2": 2}
    (attempt,) = sweep.results()["tp2_sm2"].earlier_attempts
    assert ("GONE" if poll_s > 10 else "FAILED") in attempt.error


def test_a_directory_that_cannot_be_written_costs_its_point_only(sweep: SlurmSweep) -> None:
    sweep.launch.directory.mkdir()
    (sweep.launch.directory / "tp2_sm2").mkdir()
    (sweep.launch.directory / "tp2_sm2" / "tp_comm_overlap_cfg.yaml").mkdir()
    done = sweep.run("num_sm=1,2,3", "runtime.retries=0")
    assert done.returncode == 1
    assert sweep.statuses() == {**ok(points(1, 3)), "tp2_sm2": "failed"}
    assert "Is a directory" in str(sweep.results()["tp2_sm2"].error)
    assert done.stdout.splitlines()[-1].startswith("2 ok, 1 failed; ")
