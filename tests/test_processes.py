"""Processes that are started, heard and ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_sweep.processes import Process
from tests.sweeps import ROOT, wait_for


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Process]]:
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.kill()


def shell(started: list[Process], log: Path, script: str, **variables: str) -> Process:
    process = Process(["sh", "-c", script], {**os.environ, **variables}, log)
    started.append(process)
    return process


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9)])
def test_the_exit_status_is_told(started: list[Process], tmp_path: Path, script: str, status: int) -> None:
    process = shell(started, tmp_path / "log", script)
    assert process.wait(10.0) == status
    assert process.poll() == status


def test_output_is_appended_to_the_log_and_the_environment_is_as_given(started: list[Process], tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    assert shell(started, log, 'echo "$GIVEN"; pwd >&2', GIVEN="here").wait(10.0) == 0
    there = Process(["pwd"], os.environ, log, tmp_path)
    started.append(there)
    assert there.wait(10.0) == 0
    assert log.read_text().splitlines() == ["before", "here", str(Path.cwd()), str(tmp_path)]


def test_lines_that_it_tells_come_whole_and_once(started: list[Process], tmp_path: Path) -> None:
    process = shell(started, tmp_path / "log", "printf 'one\\ntwo\\nhal' >&0; read go; printf 'f\\n' >&0; read go")
    told: list[str] = []
    wait_for(lambda: told.extend(process.told()) or len(told) == 2, 10)
    assert told == ["one", "two"]
    process._channel.sendall(b"go\n")
    wait_for(lambda: told.extend(process.told()) or len(told) == 3, 10)
    assert told == ["one", "two", "half"]
    process.hang_up()
    assert process.wait(10.0) is not None
    assert process.told() == []


def test_after_it_has_closed_its_input_nothing_is_awaited_from_it(started: list[Process], tmp_path: Path) -> None:
    """Otherwise whoever waits for its descriptor, which is readable at the end of a stream, never sleeps."""
    process = shell(started, tmp_path / "log", "echo last >&0; exec sleep 100 <&-")
    told: list[str] = []
    wait_for(lambda: told.extend(process.told()) or process.fileno() == -1, 10)
    assert told == ["last"]
    assert process.poll() is None
    process.hang_up()
    process.kill()
    assert process.poll() == -signal.SIGKILL


def test_hanging_up_ends_what_reads_its_input(started: list[Process], tmp_path: Path) -> None:
    process = shell(started, tmp_path / "log", "cat; exit 3")
    assert process.wait(0.1) is None
    process.hang_up()
    process.hang_up()
    assert process.wait(10.0) == 3


def test_killing_ends_the_whole_session_once(started: list[Process], tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = shell(started, log, "sleep 100 & echo $!; wait")
    wait_for(lambda: log.read_text().endswith("\n"), 10)
    child = int(log.read_text())
    assert is_alive(child)
    process.kill()
    process.kill()
    assert process.poll() == -signal.SIGKILL
    wait_for(lambda: not is_alive(child), 10)
    assert process.fileno() == -1
    process.hang_up()


def test_a_program_that_is_missing_cannot_be_started(tmp_path: Path) -> None:
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        Process(["no_such_program"], os.environ, tmp_path / "log")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Process(["true"], os.environ, tmp_path / "nowhere" / "log")
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == before


def test_it_is_told_when_its_starter_is_killed(tmp_path: Path) -> None:
    """It ends by itself then, as agents do."""
    log, found = tmp_path / "log", tmp_path / "pid"
    starter = (
        "import os, sys, time; from pathlib import Path; from overlap_sweep.processes import Process; "
        "one = Process(['sh', '-c', 'cat; echo ended'], os.environ, Path(sys.argv[1])); "
        "Path(sys.argv[2]).write_text(str(one.pid)); os.kill(os.getpid(), 9)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", starter, str(log), str(found)]) == -9
    wait_for(lambda: log.read_text() == "ended\n", 10)
    wait_for(lambda: not is_alive(int(found.read_text())), 10)


def test_signals_of_the_launcher_alone_don_t_reach_it(started: list[Process], tmp_path: Path) -> None:
    process = shell(started, tmp_path / "log", "read line; exit 5")
    os.kill(process.pid, signal.SIGUSR2)
    time.sleep(0.2)
    assert process.poll() is None
    process.hang_up()
    assert process.wait(10.0) == 5


@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_ends_with_its_parent_even_inside_a_library_that_never_returns(
    started: list[Process], tmp_path: Path, is_late: bool
) -> None:
    """Also if the parent ended before it could ask for that."""
    script = f"""
import ctypes, os, time
from pathlib import Path
from overlap_sweep.processes import end_with_parent
if os.fork():
    time.sleep(600)
Path("pid").write_text(str(os.getpid()))
Path("pid").rename("child")
while {is_late} and os.getsid(os.getppid()) == os.getsid(0):
    time.sleep(0.01)
end_with_parent()
Path("asked").touch()
ctypes.PyDLL(None).sleep(600)
"""
    words, environment = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = Process(words, environment, tmp_path / "log", tmp_path)
    started.append(parent)
    wait_for((tmp_path / "child").exists if is_late else (tmp_path / "asked").exists, 20)
    os.kill(parent.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(int((tmp_path / "child").read_text())), 10)
    assert (tmp_path / "asked").exists() != is_late
