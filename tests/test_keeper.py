"""Whatever a command does, and whoever is killed in whatever order, none of its processes outlives it."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlap_sweep.errors import PointFailed
from overlap_sweep.keeper import Command, NotStarted, OwnKeeper, Program
from tests.sweeps import ROOT, wait_for
from tests.workloads.job.commands import Tagged, begun

LEAVES = """
import os, signal, sys, time
from pathlib import Path

def left(ready, *, session=False, daemon=False, deaf=False):
    if os.fork():
        return
    if session or daemon:
        os.setsid()
    if daemon and os.fork():
        os._exit(0)
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"{ready}.new").write_text(str(os.getpid()))
    Path(f"{ready}.new").rename(ready)
    time.sleep(600)

left("child")
left("session", session=True)
left("daemon", daemon=True)
left("deaf", session=True, deaf=True)
while not all(map(os.path.exists, ("child", "session", "daemon", "deaf"))):
    time.sleep(0.01)
Path("ready").touch()
time.sleep(float(sys.argv[1]))
"""
"""Starts four processes that would live for long, each of which can be overlooked in another way."""


def command_of(folder: Path, tag: Tagged, *words: str, grace_s: float = 0.1) -> Command:
    return Command(Program(words, tag.environment, folder / "log", folder, grace_s))


@contextmanager
def running(folder: Path, tag: Tagged, *words: str, grace_s: float = 0.1) -> Iterator[Command]:
    command = begun(command_of(folder, tag, *words, grace_s=grace_s))
    try:
        yield command
    finally:
        command.end()


def guard_of(command: Command) -> int:
    assert isinstance(command.keeper, OwnKeeper)
    return command.keeper.pid


def keeper_of(command: Command) -> int:
    return child_of(guard_of(command))


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script, *arguments]


def started(folder: Path, tag: Tagged) -> Command:
    """What runs LEAVES, once all of it is there."""
    found = begun(command_of(folder, tag, *python(LEAVES, "600")))
    wait_for((folder / "ready").exists, 20)
    assert len(tag.processes()) == 7
    return found


def test_it_starts_at_once(tmp_path: Path) -> None:
    def start_s() -> float:
        began = time.monotonic()
        with running(tmp_path, Tagged(), "true"):
            return time.monotonic() - began

    # 0.05 s on a machine that nobody else uses.
    assert min(start_s() for _ in range(5)) < 0.3


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", -9), ("kill -s USR1 $$", -signal.SIGUSR1)]
)
def test_the_command_s_own_end_is_reported(tmp_path: Path, script: str, status: int) -> None:
    tag = Tagged()
    with running(tmp_path, tag, "sh", "-c", f"echo said; echo so >&2; {script}") as command:
        assert command.wait(20) == status
    assert (tmp_path / "log").read_text() == "said\nso\n"
    assert tag.processes() == []


def test_a_command_has_its_environment_and_folder_and_no_input(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    with running(tmp_path, Tagged(), "sh", "-c", "pwd; cat; echo $OVERLAP_SWEEP_TEST | wc -c") as command:
        assert command.wait(20) == 0
        assert command.log_start == len("before\n")
    assert (tmp_path / "log").read_text() == f"before\n{tmp_path}\n33\n"


def test_ended_by_the_launcher_it_leaves_nothing(tmp_path: Path) -> None:
    tag = Tagged()
    command = started(tmp_path, tag)
    command.end()
    assert tag.processes() == []
    assert (command.status, command.left) == (None, [])


def test_what_it_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    tag = Tagged()
    with running(tmp_path, tag, *python(LEAVES, "0")) as command:
        assert command.wait(20) == 0
    assert tag.processes() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_job_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    tag = Tagged()
    command = started(tmp_path, tag)
    # The other has it from this one, or from its end.
    os.kill(guard_of(command) if number == signal.SIGTERM else keeper_of(command), number)
    wait_for(lambda: tag.processes() == [], 20)
    command.end()
    assert command.status is None, "it did not end by itself"


def test_the_signal_to_stop_after_the_point_does_not_reach_it(tmp_path: Path) -> None:
    """Cluster managers send it to every process; a command that knows nothing of it would end."""
    script = "echo blocked $(grep SigBlk /proc/self/status)"
    with running(tmp_path, Tagged(), "sh", "-c", script) as command:
        os.kill(keeper_of(command), signal.SIGUSR2)
        assert command.wait(20) == 0
    blocked = int((tmp_path / "log").read_text().split()[-1], 16)
    assert blocked == 1 << (signal.SIGUSR2 - 1)
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


VICTIMS = ("launcher", "guard", "keeper", "command", "session")
ORDERS = [
    *itertools.chain.from_iterable(itertools.permutations(VICTIMS[:3], count) for count in (1, 2)),
    *(("command", "guard", "keeper"), ("session", "keeper", "launcher"), ("guard", "command", "launcher", "session")),
]
"""Whoever is killed, one of launcher, guard and keeper lives."""


@contextmanager
def launched(folder: Path, tag: Tagged, *words: str) -> Iterator[dict[str, int]]:
    """A launcher that waits for a command in a process of its own: by name it, its command's keepers and processes."""
    launcher = os.fork()
    if not launcher:
        command = begun(command_of(folder, tag, *words))
        try:
            (folder / "guard").write_text(str(guard_of(command)))
            (folder / "guard").rename(folder / "launched")
            command.wait(600)
        finally:
            command.end()
            os._exit(1)
    try:
        wait_for(lambda: (folder / "ready").exists() and (folder / "launched").exists(), 20)
        guard = int((folder / "launched").read_text())
        keeper = child_of(guard)
        command = child_of(keeper)
        yield {"launcher": launcher, "guard": guard, "keeper": keeper, "command": command}
    finally:
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)


