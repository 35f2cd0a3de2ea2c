"""Another node as the launcher sees it, and what serves there: a process of its own, over TCP."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from overlap_sweep.errors import NodeLost
from overlap_sweep.keeper import Command, NotStarted, Program
from overlap_sweep.runtime import channel, meeting, nodes, serve
from overlap_sweep.runtime.channel import connect
from overlap_sweep.runtime.meeting import Place, read_meeting
from overlap_sweep.runtime.nodes import Nodes, OtherNode
from tests.sweeps import wait_for
from tests.two_nodes import start_serving
from tests.workloads.job.commands import begun

Serving = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """Starts the process that serves as the second node."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(start_serving(tmp_path / "meeting", tmp_path / "node1.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Nodes]:
    """A launch on two nodes."""
    found = Nodes(Place(0, 2, tmp_path / "meeting", ("localhost",)))
    yield found
    found.close()


@pytest.fixture
def served(launch: Nodes, serving: Serving) -> tuple[OtherNode, subprocess.Popen[bytes]]:
    """The second node, and the process that serves there."""
    process = serving()
    _, other = launch.take(2, 30.0)
    assert isinstance(other, OtherNode)
    return other, process


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def sleeping(other: OtherNode, log: Path, script: str = "echo $$; sleep 600") -> tuple[Command, int]:
    """A command there and the pid that it prints."""
    found = begun(Command(Program(["sh", "-c", script], os.environ, log, grace_s=1.0), other.start))
    wait_for(lambda: log.read_text().endswith("\n"), 10)
    return found, int(log.read_text())


def test_both_nodes_know_each_other_s_addresses(launch: Nodes, serving: Serving) -> None:
    serving()
    own, other = launch.take(2, 30.0)
    assert isinstance(other, OtherNode)
    assert (other.number, other.launcher, other.interface) == (1, "localhost", "lo")
    assert own.host == other.host
    assert own.address == other.address
    assert own.interface == "lo"
    assert launch.take(1, 0.0) == [own]


