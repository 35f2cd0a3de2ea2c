"""Commands of points that span two nodes: the second is a process on this machine."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import NodeLost, PointFailed
from overlap_sweep.keeper import Command, Program
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.run_directory import Result, clear, log_file, trace_file
from overlap_sweep.runtime.point import measure
from overlap_sweep.workloads import Here
from overlap_sweep.workloads.job import WORKLOAD, command
from overlap_sweep.workloads.job import nodes as job_nodes
from overlap_sweep.workloads.job.command import Place, command_line
from overlap_sweep.workloads.job.result import JobRun
from tests.sweeps import ROOT, wait_for
from tests.test_keeper import LEAVES, python
from tests.two_nodes import TwoNodes, two_nodes
from tests.workloads.job.commands import Tagged, begun, job_point, recorded, recording, shell

TORCHRUN = (
    "torchrun --nnodes={nodes} --node-rank={node} --master-addr={host} --master-port={port} "
    "--nproc-per-node={ranks_per_node} train.py"
)
TWO = {"nodes": 2, "retries": 0}


def point_on_two(command: str, **changes: Any) -> dict[str, Any]:
    runtime = {**TWO, **changes.pop("runtime", {})}
    return job_point(command, **{"ranks": 2, **changes}, runtime=runtime)


def test_placeholders_say_where_a_command_runs(tmp_path: Path) -> None:
    made = point_on_two(TORCHRUN, env={"NODE_RANK": "{node}"}, directory="on{node}", ranks=8)
    place = Place(1, "10.0.0.7", 4711)
    words = [*("torchrun", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.7", "--master-port=4711")]
    assert command.arguments(made, tmp_path, place) == [*words, "--nproc-per-node=4", "train.py"]
    assert command.environment(made, tmp_path, place) == {"NODE_RANK": "1"}
    assert command.working_folder(made, tmp_path, place).name == "on1"
    alone = job_point(TORCHRUN, ranks=2)
    words = [
        *("torchrun", "--nnodes=1", "--node-rank=0", "--master-addr=localhost"),
        *("--nproc-per-node=2", "train.py"),
    ]
    assert [word for word in command.arguments(alone, tmp_path) if "port" not in word] == words
    assert "--node-rank=NODE --master-addr=HOST --master-port=PORT" in command_line(made)
    assert "--node-rank=0 --master-addr=localhost" in command_line(alone)


def test_a_command_that_would_train_by_itself_on_each_node_is_refused() -> None:
    own = "torchrun --nproc-per-node={ranks_per_node} --nnodes={nodes} train.py"
    refused = WORKLOAD.refusal(point_on_two(own))
    assert refused
    assert "neither {node} nor {host}" in refused
    assert "\n" not in refused
    assert WORKLOAD.refusal(job_point(own)) is None
    assert WORKLOAD.refusal(point_on_two(TORCHRUN)) is None
    assert WORKLOAD.refusal(point_on_two(own, env={"NODE_RANK": "{node}"})) is None
    assert WORKLOAD.on_one_node(point_on_two(TORCHRUN)) is None


def test_host_and_port_make_no_other_point_but_nodes_do() -> None:
    made, alone = point_on_two(TORCHRUN), job_point(TORCHRUN, ranks=2, runtime={"nodes": 1, "retries": 0})
    assert command.same_point(made) == command.same_point(point_on_two(TORCHRUN))
    assert point_key(made) != point_key(alone)
    assert "{port}" in made.job.command


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with two_nodes(tmp_path_factory.mktemp("launch")) as found:
        yield found


@pytest.fixture(autouse=True)
def _settles_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_nodes, "SETTLE_S", 1.0)


def measured(folder: Path, command: str, **changes: Any) -> Result:
    """The point's result. None of its processes is left on any node, whatever it does."""
    tag, directory = Tagged(), folder / "run"
    directory.mkdir(exist_ok=True)
    clear(directory)
    env = {**changes.pop("env", {}), **tag.variables}
    try:
        return measure(point_on_two(command, env=env, **changes), directory)
    finally:
        assert tag.processes() == []


def both_record(folder: Path) -> str:
    """Returns the command that puts a rank's recording into its run: the file is whole as soon as it is there."""
    recorded(folder / "made", *(recording(rank, 2) for rank in range(2)))
    return (
        f"cp {folder}/made/job_rank{{node}}.json {{run}}/{{node}} && mv {{run}}/{{node}} {{run}}/job_rank{{node}}.json"
    )


