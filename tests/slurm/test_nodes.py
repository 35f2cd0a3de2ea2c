"""Points that span the two nodes of a Slurm: what they measure, and whatever happens to a node, a task or an agent.

All sweeps run at once, with light groups but for the real ones. One of them is preempted, which the others' partition
prevents; then it has a node fail.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from subprocess import CompletedProcess

import pytest

from overlap_sweep.results.run_directory import log_file
from overlap_sweep.workloads.fsdp.result import TrainingRun
from overlap_sweep.workloads.job.result import JobRun
from overlap_sweep.workloads.tp_training.result import TpTrainingRun
from tests.composed import TINY_FSDP, TINY_MODEL, TINY_OPTIONS
from tests.slurm.cluster import GPUS_PER_NODE, Slurm
from tests.slurm.sweep import SlurmSweep, ok

pytestmark = pytest.mark.slurm

TWO_NODES = ("runtime.nodes=2", "runtime.device=cpu", "hydra.launcher.gpus_per_node=null")
FSDP = ("workload=fsdp", "profile=none", "hydra.sweep.subdir='p${repetition}'", "runtime.timeout_factor=0")
LIGHT = (*FSDP, *TWO_NODES, "distributed.dp_size=4")
PREEMPTED = (*LIGHT, "hydra.launcher.gpus_per_node=2", "repetition=1,2,3,4")
METRIC = (*TWO_NODES, "workload=job", "profile=none", "job.attach=false", "job.metric=ms: ([0-9.]+)")
SERVED = 3
"""A rank on the second node."""

PLANS: dict[str, list[dict[str, object]]] = {
    "dying": [
        {"repetition": 2, "rank": SERVED, "fault": "kills_agent", "times": 1},
        {"repetition": 3, "rank": SERVED, "fault": "segfault", "times": 1},
        {"repetition": 4, "rank": SERVED, "fault": "kills_job", "times": 1},
    ],
    "cancelled": [{"repetition": 3, "rank": 0, "fault": "kills_job", "times": 1}],
    "late": [{"task": 1, "fault": "waits", "times": 1}, {"agent": 1, "fault": "waits", "times": 1}],
}
SWEEPS: dict[str, tuple[str, ...]] = {
    "dying": (*LIGHT, "repetition=1,2,3,4,5", "runtime.retries=1"),
    "late": (*LIGHT, "repetition=1,2", "runtime.start_timeout_s=8", "runtime.retries=0"),
    "cancelled": (*LIGHT, "repetition=1,2,3"),
    "gpus": (
        *(*FSDP, "runtime.device=cuda", "distributed.dp_size=2,4,5", "hydra.launcher.gpus_per_node=2"),
        "hydra.sweep.subdir='dp${distributed.dp_size}'",
    ),
    "fsdp": (
        *TINY_FSDP,
        "hydra.launcher.nodes=2",
        "hydra.launcher.gpus_per_node=null",
        "distributed.dp_size=4",
        "profiling.enabled=true",
        "hydra.sweep.subdir=dp4",
    ),
    "tp_training": (
        *(*TINY_OPTIONS, *TINY_MODEL, *TWO_NODES, "tp_size=2", "dp_size=1,2"),
        "hydra.sweep.subdir='dp${dp_size}'",
    ),
    "job": (
        *(*METRIC, "job.metric_is=milliseconds", "job.skip_steps=2", "job.steps=8", "job.ranks=2"),
        f"job.command={shlex.quote(sys.executable)} talks.py {{node}} {{host}} {{port}}",
    ),
}
NOT_PREEMPTED = "hydra.launcher.partition=high"
TALKS = """\
import os, socket, sys, time
node, host, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("on", node, os.environ["SLURMD_NODENAME"], flush=True)
if node == 0:
    with socket.create_server((host, port)) as server:
        server.accept()[0].recv(1)
while node == 1:
    try:
        socket.create_connection((host, port)).send(b".")
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
for _ in range(12 * node):
    time.sleep(0.01)
    print("ms: 10", flush=True)
time.sleep(600)
"""
"""The second node measures once it has reached the first. Neither ends by itself."""
REAL = ("fsdp", "tp_training")
FAIL = ("late", "cancelled")


@dataclass(frozen=True)
class All:
    """The module's sweeps."""

    sweeps: dict[str, SlurmSweep]
    done: dict[str, Future[CompletedProcess[str]]]
    """How the launcher of each ended."""
    preempted: Future[SlurmSweep]
    """The one that is held in its third point after it was preempted."""

    def finished(self, name: str) -> SlurmSweep:
        self.done[name].result()
        return self.sweeps[name]


