"""Sweeps through a real Slurm when nothing goes wrong but what the user typed, or what a point does. All at once."""

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from overlap_sweep.runtime.cluster import JobState
from overlap_sweep.runtime.cluster.slurm import states
from tests.slurm.cluster import Slurm
from tests.slurm.sweep import SlurmSweep, forgetful_squeue, late_sbatch, ok, points

pytestmark = pytest.mark.slurm

NUMBERED = "hydra.sweep.subdir=number${hydra:job.num}"
SWEEPS: dict[str, tuple[str, ...]] = {
    "few jobs": ("num_sm=1,2,3,4,5", "hydra.launcher.points_per_job=1", "hydra.launcher.max_jobs=2", NUMBERED),
    "options": (
        *("tp_size=1,2", "num_sm=1,2,3", "hydra.launcher.partition=high", "hydra.launcher.timeout_min=7"),
        *("+hydra.launcher.additional_parameters={nodelist:n2}", "runtime.retries=0"),
    ),
    "search": (
        *("hydra/sweeper=bisect", "num_sm=1,2", "method=bulk", "operator=fc1", "hydra.sweep.subdir=${point_name:}"),
    ),
    "no module": ("num_sm=1,2", 'hydra.launcher.setup=["echo no such module >&2","exit 3"]', "runtime.retries=1"),
}
FAIL = ("options", "no module")

Swept = dict[str, tuple[SlurmSweep, Future[CompletedProcess[str]]]]


@pytest.fixture(scope="module")
def swept(new_sweep: Callable[..., SlurmSweep], tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """By name each sweep and how its launcher ended."""
    environments = {"few jobs": {"PATH": late_sbatch(tmp_path_factory.mktemp("bin"))}}
    sweeps = {name: new_sweep(environment=environments.get(name, {})) for name in SWEEPS}
    # A point whose directory cannot be written.
    (sweeps["options"].launch.directory / "tp2_sm2" / "tp_comm_overlap_cfg.yaml").mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        return {
            name: (sweep, pool.submit(sweep.run, *SWEEPS[name], status=int(name in FAIL)))
            for name, sweep in sweeps.items()
        }


def test_all_points_share_max_jobs_jobs_and_a_finished_sweep_is_resumed_without_a_job_and_added_to(
    swept: Swept,
) -> None:
    """In directories that have the points' numbers, by jobs that begin before sbatch has answered."""
    sweep, done = swept["few jobs"]
    done.result()
    measured = {name: (result.status, result.recorded["num_sm"]) for name, result in sweep.results().items()}
    assert measured == {f"number{number}": ("ok", number + 1) for number in range(5)}
    jobs, resume = list(sweep.jobs()), f"resume={sweep.launch.directory}"
    assert len(jobs) == 2
    again = sweep.run("num_sm=1,2", NUMBERED, resume)
    assert "already measured: 2 of 2 points" in again.stdout
    assert list(sweep.jobs()) == jobs
    sweep.run("num_sm=1,2,3,4,5,6", NUMBERED, resume)
    assert sweep.measured() == {f"number{number}": 1 for number in range(6)}


def test_options_reach_sbatch_and_points_that_make_no_sense_or_cannot_be_written_cost_no_other(swept: Swept) -> None:
    sweep, done = swept["options"]
    assert done.result().stdout.splitlines()[-1].startswith("2 ok, 1 failed, 3 skipped; ")
    assert set(sweep.jobs("%P %l %N").values()) == {"high 7:00 n2"}
    skipped = dict.fromkeys(points(1, 2, 3, tp_size=1), "skipped")
    assert sweep.statuses() == {**ok(points(1, 3)), "tp2_sm2": "failed", **skipped}
    assert "Is a directory" in str(sweep.results()["tp2_sm2"].error)


def test_a_search_goes_through_slurm(swept: Swept) -> None:
    sweep, done = swept["search"]
    done.result()
    record = json.loads((sweep.launch.directory / "search.json").read_text())
    assert record["points"] == len(sweep.results())
    assert set(sweep.statuses().values()) == {"ok"}
    assert set(sweep.measured().values()) == {1}
    assert sweep.records() == {}


def test_a_job_that_never_gets_to_a_point_is_tried_again_and_then_failed(swept: Swept) -> None:
    sweep, done = swept["no module"]
    assert done.result().stdout.splitlines()[-1].startswith("0 ok, 2 failed; ")
    assert sweep.statuses() == dict.fromkeys(points(1, 2), "failed")
    _, last = sweep.jobs()
    for result in sweep.results().values():
        assert str(result.error).splitlines() == [f"Slurm job {last} ended: FAILED (NonZeroExitCode)", "no such module"]
    assert sweep.records() == {}


def test_accounts_tell_how_a_job_ended_that_squeue_has_forgotten(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", forgetful_squeue(tmp_path))
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    failed, cancelled = slurm.submit("exit 3"), slurm.submit("sleep 100")
    slurm.wait_for_state(cancelled, "RUNNING")
    slurm.run("scancel", cancelled)
    expected = {failed: JobState("FAILED", "failed"), cancelled: JobState("CANCELLED", "cancelled")}
    logs = dict.fromkeys(expected, tmp_path)
    slurm.wait_for(lambda: states(logs) == expected, "the jobs' ends in sacct")
    assert states(logs) == expected