def test_each_node_has_its_place_and_its_interface(launch: TwoNodes, tmp_path: Path) -> None:
    say = "echo {node} {nodes} {ranks} {ranks_per_node} {host} {port} $GLOO_SOCKET_IFNAME"
    result = measured(tmp_path, shell(f"{say}; {both_record(tmp_path)}; sleep 600"))
    assert result.status == "ok", result.error
    assert len(result.environment["hosts"]) == 2
    said = [(tmp_path / "run" / log_file(node)).read_text().splitlines()[0].split() for node in range(2)]
    assert [one[:5] + one[6:] for one in said] == [[node, "2", "2", "1", "127.0.0.1", "lo"] for node in "01"]
    assert said[0][5] == said[1][5]


def test_variables_are_those_of_each_node_and_may_name_another_interface(launch: TwoNodes, tmp_path: Path) -> None:
    say = "echo $WHERE $GLOO_SOCKET_IFNAME $PYTHONPATH"
    env = {"WHERE": "{run}/{node}", "GLOO_SOCKET_IFNAME": "eth7", "PYTHONPATH": "on{node}"}
    result = measured(tmp_path, shell(f"{say}; {both_record(tmp_path)}"), env=env)
    assert result.status == "ok", result.error
    run = tmp_path / "run"
    said = [(run / log_file(node)).read_text().split() for node in range(2)]
    assert said == [[f"{run}/{node}", "eth7", f"on{node}:{ROOT}"] for node in range(2)]


def test_a_command_that_is_to_finish_is_waited_for_on_all_nodes(launch: TwoNodes, tmp_path: Path) -> None:
    late = "if [ {node} = 1 ]; then sleep 1; touch {run}/finished; fi"
    result = measured(tmp_path, shell(f"{both_record(tmp_path)}; {late}"), finish=True)
    assert (result.status, (tmp_path / "run" / "finished").exists()) == ("ok", True)


def test_what_is_printed_while_a_node_is_ended_is_left_out(launch: TwoNodes, tmp_path: Path) -> None:
    wordy = f'trap "echo a page; exit" TERM; echo last words; {both_record(tmp_path)}; while :; do sleep 0.02; done'
    assert measured(tmp_path, shell(wordy)).status == "ok"
    for node in range(2):
        said, ended = (tmp_path / "run" / log_file(node)).read_text().splitlines()
        assert (said, "7 bytes" in ended) == ("last words", True)


def test_a_metric_may_be_printed_on_any_node(launch: TwoNodes, tmp_path: Path) -> None:
    printing = "if [ {node} = 1 ]; then for i in 1 2 3 4 5; do echo tps: $i; done; fi; sleep 600"
    result = measured(tmp_path, shell(printing), metric="tps: ([0-9]+)")
    assert result.status == "ok", result.error
    assert result.measured_as(JobRun).step.samples_us == [1e6 / rate for rate in (2, 3, 4, 5)]


@pytest.mark.parametrize("bad", [0, 1])
def test_who_fails_on_a_node_is_named_with_the_end_of_its_log(launch: TwoNodes, tmp_path: Path, bad: int) -> None:
    """The other node has lost it, and may say so first."""
    raises = "echo Traceback \\(most recent call last\\):; echo ValueError: no such data; sleep 0.3; exit 3"
    lost = "echo Traceback \\(most recent call last\\):; echo RuntimeError: Connection closed by peer; exit 1"
    result = measured(tmp_path, shell(f"if [ {{node}} = {bad} ]; then {raises}; else {lost}; fi"))
    assert result.status == "failed"
    first, *log = str(result.error).splitlines()
    assert f"on node {bad} (" in first
    assert "ended with exit status 3: ValueError: no such data" in first
    assert log == ["Traceback (most recent call last):", "ValueError: no such data"]


def test_a_node_that_ends_badly_ends_the_others(launch: TwoNodes, tmp_path: Path) -> None:
    result = measured(tmp_path, shell("if [ {node} = 1 ]; then exit 4; fi; sleep 600"))
    assert (result.status, "on node 1 (" in str(result.error)) == ("failed", True)