def test_a_command_there_is_as_one_here(
    served: tuple[OtherNode, subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, _ = served
    log = tmp_path / "log"
    log.write_text("before\n")
    # The launcher's alone, which the command is not to have; and one that both have and it alone is to lack.
    monkeypatch.setenv("OF_LAUNCHER", "1")
    environment = {**os.environ, "GIVEN": "here"}
    del environment["PATH"]
    script = 'echo "$GIVEN ${OF_LAUNCHER-none} ${HOME-none}"; pwd; while [ ! -e go ]; do /bin/sleep 0.02; done; exit 7'
    command = begun(Command(Program(["/bin/sh", "-c", script], environment, log, tmp_path), other.start))
    assert command.wait(0.2) is None
    (tmp_path / "go").touch()
    assert command.wait(10.0) == 7
    assert command.wait() == 7
    command.end()
    assert log.read_text().splitlines() == ["before", f"here none {os.environ['HOME']}", str(tmp_path)]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_command_there_can_be_ended_with_all_of_its_processes(
    served: tuple[OtherNode, subprocess.Popen[bytes]], tmp_path: Path, at_once: bool
) -> None:
    other, _ = served
    command, pid = sleeping(other, tmp_path / "log", "setsid sleep 600 & echo $!; wait")
    command.end(at_once=at_once)
    assert not is_alive(pid)
    command.end()
    assert command.status is None


def test_what_an_ended_command_leaves_ends_too(
    served: tuple[OtherNode, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    other, _ = served
    command, pid = sleeping(other, tmp_path / "log", "sleep 600 & echo $!")
    assert command.wait(10.0) == 0
    wait_for(lambda: not is_alive(pid), 10)


def test_a_command_that_cannot_be_started_says_why(
    served: tuple[OtherNode, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    other, _ = served
    command = Command(Program(["no_such_program"], os.environ, tmp_path / "log"), other.start)
    with pytest.raises(NotStarted, match="No such file"):
        command.wait(10.0)
    command.end()
    command = Command(Program(["true"], os.environ, tmp_path / "log", tmp_path / "nowhere"), other.start)
    with pytest.raises(OSError, match=r"^node 1 \(.+\): .*No such file") as problem:
        command.wait(10.0)
    assert not isinstance(problem.value, NodeLost | NotStarted)
    command.end()
    # The node is as good as before.
    assert Command(Program(["true"], os.environ, tmp_path / "log"), other.start).wait(10.0) == 0


def test_a_killed_serving_process_is_a_lost_node_at_once_and_leaves_nothing(
    launch: Nodes, served: tuple[OtherNode, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    other, serving_process = served
    command, pid = sleeping(other, tmp_path / "log")
    assert not launch.lost
    serving_process.kill()
    with pytest.raises(NodeLost, match=r"node 1 \(.+\) is lost"):
        command.wait(60.0)
    assert launch.lost
    wait_for(lambda: not is_alive(pid), 10)
    with pytest.raises(NodeLost):
        command.wait()
    command.end()
    with pytest.raises(NodeLost, match="is lost"):
        other.start(Program(["true"], os.environ, tmp_path / "log"))
    with pytest.raises(NodeLost, match="is lost"):
        launch.take(2, 30.0)
    assert len(launch.take(1, 0.0)) == 1


def test_a_loss_is_noticed_when_the_node_is_needed(
    launch: Nodes, served: tuple[OtherNode, subprocess.Popen[bytes]]
) -> None:
    _, serving_process = served
    serving_process.kill()
    serving_process.wait()
    with pytest.raises(NodeLost, match="is lost"):
        launch.take(2, 30.0)


def test_a_node_that_does_not_end_a_killed_process_is_given_up(
    served: tuple[OtherNode, subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "KILLED_S", 0.3)
    other, serving_process = served
    command, pid = sleeping(other, tmp_path / "log")
    serving_process.send_signal(signal.SIGSTOP)
    command.end(at_once=True)
    assert other.lost
    serving_process.send_signal(signal.SIGCONT)
    assert serving_process.wait(10.0) == 1
    wait_for(lambda: not is_alive(pid), 10)


def test_a_launch_that_ends_in_order_ends_what_serves_it(
    launch: Nodes, served: tuple[OtherNode, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    other, serving_process = served
    _, pid = sleeping(other, tmp_path / "log")
    launch.close()
    assert serving_process.wait(10.0) == 0
    assert not is_alive(pid)
    assert not (tmp_path / "meeting").exists()


def test_without_its_launcher_a_node_fails_and_leaves_nothing(
    served: tuple[OtherNode, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    other, serving_process = served
    _, pid = sleeping(other, tmp_path / "log")
    # As the kernel does when the launcher is killed.
    other.connection.close()
    assert serving_process.wait(10.0) == 1
    assert "node 1: the launch has ended or no longer answers" in (tmp_path / "node1.log").read_text()
    assert not is_alive(pid)


def test_a_node_that_serves_from_the_start_waits_for_the_launcher(tmp_path: Path, serving: Serving) -> None:
    process = serving()
    log = tmp_path / "node1.log"
    wait_for(lambda: log.read_text() == f"node 1: waits for the launcher's {tmp_path / 'meeting'}\n", 10)
    launch = Nodes(Place(0, 2, tmp_path / "meeting", ("localhost",)))
    assert len(launch.take(2, 30.0)) == 2
    launch.close()
    assert process.wait(10.0) == 0


def test_a_file_that_a_killed_launch_left_is_not_believed(tmp_path: Path, serving: Serving) -> None:
    gone = Nodes(Place(0, 2, tmp_path / "meeting", ("localhost",)))
    gone._door.close()
    process = serving()
    wait_for((tmp_path / "node1.log").read_text, 10)
    launch = Nodes(Place(0, 2, tmp_path / "meeting", ("localhost",)))
    assert len(launch.take(2, 30.0)) == 2
    launch.close()
    assert process.wait(10.0) == 0


def test_a_launcher_that_never_comes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PATIENCE_S", 0.3)
    monkeypatch.setattr(serve, "RETRY_S", 0.1)
    with pytest.raises(serve.UserError, match=r"^node 1: no launcher came to .*meeting within 0.3 s; start all nodes"):
        serve.serve(Place(1, 2, tmp_path / "meeting", ()))


def test_a_node_that_never_comes_is_waited_for_once(launch: Nodes, serving: Serving) -> None:
    with pytest.raises(NodeLost, match=r"node 1 of 2 has not joined within runtime\.start_timeout_s=0\.2; "):
        launch.take(2, 0.2)
    assert launch.lost
    started = time.monotonic()
    with pytest.raises(NodeLost, match="has not joined"):
        launch.take(2, 60.0)
    assert time.monotonic() - started < 30.0


def test_strangers_don_t_count_as_nodes(launch: Nodes, serving: Serving, tmp_path: Path) -> None:
    found = read_meeting(tmp_path / "meeting")
    assert isinstance(found, meeting.Meeting)
    assert found.hosts[0] == "localhost"
    with pytest.raises(NodeLost), connect_silently(found):
        launch.take(2, 0.3)


def test_strangers_don_t_keep_a_node_waiting(launch: Nodes, serving: Serving, tmp_path: Path) -> None:
    """Three say nothing and one a byte now and then, all before the node comes."""
    found = read_meeting(tmp_path / "meeting")
    assert found
    with ExitStack() as open_ones, ThreadPoolExecutor() as others:
        *_, slow = [open_ones.enter_context(socket.create_connection(("localhost", found.port))) for _ in range(4)]
        over = threading.Event()

        def drip() -> None:
            with suppress(ConnectionError):
                while not over.wait(0.2):
                    slow.send(b"x")

        others.submit(drip)
        serving()
        began = time.monotonic()
        try:
            assert len(launch.take(2, 30.0)) == 2
        finally:
            over.set()
        assert time.monotonic() - began < channel.PROOF_S


def connect_silently(found: meeting.Meeting) -> subprocess.Popen[bytes]:
    """Somebody who connects and asks for a web page."""
    ask = (
        "import socket, sys; socket.create_connection(('localhost', int(sys.argv[1]))).sendall(b'GET / HTTP/1.1\\r\\n')"
    )
    return subprocess.Popen([sys.executable, "-c", ask, str(found.port)])


def test_a_launch_by_hand_that_ends_at_once_takes_leave_of_who_comes_a_little_later(
    tmp_path: Path, serving: Serving
) -> None:
    launch = Nodes(Place(0, 2, tmp_path / "meeting", ("localhost",), ("localhost", 29500)))
    process = serving()
    started = time.monotonic()
    launch.close()
    assert process.wait(10.0) == 0
    assert time.monotonic() - started < nodes.LEAVE_S


def test_who_comes_after_the_end_of_a_slurm_job_s_launch_ends_too(tmp_path: Path, serving: Serving) -> None:
    Nodes(Place(0, 2, tmp_path / "meeting", ("localhost",))).close()
    assert serving().wait(10.0) == 0
    assert (tmp_path / "meeting").exists()


def test_a_launch_by_hand_has_ended_once_the_first_torchrun_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "GONE_S", 0.2)
    monkeypatch.setattr(serve, "RETRY_S", 0.1)
    with channel.listen(None) as torchrun:
        place = Place(1, 2, tmp_path / "meeting", ("localhost",), ("localhost", channel.port_of(torchrun)))
        monkeypatch.setattr(serve, "PATIENCE_S", 1.0)
        with pytest.raises(serve.UserError, match="no launcher came to"):
            serve.serve(place)
    monkeypatch.setattr(serve, "PATIENCE_S", 20.0)
    with pytest.raises(serve.UserError, match=r"^node 1: the launch has ended; node 0 on localhost says why\.$"):
        serve.serve(place)


def test_who_knows_another_secret_does_not_join(launch: Nodes, tmp_path: Path) -> None:
    found = read_meeting(tmp_path / "meeting")
    assert found
    with ThreadPoolExecutor() as others:
        theirs = others.submit(connect, f"localhost:{found.port}", "guessed", 5.0)
        with pytest.raises(NodeLost, match="has not joined"):
            launch.take(2, 1.0)
        with pytest.raises(ConnectionError):
            theirs.result()
