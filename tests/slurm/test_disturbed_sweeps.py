"""Whatever happens to a sweep's jobs, or to the cluster: no result is lost, and none is measured twice without need."""

import re
from collections.abc import Callable, Iterator

import pytest

from tests.slurm.cluster import GPUS_PER_NODE, Slurm
from tests.slurm.sweep import SlurmSweep, forgetful_squeue, ok, points

pytestmark = pytest.mark.slurm

THREE_A_JOB = ("num_sm=1,2,3,4,5,6", "hydra.launcher.points_per_job=3")
ONE_AFTER_THE_OTHER = ("hydra.launcher.points_per_job=1", "hydra.launcher.array_parallelism=1")
ON_N1 = "+hydra.launcher.additional_parameters={nodelist:n1}"
NOT_AGAIN_ON_N1 = "+hydra.launcher.additional_parameters={nodelist:n1,no-requeue:true}"


@pytest.fixture
def mended(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.mend()


@pytest.mark.usefixtures("mended")
def test_a_sweep_survives_all_at_once(slurm: Slurm, new_sweep: Callable[..., SlurmSweep]) -> None:
    # Two jobs on one node and one on the other, each held in its second point of three.
    sweep, everything, held = new_sweep(), points(*range(1, 10)), points(2, 5, 8)
    sweep.hold(*held)
    half_a_node = f"hydra.launcher.gpus_per_node={GPUS_PER_NODE // 2}"
    arguments = ("num_sm=1,2,3,4,5,6,7,8,9", "hydra.launcher.points_per_job=3", half_a_node)
    sweep.start(*arguments)
    sweep.wait_until_begun(*held)
    nodes = sweep.jobs("%N")
    (lone,) = (job for job, node in nodes.items() if list(nodes.values()).count(node) == 1)
    killed, cancelled = sorted(nodes.keys() - {lone})
    points_of = sweep.records()

    # Preempted: told to stop, the job finishes the point that it is at.
    high = slurm.submit("sleep 1", f"--nodelist={nodes[lone]}", partition="high", gpus=GPUS_PER_NODE)
    told_to_make_room = re.compile(r"PreemptTime=\d")
    slurm.wait_for(lambda: told_to_make_room.search(slurm.run("scontrol", "show", "job", lone)), "the preemption")
    sweep.release(*points_of[lone])
    slurm.wait_for_state(high, "RUNNING", "COMPLETED")
    sweep.kill(killed)
    slurm.run("scancel", cancelled)
    slurm.control("restart-controller")
    sweep.release()
    done = sweep.finish(1)

    _, tried, never = points_of[cancelled]
    lost = {tried, never}
    assert sweep.statuses() == ok([point for point in everything if point not in lost])
    assert f"2 missing: Slurm job {cancelled} was cancelled" in done.stderr.splitlines()
    assert done.stdout.splitlines()[-1].startswith("7 ok, 2 missing; resume with: python launch.py ")
    # Again only what was killed in the midst of its measurement.
    again = points_of[killed][1]
    assert sweep.measured() == {point: 1 + (point == again) for point in everything if point != never}
    assert sweep.measured("run") == dict.fromkeys(set(everything) - lost, 1)
    assert sweep.restarts() == 1
    assert sweep.records() == {}
    sweep.wait_for_empty_queue()

    resumed = sweep.run(*arguments, f"resume={sweep.launch.directory}")
    assert "already measured: 7 of 9 points" in resumed.stdout
    assert sweep.statuses() == ok(everything)
    assert sweep.measured("run") == dict.fromkeys(everything, 1)


@pytest.fixture(scope="module")
def begun(new_sweep: Callable[..., SlurmSweep], tmp_path_factory: pytest.TempPathFactory) -> dict[str, SlurmSweep]:
    """Sweeps each of which is held in a point, on the first node, and one on the other, where alone it has room."""
    forgetful = forgetful_squeue(tmp_path_factory.mktemp("bin"), accounts=False)
    sweeps = {
        "controller": (new_sweep(environment={"PATH": forgetful}), (*THREE_A_JOB, ON_N1)),
        "waiting": (new_sweep(), ("num_sm=2,3,4,5", *ONE_AFTER_THE_OTHER, ON_N1)),
        "terminated": (new_sweep(light=False), ("num_sm=1,2,3", ON_N1)),
        "not queued again": (new_sweep(), ("num_sm=1,2,3", NOT_AGAIN_ON_N1)),
        "node": (new_sweep(), ("num_sm=1,2,3", f"hydra.launcher.gpus_per_node={GPUS_PER_NODE}")),
    }
    for name, (sweep, arguments) in sweeps.items():
        if name == "node":
            sweeps["waiting"][0].wait_until_begun("tp2_sm2")
        sweep.hold("tp2_sm2", "tp2_sm5")
        sweep.start(*arguments)
    for sweep, _ in sweeps.values():
        sweep.wait_until_begun("tp2_sm2")
    return {name: sweep for name, (sweep, _) in sweeps.items()}


def test_points_of_a_waiting_job_that_is_cancelled_are_left_out(slurm: Slurm, begun: dict[str, SlurmSweep]) -> None:
    """Slurm forgets a cancelled element of an array at once if it has not begun."""
    sweep = begun["waiting"]
    waiting = [sweep.job_of(point) for point in points(3, 4)]
    slurm.run("scancel", *waiting)
    sweep.release()
    done = sweep.finish(1)
    assert sweep.statuses() == ok(points(2, 5))
    assert sorted(done.stderr.splitlines()) == [f"1 missing: Slurm job {job} was cancelled" for job in waiting]
    assert sweep.measured() == dict.fromkeys(points(2, 5), 1)


def test_a_job_that_is_told_to_end_waits_for_it_and_can_be_queued_again(
    slurm: Slurm, begun: dict[str, SlurmSweep]
) -> None:
    """As Slurm preempts where it sends nothing but SIGTERM: a job that ends by itself then is not queued again. With
    real workers."""
    sweep = begun["terminated"]
    (job,) = sweep.jobs()
    slurm.run("scancel", "--signal=TERM", job)
    slurm.wait_for(lambda: "stopped by SIGTERM" in sweep.logs(), "the end of the point")
    assert sweep.jobs()[job] == "RUNNING"
    slurm.run("scontrol", "requeue", job)
    sweep.release()
    sweep.finish()
    assert sweep.jobs().keys() == {job}
    assert sweep.statuses() == ok(points(1, 2, 3))
    assert sweep.measured() == {"tp2_sm1": 1, "tp2_sm2": 2, "tp2_sm3": 1}
    assert sweep.results()["tp2_sm2"].earlier_attempts == []


def test_where_a_job_may_not_be_queued_again_another_goes_on(slurm: Slurm, begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["not queued again"]
    slurm.run("scancel", "--signal=USR2", *sweep.jobs())
    slurm.wait_for(lambda: "SIGUSR2: stops after the running point" in sweep.logs(), "the signal")
    sweep.release()
    sweep.finish()
    assert sweep.statuses() == ok(points(1, 2, 3))
    assert sweep.measured() == dict.fromkeys(points(1, 2, 3), 1)
    assert len(sweep.jobs()) == 2
    assert sweep.restarts() == 0


@pytest.mark.usefixtures("mended")
def test_while_the_controller_is_away_jobs_go_on_and_one_that_is_killed_is_replaced(
    slurm: Slurm, begun: dict[str, SlurmSweep]
) -> None:
    """Slurm has forgotten that one when it is back, and keeps no accounts."""
    sweep = begun["controller"]
    sweep.wait_until_begun("tp2_sm5")
    killed = sweep.job_of("tp2_sm2")
    slurm.control("stop-controller")
    sweep.kill(killed)
    sweep.release("tp2_sm5")
    slurm.wait_for(lambda: sweep.statuses() == ok(points(1, 4, 5, 6)), "the results of the other job")
    slurm.control("start-controller")
    sweep.release()
    sweep.finish()
    assert sweep.statuses() == ok(points(1, 2, 3, 4, 5, 6))
    assert sweep.measured() == {**dict.fromkeys(points(1, 3, 4, 5, 6), 1), "tp2_sm2": 2}


@pytest.mark.usefixtures("mended")
def test_a_node_that_fails_costs_no_result(slurm: Slurm, begun: dict[str, SlurmSweep]) -> None:
    sweep = begun["node"]
    (node,) = sweep.jobs("%N").values()
    slurm.control("fail-node", node)
    sweep.release()
    sweep.finish()
    assert sweep.statuses() == ok(points(1, 2, 3))
    assert sweep.measured() == {**dict.fromkeys(points(1, 3), 1), "tp2_sm2": 2}
    assert node not in sweep.jobs("%N").values()