@pytest.fixture(scope="module")
def swept(
    slurm: Slurm, new_sweep: Callable[..., SlurmSweep], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[All]:
    sweeps = {name: new_sweep(plan=PLANS.get(name, ()), points=(), light=name not in REAL) for name in SWEEPS}
    sweeps["cancelled"].hold("p2")
    folder = tmp_path_factory.mktemp("talks")
    (folder / "talks.py").write_text(TALKS)
    also = {"job": [f"job.directory={folder}"]}
    with ThreadPoolExecutor(len(sweeps) + 1) as pool:
        # It takes longest.
        preempted = pool.submit(preempt, slurm, new_sweep(points=PREEMPTED))
        done = {
            name: pool.submit(sweep.run, *SWEEPS[name], *also.get(name, ()), NOT_PREEMPTED, status=int(name in FAIL))
            for name, sweep in sweeps.items()
        }
        yield All(sweeps, done, preempted)


def preempt(slurm: Slurm, sweep: SlurmSweep) -> SlurmSweep:
    """A sweep whose launcher is killed, and which has to make room on its second node. It finishes the point that it is
    at, another launcher adopts its job, and it is held in the next point."""
    sweep.hold("p2", "p3")
    sweep.start()
    sweep.wait_until_begun("p2")
    (job,) = sweep.jobs()
    sweep.kill_launcher()
    high = slurm.submit("sleep 1", "--nodelist=n2", partition="high", gpus=GPUS_PER_NODE - 1)
    told_to_make_room = re.compile(r"PreemptTime=\d")
    slurm.wait_for(lambda: told_to_make_room.search(slurm.run("scontrol", "show", "job", job)), "the preemption", 100)
    sweep.release("p2")
    slurm.wait_for_state(high, "RUNNING", "COMPLETED")
    sweep.start(f"resume={sweep.launch.directory}")
    sweep.wait_until_begun("p3")
    return sweep


def numbered(*repetitions: int) -> list[str]:
    return [f"p{repetition}" for repetition in repetitions]


def assert_nothing_left(sweep: SlurmSweep) -> None:
    """Neither processes on any node, nor files of the nodes' meetings, nor records of jobs."""
    sweep.wait_for_empty_queue()
    sweep.slurm.wait_for(lambda: not sweep.processes(), "the end of all processes")
    assert list((sweep.launch.directory / ".slurm").glob("*[!g]")) == []


def test_a_cancelled_job_ends_on_both_nodes_and_one_whose_first_task_dies_does_and_is_replaced(
    slurm: Slurm, swept: All
) -> None:
    sweep = swept.sweeps["cancelled"]
    sweep.wait_until_begun("p2")
    (job,) = sweep.jobs()
    slurm.run("scancel", job)
    assert f"2 missing: Slurm job {job} was cancelled" in swept.done["cancelled"].result().stderr.splitlines()
    assert_nothing_left(sweep)
    sweep.release()
    sweep.run(*SWEEPS["cancelled"], NOT_PREEMPTED, f"resume={sweep.launch.directory}")
    assert sweep.statuses() == ok(numbered(1, 2, 3))
    assert sweep.measured() == {"p1": 1, "p2": 2, "p3": 2}
    assert (len(sweep.jobs()), sweep.restarts()) == (3, 0)
    assert_nothing_left(sweep)


def test_nodes_follow_from_gpus_and_no_job_is_asked_for_what_cannot_be_spread(swept: All) -> None:
    sweep = swept.finished("gpus")
    results = sweep.results()
    assert {name: result.status for name, result in results.items()} == {**ok(["dp2", "dp4"]), "dp5": "skipped"}
    assert results["dp5"].error == "5 ranks cannot be spread evenly over runtime.nodes=3"
    assert [results[name].recorded["runtime"]["nodes"] for name in ("dp2", "dp4")] == [1, 2]
    assert "hosts" not in results["dp2"].environment
    assert len(results["dp4"].environment["hosts"]) == 2
    # GPUs of a node, CPUs of all, nodes.
    assert sorted(sweep.jobs("%b %C %D").values()) == ["gres:gpu:2 4 1", "gres:gpu:2 8 2"]
    assert_nothing_left(sweep)


def test_what_dies_on_the_second_node_costs_one_more_measurement(swept: All) -> None:
    sweep = swept.finished("dying")
    everything = numbered(1, 2, 3, 4, 5)
    assert sweep.statuses() == ok(everything)
    assert sweep.measured(rank=SERVED) == {**dict.fromkeys(everything, 1), **dict.fromkeys(numbered(2, 3, 4), 2)}
    assert sweep.measured("run", SERVED) == dict.fromkeys(everything, 1)
    earlier = {name: [attempt.error for attempt in result.earlier_attempts] for name, result in sweep.results().items()}
    assert [len(earlier[name]) for name in everything] == [0, 1, 1, 0, 0]
    for name in numbered(2, 3):
        assert re.match(r"rank [23] died \(", earlier[name][0])
    # Queued again for the lost node alone, not replaced.
    assert (len(sweep.jobs()), sweep.restarts()) == (1, 1)
    assert_nothing_left(sweep)


def test_a_node_that_never_joins_has_the_job_queued_again_and_an_agent_that_hangs_fails_its_point(swept: All) -> None:
    sweep = swept.finished("late")
    assert sweep.statuses() == {"p1": "failed", "p2": "ok"}
    assert "p1: node 1 of 2 has not joined within runtime.start_timeout_s=8; see its log, " in sweep.logs()
    first_line = str(sweep.results()["p1"].error).splitlines()[0]
    assert re.fullmatch(
        r"only 2 of 4 ranks joined within runtime\.start_timeout_s=8; the others are on node 1 \(.+\)", first_line
    )
    assert (len(sweep.jobs()), sweep.restarts()) == (1, 1)
    assert_nothing_left(sweep)


def test_fsdp_trains_on_two_nodes_and_every_rank_leaves_its_trace(swept: All) -> None:
    sweep = swept.finished("fsdp")
    (result,) = sweep.results().values()
    assert (result.status, result.recorded["runtime"]["nodes"], len(result.environment["hosts"])) == ("ok", 2, 2)
    assert result.measured_as(TrainingRun).step
    assert {f"trace_rank{rank}.json.gz" for rank in range(4)} <= {*result.traces}
    for name in (*result.traces, *map(log_file, range(2))):
        assert (sweep.launch.directory / "dp4" / name).exists()
    assert_nothing_left(sweep)


def test_tensor_parallel_groups_are_within_nodes_or_the_point_is_skipped(swept: All) -> None:
    sweep = swept.finished("tp_training")
    results = sweep.results()
    assert {name: result.status for name, result in results.items()} == {"dp1": "skipped", "dp2": "ok"}
    assert len(results["dp2"].environment["hosts"]) == 2
    assert results["dp2"].measured_as(TpTrainingRun).steps
    assert str(results["dp1"].error).startswith("tp_size=2 does not fit the single rank of a node")
    assert_nothing_left(sweep)


def test_a_users_command_runs_on_both_nodes_which_reach_each_other(swept: All) -> None:
    sweep = swept.finished("job")
    (result,) = sweep.results().values()
    assert result.measured_as(JobRun).step.median_us == 10_000.0
    logs = [(sweep.launch.directory / result.name / log_file(node)).read_text().splitlines() for node in range(2)]
    assert [log[0] for log in logs] == ["on 0 n1", "on 1 n2"]
    # What would have slept on is ended on both.
    assert_nothing_left(sweep)


@pytest.fixture
def mended(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.mend()


@pytest.mark.usefixtures("mended")
def test_a_preemption_and_then_a_node_that_fails_cost_no_result(slurm: Slurm, swept: All) -> None:
    """Nor does the end of the launcher that waits."""
    sweep, everything = swept.preempted.result(), numbered(1, 2, 3, 4)
    (job,) = sweep.jobs()
    slurm.control("fail-node", "n2")
    slurm.wait_for(lambda: not sweep.processes(), "the end of the job on the node that is left")
    sweep.release()
    # There is no other node to begin on.
    slurm.wait_for_state(job, "PENDING")
    slurm.control("restore-node", "n2")
    sweep.finish()
    assert sweep.statuses() == ok(everything)
    assert sweep.measured("run", SERVED) == dict.fromkeys(everything, 1)
    assert sweep.measured() == {**dict.fromkeys(everything, 1), "p3": 2}
    # Slurm may fail to begin it a third time, so soon after the node has come back; then another job goes on.
    assert (job in sweep.jobs(), sweep.restarts()) in ((True, 1), (True, 2))
    assert_nothing_left(sweep)