@pytest.mark.parametrize("names", ORDERS, ids="+".join)
def test_whoever_is_killed_nothing_is_left(tmp_path: Path, names: tuple[str, ...]) -> None:
    tag = Tagged()
    with launched(tmp_path, tag, *python(LEAVES, "600")) as pids:
        assert len(tag.processes()) == 7
        pids["session"] = int((tmp_path / "session").read_text())
        for name in names:
            os.kill(pids[name], signal.SIGKILL)
        wait_for(lambda: tag.processes() == [], 20)


def test_without_keepers_what_has_no_environment_is_known_by_its_session(tmp_path: Path) -> None:
    script = "env -i sleep 600 & echo $! > bare; touch ready; wait"
    with launched(tmp_path, Tagged(), "sh", "-c", script) as pids:
        bare = Path("/proc", (tmp_path / "bare").read_text().strip())
        assert bare.exists()
        for name in ("guard", "keeper"):
            os.kill(pids[name], signal.SIGKILL)
        wait_for(lambda: not bare.exists(), 20)


def test_if_all_are_killed_the_kernel_ends_the_command_and_who_asked_for_it(tmp_path: Path) -> None:
    """As ranks do, even inside a library that never returns. Then nothing is left that could end anything else."""
    script = """
import ctypes, os, time
from pathlib import Path
from overlap_sweep.keeper.process import end_with_parent
parent = os.getpid()
if os.fork():
    time.sleep(600)
end_with_parent(parent)
Path("ready").touch()
ctypes.PyDLL(None).sleep(600)
"""
    tag = Tagged(PYTHONPATH=str(ROOT))
    with launched(tmp_path, tag, sys.executable, "-S", "-c", script) as pids:
        assert len(tag.processes()) == 4
        for name in ("launcher", "guard", "keeper"):
            os.kill(pids[name], signal.SIGKILL)
        wait_for(lambda: tag.processes() == [], 20)


def test_who_asks_for_its_end_too_late_ends_at_once(tmp_path: Path) -> None:
    script = "import sys; from overlap_sweep.keeper.process import end_with_parent; end_with_parent(1234567); print(1)"
    with running(tmp_path, Tagged(PYTHONPATH=str(ROOT)), sys.executable, "-S", "-c", script) as command:
        assert command.wait(20) == 128 + signal.SIGKILL
    assert (tmp_path / "log").read_text() == ""


def test_killed_keepers_fail_the_point(tmp_path: Path) -> None:
    with running(tmp_path, Tagged(), "sleep", "600") as command:
        os.kill(keeper_of(command), signal.SIGKILL)
        with pytest.raises(PointFailed, match="was killed"):
            command.wait(20)


def test_a_launcher_may_end_with_lines_unread(tmp_path: Path) -> None:
    tag = Tagged()
    command = command_of(tmp_path, tag, *python(LEAVES, "600"))
    assert isinstance(command.keeper, OwnKeeper)
    wait_for((tmp_path / "ready").exists, 20)
    # As the kernel does when it is killed.
    command.keeper._channel.close()
    wait_for(lambda: tag.processes() == [], 20)
    command.keeper._process.wait()


def test_there_may_be_no_time_to_end_in_order(tmp_path: Path) -> None:
    tag = Tagged()
    script = "trap 'echo in order' TERM; echo said; while :; do sleep 0.02; done"
    command = begun(command_of(tmp_path, tag, "sh", "-c", script, grace_s=600.0))
    wait_for((tmp_path / "log").read_text, 20)
    command.end(at_once=True)
    command.end()
    assert tag.processes() == []
    assert (tmp_path / "log").read_text() == "said\n"


def test_a_command_may_kill_its_process_group(tmp_path: Path) -> None:
    tag = Tagged()
    with running(tmp_path, tag, "sh", "-c", "sleep 600 & kill -9 0") as command:
        assert command.wait(20) == -9
    assert tag.processes() == []


def test_it_may_end_in_order_and_its_last_words_are_not_hidden(tmp_path: Path) -> None:
    script = "trap 'echo a page of text; touch in_order; exit' TERM; echo last words; while :; do sleep 0.02; done"
    with running(tmp_path, Tagged(), "sh", "-c", script, grace_s=20.0):
        wait_for(lambda: "last words" in (tmp_path / "log").read_text(), 20)
    assert (tmp_path / "in_order").exists()
    said, ended = (tmp_path / "log").read_text().splitlines()
    assert said == "last words"
    assert ended.startswith("overlap_sweep: ")
    assert "15 bytes" in ended


def test_what_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    tag, before = Tagged(), len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(NotStarted, match="No such file"):
        begun(command_of(tmp_path, tag, "no_such_program"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Command(Program(["true"], tag.environment, tmp_path / "log", tmp_path / "nowhere"))
    assert tag.processes() == []
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_threads_that_outlive_their_main_thread_are_ended(tmp_path: Path) -> None:
    """Their process looks like a zombie."""
    script = (
        "import ctypes, os, threading, time; threading.Thread(target=time.sleep, args=[600]).start(); "
        "print(os.getpid(), flush=True); ctypes.CDLL(None).syscall(60, 0)"
    )
    log = tmp_path / "log"
    with running(tmp_path, Tagged(), sys.executable, "-I", "-S", "-c", script) as command:
        wait_for(lambda: log.exists() and log.read_text(), 20)
        process = Path(f"/proc/{log.read_text().strip()}")
        wait_for(lambda: "State:\tZ" in (process / "status").read_text(), 20)
        assert command.wait(0.0) is None
    assert not process.exists()
