"""Sweeps through a real Slurm when nothing goes wrong but what the user typed, or what a point does. All at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest

from tests.slurm.sweep import SlurmSweep, ok, points

NO_MODULE = 'hydra.launcher.setup=["echo no such module >&2","exit 3"]'
NUMBERED = "hydra.sweep.subdir=number${hydra:job.num}"
SWEEPS: dict[str, tuple[str, ...]] = {
    "packed": ("tp_size=2,4", "num_sm=1,2,3", "hydra.launcher.points_per_job=2"),
    "few jobs": ("num_sm=1,2,3,4,5", "hydra.launcher.points_per_job=1", "hydra.launcher.max_jobs=2", NUMBERED),
    "stock": ("hydra/launcher=submitit_slurm", "num_sm=1,2"),
    "options": (
        *("tp_size=1,2", "num_sm=1", "hydra.launcher.partition=high", "hydra.launcher.timeout_min=7"),
        "+hydra.launcher.additional_parameters={nodelist:n2}",
    ),
    "search": (
        "hydra/sweeper=bisect",
        "num_sm=1,2",
        "method=bulk",
        "operator=fc1",
        "hydra.sweep.subdir=${point_name:}",
    ),
    "no module": ("num_sm=1,2", NO_MODULE, "runtime.retries=1"),
    "dead on arrival": ("num_sm=1,2", "runtime.retries=0"),
    "kills its job": ("num_sm=1,2,3,4", "runtime.retries=1"),
    "not writable": ("num_sm=1,2,3", "runtime.retries=0"),
    "nowhere": ("num_sm=1,2", "hydra.launcher.partition=nowhere"),
    # 20 CPUs for TP size 2, 80 for TP size 8 of the 64 that a node has.
    "some refused": ("tp_size=2,8", "num_sm=1,2", "hydra.launcher.cpus_per_task=${tp_size}0"),
    "wrong": ("num_sm=1,2", "hydra.launcher.poll_s=0"),
}
KILLS_ITS_JOB = [{"num_sm": 2, "fault": "kills_job", "rank": 0}]


class Swept(NamedTuple):
    sweep: SlurmSweep
    done: CompletedProcess[str]


@pytest.fixture(scope="module")
def swept(new_sweep: Callable[..., SlurmSweep]) -> dict[str, Swept]:
    sweeps = {name: new_sweep(plan=KILLS_ITS_JOB if name == "kills its job" else ()) for name in SWEEPS}
    (sweeps["dead on arrival"].faults / "dead_on_arrival").touch()
    (sweeps["not writable"].launch.directory / "tp2_sm2" / "tp_comm_overlap_cfg.yaml").mkdir(parents=True)
    # As many at a time as keep two cores busy.
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda name: sweeps[name].run(*SWEEPS[name]), sweeps))
    return {name: Swept(sweep, one) for (name, sweep), one in zip(sweeps.items(), done, strict=True)}


def test_points_are_packed_by_tp_size_and_jobs_ask_for_what_their_points_need(swept: dict[str, Swept]) -> None:
    sweep, done = swept["packed"]
    everything = points(1, 2, 3) + points(1, 2, 3, tp_size=4)
    assert (done.returncode, done.stderr) == (0, "")
    assert sweep.statuses() == ok(everything)
    assert "6 points in 4 jobs" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("6 ok; analyse with")
    # GPUs and CPUs of each.
    assert sorted(sweep.jobs("%b %C").values()) == ["gres:gpu:2 4"] * 2 + ["gres:gpu:4 8"] * 2
    assert sweep.measured() == dict.fromkeys(everything, 1)
    assert sweep.records() == {}
    sweep.wait_for_empty_queue()


def test_all_points_share_max_jobs_jobs_and_directories_may_have_their_numbers(
    swept: dict[str, Swept],
) -> None:
    sweep, done = swept["few jobs"]
    assert done.returncode == 0, done.stdout + done.stderr
    measured = {name: (result.status, result.point["num_sm"]) for name, result in sweep.results().items()}
    assert measured == {f"number{number}": ("ok", number + 1) for number in range(5)}
    assert len(sweep.jobs()) == 2


def test_the_stock_launchers_name_gives_each_point_a_job_with_its_gpus(swept: dict[str, Swept]) -> None:
    sweep, done = swept["stock"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(points(1, 2))
    assert list(sweep.jobs("%b").values()) == ["gres:gpu:2"] * 2
    assert sweep.records() == {}


def test_slurms_options_reach_sbatch_and_points_that_make_no_sense_are_skipped(swept: dict[str, Swept]) -> None:
    sweep, done = swept["options"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(sweep.jobs("%P %l %N").values()) == {"high 7:00 n2"}
    assert sweep.statuses() == {"tp1_sm1": "skipped", "tp2_sm1": "ok"}
    assert done.stdout.splitlines()[-1].startswith("1 ok, 1 skipped; ")


def test_a_search_goes_through_slurm(swept: dict[str, Swept]) -> None:
    sweep, done = swept["search"]
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((sweep.launch.directory / "search.json").read_text())
    assert record["points"] == len(sweep.results())
    assert set(sweep.statuses().values()) == {"ok"}
    assert set(sweep.measured().values()) == {1}
    assert sweep.records() == {}


def test_a_job_that_never_gets_to_a_point_is_tried_again_and_then_failed(swept: dict[str, Swept]) -> None:
    sweep, done = swept["no module"]
    assert done.returncode == 1
    assert sweep.statuses() == dict.fromkeys(points(1, 2), "failed")
    _, last = sweep.jobs()
    for result in sweep.results().values():
        assert str(result.error).splitlines() == [f"Slurm job {last} ended: FAILED (NonZeroExitCode)", "no such module"]
    assert done.stdout.splitlines()[-1].startswith("0 ok, 2 failed; ")
    assert sweep.records() == {}


def test_a_dead_process_says_so_in_its_points_errors(swept: dict[str, Swept]) -> None:
    sweep, done = swept["dead on arrival"]
    assert done.returncode == 1
    assert sweep.statuses() == dict.fromkeys(points(1, 2), "failed")
    assert len(sweep.jobs()) == 1
    assert "dead on arrival" in str(sweep.results()["tp2_sm1"].error)


def test_a_point_that_kills_its_job_fails_alone(swept: dict[str, Swept]) -> None:
    sweep, done = swept["kills its job"]
    assert done.returncode == 1
    assert sweep.statuses() == {**ok(points(1, 3, 4)), "tp2_sm2": "failed"}
    assert sweep.measured() == {**dict.fromkeys(points(1, 3, 4), 1), "tp2_sm2": 2}
    result = sweep.results()["tp2_sm2"]
    first, second, _ = sweep.jobs()
    assert str(result.error).startswith(f"Slurm job {second} ended: FAILED")
    (attempt,) = result.earlier_attempts
    assert attempt.error.startswith(f"Slurm job {first} ended: FAILED")
    assert attempt.where.endswith(f"Slurm job {first}")
    assert done.stdout.splitlines()[-1].startswith("3 ok, 1 failed; ")


def test_a_directory_that_cannot_be_written_costs_its_point_only(swept: dict[str, Swept]) -> None:
    sweep, done = swept["not writable"]
    assert done.returncode == 1
    assert sweep.statuses() == {**ok(points(1, 3)), "tp2_sm2": "failed"}
    assert "Is a directory" in str(sweep.results()["tp2_sm2"].error)
    assert done.stdout.splitlines()[-1].startswith("2 ok, 1 failed; ")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "Slurm took no job: sbatch: error: invalid partition specified: nowhere"),
        ("some refused", "Slurm took no job: "),
        ("wrong", "hydra.launcher.poll_s=0.0 is out of range"),
    ],
)
def test_what_is_refused_is_one_line_and_leaves_no_job(swept: dict[str, Swept], name: str, says: str) -> None:
    sweep, done = swept[name]
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {says}"), line
    sweep.wait_for_empty_queue()
    assert sweep.measured() == {}
    assert sweep.records() == {}
    assert sweep.results() == {}


def test_a_finished_sweep_is_resumed_without_a_job_and_added_to(swept: dict[str, Swept]) -> None:
    sweep, _ = swept["few jobs"]
    jobs, resume = list(sweep.jobs()), f"resume={sweep.launch.directory}"
    again = sweep.run("num_sm=1,2", NUMBERED, resume)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "measured before: 2 of 2 points" in again.stdout
    assert list(sweep.jobs()) == jobs
    more = sweep.run("num_sm=1,2,3,4,5,6", NUMBERED, resume)
    assert more.returncode == 0, more.stdout + more.stderr
    assert sweep.measured() == {f"number{number}": 1 for number in range(6)}
