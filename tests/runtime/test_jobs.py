"""What becomes of the points that a sweep asks for before any of them runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.jobs import Job, distinct


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
