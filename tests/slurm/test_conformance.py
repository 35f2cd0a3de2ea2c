"""What any cluster must do for a sweep, over the smallest one and over a real Slurm."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.slurm import local_cluster
from tests.slurm.sweep import SUBMITTED, ClusterSweep, SlurmSweep, ok, points
from tests.sweeps import ROOT

NewSweep = Callable[..., ClusterSweep]

THREE = ("num_sm=1,2,3",)
ON_NODES = (
    *("workload=fsdp", "profile=none", "runtime.device=cpu", "runtime.timeout_factor=0", "distributed.dp_size=6"),
    "hydra.sweep.subdir='n${runtime.nodes}_p${repetition}'",
)
ENTRY_POINT = f"[overlap_sweep.clusters]\nlocal = {local_cluster.__name__}:CLUSTER\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which a package brings the smallest cluster."""
    site = tmp_path_factory.mktemp("site")
    info = site / "local_cluster-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: local_cluster\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    folder = str(tmp_path_factory.mktemp("cluster"))
    return {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT))), local_cluster.FOLDER: folder}


@pytest.fixture(scope="module", params=["local", pytest.param("slurm", marks=pytest.mark.slurm)])
def new_sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewSweep]:
    """Makes a sweep on the cluster."""
    with ExitStack() as closed, pytest.MonkeyPatch.context() as patch:
        if request.param == "slurm":
            cluster = request.getfixturevalue("slurm")
            # Also for what this process asks of it.
            patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])

            def made(**given: object) -> ClusterSweep:
                sweep = SlurmSweep(cluster, tmp_path_factory.mktemp("sweep"), **given)
                sweep.through.append("hydra.launcher.gpus_per_node=null")
                return sweep

        else:
            environment = request.getfixturevalue("installed")
            patch.setenv(local_cluster.FOLDER, environment[local_cluster.FOLDER])

            def made(**given: object) -> ClusterSweep:
                return ClusterSweep(local_cluster.CLUSTER, environment, tmp_path_factory.mktemp("sweep"), **given)  # type: ignore[arg-type]

        yield lambda **given: closed.enter_context(closing(made(**given)))


def states_of(sweep: ClusterSweep) -> dict[str, str | None]:
    """Returns how each job of the sweep has ended, None for those that run, as the cluster says it."""
    states = sweep.cluster.states({record.job_id: Path(record.log) for record in sweep.job_records()})
    assert states is not None
    return {job_id: state.end for job_id, state in states.items()}


def test_points_are_measured_in_jobs_and_one_that_kills_its_job_fails_alone(new_sweep: NewSweep) -> None:
    sweep = new_sweep(plan=[{"num_sm": 2, "fault": "kills_job", "rank": 0}])
    done = sweep.run("num_sm=1,2,3,4", "hydra.launcher.points_per_job=3", "runtime.retries=1", status=1)
    assert "4 points in 2 jobs" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("3 ok, 1 failed; ")
    assert sweep.statuses() == {**ok(points(1, 3, 4)), "tp2_sm2": "failed"}
    assert sweep.measured() == {**dict.fromkeys(points(1, 3, 4), 1), "tp2_sm2": 2}
    result = sweep.results()["tp2_sm2"]
    (attempt,) = result.earlier_attempts
    ended = rf"{sweep.cluster.title} job (\S+) ended: FAILED"
    first, second = re.match(ended, attempt.error), re.match(ended, str(result.error))
    assert first
    assert second
    assert first[1] != second[1]
    assert attempt.where == f"{sweep.cluster.title} job {first[1]}"
    assert sweep.records() == {}


def test_what_the_cluster_refuses_is_one_line_and_leaves_no_job(new_sweep: NewSweep) -> None:
    """Nor those that it had taken before."""
    sweep = new_sweep()
    # 20 CPUs for TP size 2, 80 for TP size 8 of the 64 that a node has.
    done = sweep.run("tp_size=2,8", "num_sm=1,2", "hydra.launcher.cpus_per_task=${tp_size}0", status=1)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {sweep.cluster.title} refused the job: ")
    assert (sweep.records(), sweep.results()) == ({}, {})
    sweep.wait_for(lambda: not sweep.launch.processes(), "the end of the job that was taken")


@pytest.mark.faults
def test_jobs_go_on_without_their_launcher_and_are_adopted_or_cancelled(new_sweep: NewSweep) -> None:
    sweep = new_sweep()
    sweep.hold("tp2_sm2")
    sweep.start(*THREE)
    sweep.wait_until_begun("tp2_sm2")
    done = sweep.end_launcher(signal.SIGINT, 130)
    (job,) = sweep.records()
    assert f"cancel with: {sweep.cluster.cancel_command([job])}" in done.stdout
    resume = f"resume={sweep.launch.directory}"
    assert states_of(sweep) == {job: None}

    # Another launcher would measure the same points, and one of another configuration others in the same place.
    title = sweep.cluster.title
    refused = sweep.run(*THREE, resume, torchrun=True, status=1)
    assert refused.stderr.startswith(f"error: {title} jobs are running in {sweep.launch.directory}; ")
    refused = sweep.run(*THREE, "workload.repeats=5", resume, status=1)
    assert f"error: {title} job {job} measures tp2_sm1 with a different configuration; " in refused.stderr

    second, said = sweep.start(*THREE, resume), ""
    assert second.stdout
    while "of an earlier launch" not in said:
        said += (line := second.stdout.readline())
        assert line, said
    assert f"2 points are in jobs of an earlier launch: {job}" in said
    assert sweep.cluster.cancel([job])
    done = sweep.finish(1)
    assert f"2 missing: {title} job {job} was cancelled" in done.stderr.splitlines()
    assert sweep.records() == {}
    sweep.wait_for(lambda: not sweep.launch.processes(), "the end of the cancelled job")
    sweep.release()
    done = sweep.run(*THREE, resume, torchrun=True)
    assert "already measured: 1 of 3 points" in done.stdout
    assert sweep.measured() == {"tp2_sm1": 1, "tp2_sm2": 2, "tp2_sm3": 1}


@pytest.mark.faults
def test_a_job_on_two_nodes_that_must_make_room_is_queued_again_and_goes_on(new_sweep: NewSweep) -> None:
    sweep = new_sweep(points=(*ON_NODES, *("runtime.nodes=2", "repetition=1,2,3")))
    sweep.hold("n2_p2")
    sweep.start()
    sweep.wait_until_begun("n2_p2")
    (job,) = sweep.records()
    tasks = [pid for pid, command in sweep.launch.processes().items() if SUBMITTED.match(command)]
    assert len(tasks) == 2
    for pid in tasks:
        os.kill(pid, signal.SIGUSR2)
    sweep.wait_for(lambda: "SIGUSR2: stops after the running point" in sweep.logs(), "the signal")
    sweep.release()
    done = sweep.finish()
    assert sweep.statuses() == ok(["n2_p1", "n2_p2", "n2_p3"])
    assert sweep.measured(rank=5) == dict.fromkeys(sweep.statuses(), 1)
    assert len(sweep.results()["n2_p1"].environment["hosts"]) == 2
    assert f"points that job {job} left" not in done.stdout, "queued again, not replaced"
    sweep.wait_for(lambda: not sweep.launch.processes(), "the end of the job")
