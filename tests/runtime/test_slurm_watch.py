"""What becomes of the points that an ended Slurm job leaves. No Slurm is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from overlap_sweep.run_directory import Result, write_result
from overlap_sweep.runtime.attempts import Attempts
from overlap_sweep.runtime.jobs import Job
from overlap_sweep.runtime.outcome import Outcomes
from overlap_sweep.runtime.slurm import watch
from overlap_sweep.runtime.slurm.packing import Pack
from overlap_sweep.runtime.slurm.queue import JobState
from overlap_sweep.runtime.slurm.watch import Submitted, Watch
from tests.make_point import operator_config


def job(directory: Path, num_sm: int) -> Job:
    point = operator_config(num_sm=num_sm, runtime={"retries": 1})
    return Job(num_sm, [], OmegaConf.create({}), point, directory / f"sm{num_sm}")


def finish(one: Job) -> None:
    one.directory.mkdir(exist_ok=True)
    write_result(one.directory, Result(name=one.name, point=one.point, status="ok", launch="launch"))


def interrupt(one: Job) -> None:
    """An attempt at the point ends before the point does."""
    attempts = Attempts(one.directory, "launch")
    attempts.begin()
    attempts.end("interrupted")


def nothing(jobs: list[Job]) -> None:
    pass


def some(jobs: list[Job]) -> None:
    finish(jobs[0])
    interrupt(jobs[1])


def half_of_one(jobs: list[Job]) -> None:
    interrupt(jobs[0])


@pytest.mark.parametrize(
    ("states", "work", "packs", "statuses"),
    [
        # What was begun may need more time than this job had left, but not more than a whole job.
        (["TIMEOUT"], some, [[1, 2, 3], [2, 3]], {2: []}),
        (["TIMEOUT"], half_of_one, [[1, 2, 3], [1, 2, 3]], {1: ["timeout"]}),
        (["FAILED"], some, [[1, 2, 3], [2, 3]], {2: []}),
        # A job that does nothing is replaced as often as a point is retried; one that had to go does not count.
        (["FAILED", "FAILED"], nothing, [[1, 2, 3], [1, 2, 3]], {}),
        (["NODE_FAIL", "PREEMPTED", "FAILED"], nothing, [[1, 2, 3]] * 4, {}),
        (["CANCELLED"], some, [[1, 2, 3]], {2: []}),
    ],
)
def test_what_an_ended_job_leaves_is_handed_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    states: list[str],
    work: Callable[[list[Job]], None],
    packs: list[list[int]],
    statuses: dict[int, list[str]],
) -> None:
    """`packs`: the points of each job that is submitted; the last one finishes them unless it is in `states`, too."""
    submitted: list[list[int]] = []

    def submit(pack: Pack, launch: str) -> tuple[str, Submitted]:
        submitted.append([one.number for one in pack.jobs])
        if len(submitted) == 1:
            work(pack.jobs)
        elif len(submitted) > len(states):
            for one in pack.jobs:
                earlier[one.number] = [attempt.status for attempt in Attempts(one.directory, "launch").ended]
                finish(one)
        return str(len(submitted)), Submitted(pack, launch, tmp_path / "log")

    def job_states(logs: dict[str, Path]) -> dict[str, JobState]:
        return {job_id: JobState((*states, "RUNNING")[int(job_id) - 1]) for job_id in logs}

    earlier: dict[int, list[str]] = {}
    monkeypatch.setattr(watch, "job_states", job_states)
    outcomes = Outcomes(listener=lambda _: None, say=lambda _: None)
    jobs = [job(tmp_path, number) for number in (1, 2, 3)]
    Watch(tmp_path, dict([submit(Pack({}, jobs), "launch")]), submit, outcomes, 0.0).run()
    assert submitted == packs
    if "CANCELLED" in states:
        assert list(outcomes.given_up.values()) == ["Slurm job 1 was cancelled"] * 2
    elif len(packs) == len(states):
        assert {outcome.status for outcome in outcomes.all} == {"failed"}
        assert str(outcomes.all[0].reason).startswith("Slurm job 2 ended: FAILED")
    else:
        assert {outcome.status for outcome in outcomes.all} == {"ok"}
        assert {number: earlier[number] for number in statuses} == statuses