def test_a_node_that_hangs_is_ended_in_time_whatever_it_does(launch: TwoNodes, tmp_path: Path) -> None:
    """On the second node processes are left behind that hide and are deaf to signals."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    leaves = shell(f"mkdir {{run}}/{{node}} && cd {{run}}/{{node}} && {sys.executable} {tmp_path}/leaves.py 600")
    result = measured(tmp_path, leaves, runtime={"timeout_s": 1.5})
    assert result.status == "timeout"
    assert (tmp_path / "run" / "1" / "ready").exists()


def test_what_cannot_be_started_on_a_node_fails_for_good(launch: TwoNodes, tmp_path: Path) -> None:
    for name in ("a0", "b0", "b1"):
        (tmp_path / name).mkdir()
    (tmp_path / "b0" / "train.sh").write_text("#!/bin/sh\nsleep 600\n")
    (tmp_path / "b0" / "train.sh").chmod(0o755)
    for directory, reason in (("a{node}", "cannot be started"), ("b{node}", "./train.sh, which cannot be run")):
        result = measured(tmp_path, "./train.sh" if "b" in directory else "true", directory=f"{tmp_path}/{directory}")
        assert (result.status, "node 1 (" in str(result.error), reason in str(result.error)) == ("failed", True, True)


def test_a_lost_node_gives_the_point_up(tmp_path: Path) -> None:
    tag, run = Tagged(), tmp_path / "run"
    run.mkdir()
    with two_nodes(tmp_path) as launch:
        made = point_on_two(shell("touch {run}/{node}; if [ {node} = 1 ]; then kill -9 $LOSES; fi; sleep 600"))
        made.job.env = {**tag.variables, "LOSES": str(launch.serving.pid)}
        began = time.monotonic()
        with pytest.raises(NodeLost):
            measure(made, run)
        assert time.monotonic() - began < 60
        assert not (run / "result.json").exists()
    wait_for(lambda: tag.processes() == [], 20)


def test_a_launcher_that_is_gone_leaves_nothing_on_other_nodes(tmp_path: Path) -> None:
    tag = Tagged()
    with two_nodes(tmp_path) as launch:
        _, other = launch.nodes.take(2, 0.0)
        words, log = python(LEAVES, "600"), tmp_path / "log"
        running = begun(Command(Program(words, tag.environment, log, tmp_path, 0.1), other.start))
        wait_for((tmp_path / "ready").exists, 20)
        # Two keepers, the command, and four that it left.
        assert len(tag.processes()) == 7
        other.connection.close()
        assert launch.serving.wait(20) == 1
        assert tag.processes() == []
        with pytest.raises(NodeLost):
            wait_for(lambda: running.wait(0.1) is not None, 20)
        running.end()


@pytest.mark.end_to_end
def test_a_training_on_two_nodes(launch: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = f"{ROOT}/docs/train.py --size 64 --batch 8"
    command = TORCHRUN.replace("torchrun", f"{sys.executable} -m torch.distributed.run").replace("train.py", script)
    result = measured(tmp_path, command, attach=True, profile_steps=1)
    assert result.status == "ok", result.error
    assert result.traces == [trace_file(rank) for rank in range(2)]
    assert len(result.environment["hosts"]) == 2
    assert len(result.measured_as(JobRun).step.samples_us) == 4
    assert result.warnings == []


@pytest.mark.parametrize(
    ("word", "content", "reason"),
    [
        ("no_such_program", None, "No such file or directory"),
        ("./text", "echo", "Permission denied"),
        ("./no_interpreter", "#!/no/such/sh\n", "No such file or directory"),
        ("./no_program", "\x7fELF", "Exec format error"),
        # It is not looked for in the folder.
        ("train", "#!/bin/sh\n", "No such file or directory"),
    ],
)
def test_what_cannot_be_started_fails_for_good(tmp_path: Path, word: str, content: str | None, reason: str) -> None:
    tag = Tagged()
    if content:
        (tmp_path / word).write_text(content)
        (tmp_path / word).chmod(0o644 if word == "./text" else 0o755)
    program = Program([word], tag.environment, tmp_path / "log", tmp_path)
    with (
        pytest.raises(PointFailed, match=rf"starts {word}, which cannot be run \({reason}\)") as failed,
        job_nodes.RunningOnNodes([program], Here(environment={}, limit_s=60.0)),
    ):
        pass
    assert failed.value.final
    assert tag.processes() == []
