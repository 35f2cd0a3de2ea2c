"""Sweeps that are longer than their jobs may run. Slurm's limits are of minutes, and so are these tests."""

from __future__ import annotations

import pytest

from tests.slurm.sweep import SlurmSweep, ok, points

A_MINUTE = ("hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=15")
NO_REQUEUE = "+hydra.launcher.additional_parameters={no-requeue:true}"
TEN = ",".join(str(number) for number in range(1, 11))


@pytest.mark.faults
@pytest.mark.timeout(420)
def test_a_job_makes_room_before_its_time_is_up_and_goes_on_later(sweep: SlurmSweep) -> None:
    everything = points(*range(1, 11))
    (sweep.faults / "sleep_s").write_text("7")
    done = sweep.run(f"num_sm={TEN}", *A_MINUTE, timeout_s=360)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(everything)
    # Not even one that was begun and given up.
    assert sweep.measured() == dict.fromkeys(everything, 1)
    assert len(sweep.jobs()) == 1, "queued again, not replaced"
    assert sweep.restarts() >= 1


@pytest.mark.faults
@pytest.mark.timeout(420)
def test_where_a_job_may_not_be_queued_again_another_goes_on(sweep: SlurmSweep) -> None:
    everything = points(*range(1, 11))
    (sweep.faults / "sleep_s").write_text("7")
    done = sweep.run(f"num_sm={TEN}", *A_MINUTE, NO_REQUEUE, timeout_s=360)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sweep.statuses() == ok(everything)
    assert sweep.measured() == dict.fromkeys(everything, 1)
    assert len(sweep.jobs()) > 1
    assert sweep.restarts() == 0


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_point_that_no_job_has_the_time_for_fails_alone(sweep: SlurmSweep) -> None:
    sweep.hold("tp2_sm2")
    done = sweep.run("num_sm=1,2,3", *A_MINUTE, NO_REQUEUE, "runtime.retries=0", timeout_s=500)
    assert done.returncode == 1
    statuses = sweep.statuses()
    assert statuses.pop("tp2_sm2") in ("failed", "timeout")
    assert statuses == ok(points(1, 3))
    assert "TIMEOUT" in str(sweep.results()["tp2_sm2"].error)
