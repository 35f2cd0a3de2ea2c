"""A job measures what was submitted, where it was meant to go, and leaves to others what is theirs."""

from __future__ import annotations

from tests.slurm.cluster import Slurm
from tests.slurm.sweep import SlurmSweep, ok, points


def test_directories_may_be_named_by_the_number_of_the_job(sweep: SlurmSweep) -> None:
    numbered = "hydra.sweep.subdir=number${hydra:job.num}"
    done = sweep.run("num_sm=1,2,3,4", "hydra.launcher.points_per_job=2", numbered)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = {name: result.point["num_sm"] for name, result in sweep.results().items()}
    assert measured == {"number0": 1, "number1": 2, "number2": 3, "number3": 4}


def test_a_job_of_another_configuration_is_not_taken_for_this_one(slurm: Slurm, sweep: SlurmSweep) -> None:
    sweep.hold("tp2_sm1")
    first = sweep.start("num_sm=1,2")
    sweep.wait_until_begun("tp2_sm1")
    first.kill()
    first.communicate()
    (job,) = sweep.jobs()
    resume = f"resume={sweep.launch.directory}"
    refused = sweep.run("num_sm=1,2", "workload.repeats=5", resume)
    assert refused.returncode == 1
    assert f"error: Slurm job {job} measures tp2_sm1 with another configuration; " in refused.stderr
    assert sweep.jobs().keys() == {job}
    slurm.cancel(job)
    slurm.wait_for(lambda: sweep.jobs()[job] == "CANCELLED", "the end of the job")
    sweep.release()
    again = sweep.run("num_sm=1,2", "workload.repeats=5", resume)
    assert again.returncode == 0, again.stdout + again.stderr
    assert {result.point["workload"]["repeats"] for result in sweep.results().values()} == {5}


def test_who_asks_for_some_of_a_jobs_points_leaves_it_the_others(sweep: SlurmSweep) -> None:
    sweep.hold("tp2_sm1", "tp2_sm3")
    first = sweep.start("num_sm=1,2,3")
    sweep.wait_until_begun("tp2_sm1")
    first.kill()
    first.communicate()
    jobs, resume = sweep.jobs().keys(), f"resume={sweep.launch.directory}"
    some = sweep.start("num_sm=1", resume)
    sweep.release("tp2_sm1")
    assert sweep.finish(some).returncode == 0
    assert sweep.records().keys() == jobs, "it is at work still"
    everything = sweep.start("num_sm=1,2,3", resume)
    sweep.wait_until_begun("tp2_sm3")
    sweep.release()
    assert sweep.finish(everything).returncode == 0
    assert sweep.jobs().keys() == jobs
    assert sweep.measured() == dict.fromkeys(points(1, 2, 3), 1)


def test_a_job_that_is_told_to_end_waits_for_it_and_can_be_queued_again(slurm: Slurm, sweep: SlurmSweep) -> None:
    """As Slurm preempts where it sends nothing but SIGTERM: a job that ends by itself then is not queued again."""
    sweep.hold("tp2_sm2")
    process = sweep.start("num_sm=1,2,3")
    sweep.wait_until_begun("tp2_sm2")
    (job,) = sweep.jobs()
    slurm.run("scancel", "--signal=TERM", job)
    slurm.wait_for(lambda: "stopped by SIGTERM" in sweep.logs(), "the end of the point")
    assert sweep.jobs()[job] == "RUNNING"
    slurm.run("scontrol", "requeue", job)
    sweep.release()
    done = sweep.finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.jobs().keys() == {job}
    assert sweep.statuses() == ok(points(1, 2, 3))
    assert sweep.measured() == {"tp2_sm1": 1, "tp2_sm2": 2, "tp2_sm3": 1}
    assert sweep.results()["tp2_sm2"].earlier_attempts == []


def test_what_failed_in_a_launch_is_not_tried_again_when_its_job_is(slurm: Slurm, sweep: SlurmSweep) -> None:
    sweep.hold("tp4_sm2")
    process = sweep.start(
        "num_sm=1,2",
        "workload.tolerance=0",
        "operator=proj",
        "method=ring_exchange",
        "tp_size=4",
    )
    slurm.wait_for(lambda: "tp4_sm1" in sweep.results(), "the first point's end")
    (job,) = sweep.jobs()
    assert sweep.statuses()["tp4_sm1"] == "failed"
    slurm.run("scancel", "--signal=USR2", job)
    sweep.release()
    done = sweep.finish(process)
    assert done.returncode == 1
    assert sweep.measured()["tp4_sm1"] == 1
