"""Launchers that go while their Slurm jobs wait or run, those that come after them, and jobs that reach their limit."""

from collections.abc import Callable

import pytest

from tests.slurm.sweep import SlurmSweep, ok, points

pytestmark = pytest.mark.slurm

THREE = ("num_sm=1,2,3",)
WRONG = {"num_sm": 1, "fault": "wrong_numbers", "rank": None}


@pytest.fixture(scope="module")
def time_limited(new_sweep: Callable[..., SlurmSweep]) -> dict[str, SlurmSweep]:
    """Sweeps whose jobs reach their time limit beside the other tests here: Slurm looks at limits every half minute."""
    long = new_sweep(plan=[{"fault": "dawdles", "rank": 0}, WRONG])
    limits = ("hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=30")
    long.start(f"num_sm={','.join(map(str, range(1, 19)))}", *limits)
    hanging = new_sweep()
    hanging.hold("tp2_sm1")
    hanging.start(*THREE, "runtime.retries=0")
    # The first is told to make room when Slurm looks for the last time half a minute before its end.
    for sweep, seconds in ((long, 50), (hanging, 1)):
        sweep.wait_until_begun("tp2_sm1")
        sweep.end_in(seconds)
    return {"long": long, "hanging": hanging}


@pytest.fixture(scope="module")
def begun(new_sweep: Callable[..., SlurmSweep], time_limited: dict[str, SlurmSweep]) -> dict[str, SlurmSweep]:
    """Sweeps that are held in their second point."""
    names = ("dying", "some")
    sweeps = {name: new_sweep() for name in names}
    for sweep in sweeps.values():
        sweep.hold("tp2_sm2")
        sweep.start(*THREE)
    for sweep in sweeps.values():
        sweep.wait_until_begun("tp2_sm2")
    return sweeps


def test_an_adopted_job_that_dies_is_replaced_and_new_points_get_new_jobs(begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["dying"]
    sweep.kill_launcher()
    (job,) = sweep.jobs()
    sweep.start("num_sm=1,2,3,4", f"resume={sweep.launch.directory}")
    sweep.wait_until_begun("tp2_sm4")
    sweep.kill(job)
    sweep.release()
    sweep.finish()
    assert sweep.statuses() == ok(points(1, 2, 3, 4))
    assert sweep.measured() == {"tp2_sm1": 1, "tp2_sm2": 2, "tp2_sm3": 1, "tp2_sm4": 1}


def test_who_asks_for_some_of_a_jobs_points_leaves_it_the_others(begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["some"]
    sweep.kill_launcher()
    sweep.hold("tp2_sm3")
    jobs, resume = sweep.jobs().keys(), f"resume={sweep.launch.directory}"
    sweep.start("num_sm=2", resume)
    sweep.release("tp2_sm2")
    sweep.finish()
    assert sweep.records().keys() == jobs, "it is at work still"
    sweep.start(*THREE, resume)
    sweep.wait_until_begun("tp2_sm3")
    sweep.release()
    sweep.finish()
    assert sweep.jobs().keys() == jobs
    assert sweep.measured() == dict.fromkeys(points(1, 2, 3), 1)


def test_a_job_makes_room_before_its_time_is_up_and_goes_on_later(time_limited: dict[str, SlurmSweep]) -> None:
    """A point that failed before is not tried again."""
    sweep, everything = time_limited["long"], points(*range(1, 19))
    sweep.finish(1)
    assert sweep.statuses() == {**ok(everything), "tp2_sm1": "failed"}
    # Not even one that was begun and given up.
    assert sweep.measured() == dict.fromkeys(everything, 1)
    assert len(sweep.jobs()) == 1, "queued again, not replaced"
    assert sweep.restarts() >= 1


def test_a_point_that_no_job_has_the_time_for_fails_alone(time_limited: dict[str, SlurmSweep]) -> None:
    sweep = time_limited["hanging"]
    sweep.finish(1)
    assert sweep.statuses() == {**ok(points(2, 3)), "tp2_sm1": "timeout"}
    assert "TIMEOUT" in str(sweep.results()["tp2_sm1"].error)
