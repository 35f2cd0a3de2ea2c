"""What becomes of the points that a sweep asks for before any of them runs."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from overlap_sweep.runtime.jobs import Job, distinct


def test_a_point_that_is_given_twice_runs_once_where_it_was_first_asked_for() -> None:
    """In the order in which they were asked for: with profile=best, what was measured before decides."""
    empty = OmegaConf.create({})
    jobs = [Job(number, [], empty, {}, Path(name)) for number, name in enumerate("abcbda")]
    assert [(job.number, job.directory.name) for job in distinct(jobs)] == [(0, "a"), (1, "b"), (2, "c"), (4, "d")]
