"""Sweeps that are longer than their jobs may run."""

from __future__ import annotations

from tests.slurm.sweep import SlurmSweep, ok, points


def test_a_job_makes_room_before_its_time_is_up_and_goes_on_later(time_limited: dict[str, SlurmSweep]) -> None:
    sweep, everything = time_limited["long"], points(*range(1, 19))
    done = sweep.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(everything)
    # Not even one that was begun and given up.
    assert sweep.measured() == dict.fromkeys(everything, 1)
    assert len(sweep.jobs()) == 1, "queued again, not replaced"
    assert sweep.restarts() >= 1


def test_a_point_that_no_job_has_the_time_for_fails_alone(time_limited: dict[str, SlurmSweep]) -> None:
    sweep = time_limited["hanging"]
    done = sweep.finish()
    assert done.returncode == 1
    statuses = sweep.statuses()
    assert statuses.pop("tp2_sm1") == "timeout"
    assert statuses == ok(points(2, 3))
    assert "TIMEOUT" in str(sweep.results()["tp2_sm1"].error)
