"""Whatever a command does, none of its processes outlives it, nor the launcher."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlap_sweep.errors import PointFailed
from overlap_sweep.processes import Process
from overlap_sweep.workloads.job.process import RunningCommand
from tests.sweeps import wait_for
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
    Path(ready).touch()
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


def of_words(folder: Path, tag: Tagged, *words: str, grace_s: float = 0.1) -> RunningCommand:
    return RunningCommand(words, folder, tag.environment, folder / "log", grace_s)


@contextmanager
def running(folder: Path, tag: Tagged, *words: str, grace_s: float = 0.1) -> Iterator[RunningCommand]:
    command = begun(of_words(folder, tag, *words, grace_s=grace_s))
    try:
        yield command
    finally:
        command.end()


def guard_of(command: RunningCommand) -> int:
    assert isinstance(command._process, Process)
    return command._process.pid


def supervisor_of(command: RunningCommand) -> int:
    return int(Path(f"/proc/{guard_of(command)}/task/{guard_of(command)}/children").read_text())


def python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script, *arguments]


def started(folder: Path, tag: Tagged) -> RunningCommand:
    """What runs LEAVES, once all of it is there."""
    found = begun(of_words(folder, tag, *python(LEAVES, "600")))
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
def test_the_command_s_own_end_is_told(tmp_path: Path, script: str, status: int) -> None:
    tag = Tagged()
    with running(tmp_path, tag, "sh", "-c", f"echo said; echo so >&2; {script}") as command:
        wait_for(lambda: command.wait(0.1) is not None, 20)
        assert command.status == status
    assert (tmp_path / "log").read_text() == "said\nso\n"
    assert tag.processes() == []


def test_a_command_has_its_environment_and_folder_and_no_input(tmp_path: Path) -> None:
    with running(tmp_path, Tagged(), "sh", "-c", "pwd; cat; echo $OVERLAP_SWEEP_TEST | wc -c") as command:
        wait_for(lambda: command.wait(0.1) is not None, 20)
    assert (tmp_path / "log").read_text() == f"{tmp_path}\n33\n"


def test_ended_by_the_launcher_it_leaves_nothing(tmp_path: Path) -> None:
    tag = Tagged()
    command = started(tmp_path, tag)
    command.end()
    assert tag.processes() == []
    assert (command.status, command.left) == (None, [])


def test_what_it_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    tag = Tagged()
    with running(tmp_path, tag, *python(LEAVES, "0")) as command:
        wait_for(lambda: command.wait(0.1) is not None, 20)
        assert command.status == 0
    assert tag.processes() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_job_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    tag = Tagged()
    command = started(tmp_path, tag)
    # The other has it from this one, or from its end.
    os.kill(guard_of(command) if number == signal.SIGTERM else supervisor_of(command), number)
    wait_for(lambda: tag.processes() == [], 20)
    command.end()
    assert command.status is None, "it did not end by itself"


def test_the_signal_to_stop_after_the_point_does_not_reach_it(tmp_path: Path) -> None:
    """Cluster managers send it to every process; a command that knows nothing of it would end."""
    script = "echo blocked $(grep SigBlk /proc/self/status)"
    with running(tmp_path, Tagged(), "sh", "-c", script) as command:
        os.kill(supervisor_of(command), signal.SIGUSR2)
        wait_for(lambda: command.wait(0.1) is not None, 20)
        assert command.status == 0
    blocked = int((tmp_path / "log").read_text().split()[-1], 16)
    assert blocked == 1 << (signal.SIGUSR2 - 1)
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    tag = Tagged()
    launcher = os.fork()
    if not launcher:
        try:
            command = started(tmp_path, tag)
            (tmp_path / "launched").touch()
            command.wait(600)
        finally:
            os._exit(1)
    wait_for((tmp_path / "launched").exists, 20)
    assert len(tag.processes()) == 7
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    wait_for(lambda: tag.processes() == [], 20)


def test_a_killed_supervisor_fails_the_point_and_leaves_nothing(tmp_path: Path) -> None:
    tag = Tagged()
    command = started(tmp_path, tag)
    os.kill(supervisor_of(command), signal.SIGKILL)
    with pytest.raises(PointFailed, match="was killed"):
        wait_for(lambda: command.wait(0.1) is not None, 20)
    assert tag.processes() == []
    command.end()


def test_a_killed_guard_leaves_nothing(tmp_path: Path) -> None:
    tag = Tagged()
    command = started(tmp_path, tag)
    os.kill(guard_of(command), signal.SIGKILL)
    wait_for(lambda: tag.processes() == [], 20)
    command.end()
    assert tag.processes() == []


@pytest.mark.parametrize("guard_first", [True, False])
def test_a_launcher_killed_with_one_of_them_leaves_nothing(tmp_path: Path, guard_first: bool) -> None:
    tag = Tagged()
    command = started(tmp_path, tag)
    assert isinstance(command._process, Process)
    # As the kernel does for a process that is killed.
    closed = command._process.hang_up
    victim = guard_of if guard_first else supervisor_of
    os.kill(victim(command), signal.SIGKILL)
    closed()
    wait_for(lambda: tag.processes() == [], 20)
    command.end()


def test_a_command_may_kill_its_process_group(tmp_path: Path) -> None:
    tag = Tagged()
    with running(tmp_path, tag, "sh", "-c", "sleep 600 & kill -9 0") as command:
        wait_for(lambda: command.wait(0.1) is not None, 20)
        assert command.status == -9
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


@pytest.mark.parametrize(
    ("word", "content", "reason"),
    [
        ("no_such_program", None, "no_such_program, which is not in PATH"),
        ("./missing", None, "./missing, which does not exist"),
        ("./text", "echo", "./text, which is not executable"),
        ("./no_interpreter", "#!/no/such/sh\n", "cannot be run"),
        ("./no_program", "\x7fELF", "cannot be run"),
    ],
)
def test_what_cannot_be_started_fails_for_good(tmp_path: Path, word: str, content: str | None, reason: str) -> None:
    tag = Tagged()
    if content:
        (tmp_path / word).write_text(content)
        (tmp_path / word).chmod(0o644 if word == "./text" else 0o755)
    with pytest.raises(PointFailed, match=reason) as failed:
        begun(of_words(tmp_path, tag, word))
    assert failed.value.final
    assert tag.processes() == []


def test_a_program_without_a_path_is_not_looked_for_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("#!/bin/sh\n")
    (tmp_path / "train").chmod(0o755)
    with pytest.raises(PointFailed, match="train, which is not in PATH"):
        begun(of_words(tmp_path, Tagged(), "train"))


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
