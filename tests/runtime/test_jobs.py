"""What becomes of the points that a sweep asks for before any of them runs."""

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from overlap_sweep.errors import NodeLost, UserError
from overlap_sweep.runtime import jobs
from overlap_sweep.runtime.jobs import Job, distinct
from overlap_sweep.runtime.outcome import Outcomes


def test_a_point_that_is_given_twice_runs_once_where_it_was_first_asked_for() -> None:
    """In the order in which they were asked for: with profile=best, what was measured before decides."""
    empty = OmegaConf.create({})
    jobs = [Job(number, [], empty, {}, Path(name)) for number, name in enumerate("abcbda")]
    assert [(job.number, job.directory.name) for job in distinct(jobs)] == [(0, "a"), (1, "b"), (2, "c"), (4, "d")]


def test_two_points_that_differ_share_no_directory() -> None:
    empty = OmegaConf.create({})
    jobs = [Job(number, [], empty, {"num_sm": number}, Path("a")) for number in (3, 4)]
    with pytest.raises(UserError, match="Jobs 3 and 4 of the sweep differ but would both be written to a; set"):
        distinct(jobs)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NodeLost("node 1 (h2) does not answer any more"), "node 1 (h2) does not answer any more"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; free some space there"),
    ],
)
def test_a_point_that_is_given_up_keeps_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: OSError, said: str
) -> None:
    monkeypatch.setattr(jobs, "outcomes", found := Outcomes())
    monkeypatch.setattr(jobs, "job_return", lambda job, result: job)
    job = Job(0, [], OmegaConf.create({}), {}, tmp_path / "point")
    jobs.run_jobs(Mock(spec=jobs.Sweep, run=Mock(side_effect=error)), [job])
    assert said in found.given_up[job.directory]
    assert (str(job.directory) in found.given_up[job.directory]) == (error.errno is not None)
