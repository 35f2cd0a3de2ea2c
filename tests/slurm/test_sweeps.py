"""Sweeps through a real Slurm when nothing goes wrong but what the user typed."""

from __future__ import annotations

import json

import pytest

from tests.slurm.cluster import GPUS_PER_NODE
from tests.slurm.sweep import SlurmSweep, ok, points


def test_points_are_packed_by_tp_size_and_jobs_ask_for_what_their_points_need(sweep: SlurmSweep) -> None:
    done = sweep.run("tp_size=2,4", "num_sm=1,2,3", "hydra.launcher.points_per_job=2")
    everything = points(1, 2, 3) + points(1, 2, 3, tp_size=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert sweep.statuses() == ok(everything)
    assert "slurm: 6 points in 4 jobs: " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("6 ok; analyse with: python analyze.py ")
    # GPUs and CPUs of each.
    assert sorted(sweep.jobs("%b %C").values()) == ["gres:gpu:2 4"] * 2 + ["gres:gpu:4 8"] * 2
    assert sweep.measured() == dict.fromkeys(everything, 1)
    assert sweep.records() == {}
    sweep.wait_for_empty_queue()


def test_as_many_points_as_there_are_share_no_more_than_max_jobs_jobs(sweep: SlurmSweep) -> None:
    done = sweep.run("num_sm=1,2,3,4,5", "hydra.launcher.points_per_job=1", "hydra.launcher.max_jobs=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(points(1, 2, 3, 4, 5))
    assert len(sweep.jobs()) == 2


def test_the_stock_launchers_name_gives_each_point_a_job_with_its_gpus(sweep: SlurmSweep) -> None:
    done = sweep.run("hydra/launcher=submitit_slurm", "tp_size=2,4", "num_sm=1,2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(points(1, 2) + points(1, 2, tp_size=4))
    assert sorted(sweep.jobs("%b").values()) == ["gres:gpu:2"] * 2 + ["gres:gpu:4"] * 2
    assert sweep.records() == {}


def test_slurms_options_reach_sbatch(sweep: SlurmSweep) -> None:
    options = ("hydra.launcher.partition=high", "hydra.launcher.timeout_min=7")
    done = sweep.run("num_sm=1,2", *options, "+hydra.launcher.additional_parameters={nodelist:n2}")
    assert done.returncode == 0, done.stdout + done.stderr
    (asked,) = sweep.jobs("%P %l %N").values()
    assert asked == "high 7:00 n2"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("hydra.launcher.partition=nowhere", "invalid partition specified: nowhere"),
        (f"hydra.launcher.gpus_per_node={GPUS_PER_NODE + 1}", "Requested node configuration is not available"),
    ],
)
def test_what_slurm_refuses_is_one_line(sweep: SlurmSweep, option: str, says: str) -> None:
    done = sweep.run("num_sm=1,2", option)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Slurm took no job: ")
    assert says in line
    # Slurm may note a refused job as a failed one.
    assert set(sweep.jobs().values()) <= {"FAILED"}
    assert sweep.records() == {}
    assert sweep.results() == {}


def test_where_slurm_refuses_some_jobs_none_is_left(sweep: SlurmSweep) -> None:
    # 12 CPUs for TP size 2, 18 for TP size 8 of the 16 that a node has.
    done = sweep.run("tp_size=2,8", "num_sm=1,2", "hydra.launcher.cpus_per_task=1${tp_size}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Slurm took no job: ")
    assert sweep.jobs()
    sweep.wait_for_empty_queue()
    assert sweep.records() == {}
    assert sweep.results() == {}


@pytest.mark.parametrize("wrong", ["num_sm=0", "hydra.launcher.poll_s=0", "hydra.launcher.points_per_job=0"])
def test_a_wrong_value_is_an_error_before_anything_is_submitted(sweep: SlurmSweep, wrong: str) -> None:
    done = sweep.run("num_sm=1,2", wrong)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {wrong}")
    assert "is out of range" in line
    assert sweep.jobs() == {}


def test_points_that_make_no_sense_are_skipped(sweep: SlurmSweep) -> None:
    done = sweep.run("tp_size=1,2", "num_sm=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == {"tp1_sm1": "skipped", "tp2_sm1": "ok"}
    assert done.stdout.splitlines()[-1].startswith("1 ok, 1 skipped; analyse with: ")


def test_a_finished_sweep_is_resumed_without_a_job(sweep: SlurmSweep) -> None:
    sweep.run("num_sm=1,2")
    jobs = list(sweep.jobs())
    again = sweep.run("num_sm=1,2", f"resume={sweep.launch.directory}")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "measured before: 2 of 2 points" in again.stdout
    assert list(sweep.jobs()) == jobs
    more = sweep.run("num_sm=1,2,3", f"resume={sweep.launch.directory}")
    assert more.returncode == 0, more.stdout + more.stderr
    assert sweep.measured() == dict.fromkeys(points(1, 2, 3), 1)


def test_a_search_goes_through_slurm(sweep: SlurmSweep) -> None:
    arguments = ("hydra/sweeper=bisect", "num_sm=1,2", "method=bulk", "operator=fc1")
    done = sweep.run(*arguments, "hydra.sweep.subdir=${point_name:}", timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((sweep.launch.directory / "search.json").read_text())
    assert record["points"] == len(sweep.results())
    assert {result.status for result in sweep.results().values()} == {"ok"}
    assert set(sweep.measured().values()) == {1}
    assert sweep.records() == {}
