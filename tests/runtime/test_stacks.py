"""What is told of a rank that does not come back, by processes that sleep or are killed, and what libraries print."""

import signal
import subprocess
import sys
from pathlib import Path

from overlap_sweep.runtime.stacks import gather
from tests.sweeps import wait_for

PROGRAM = """
import ctypes, sys, threading, time
from pathlib import Path
from overlap_sweep.runtime.stacks import stacks_written

def helper():
    time.sleep(60)

def waits_for_ever():
    # As a library does that keeps Python's lock.
    ctypes.PyDLL(None).sleep(60)

threading.Thread(target=helper, daemon=True).start()
with stacks_written(Path(sys.argv[1]), 3, float(sys.argv[2])):
    {what}
"""


def run(directory: Path, what: str, limit_s: float = 60.0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM.format(what=what), str(directory), str(limit_s)])


def test_a_rank_that_never_returns_says_where_it_is(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("what it printed\n")
    process = run(tmp_path, "waits_for_ever()", 1.0)
    wait_for(lambda: any("<module>" in path.read_text() for path in tmp_path.iterdir()))
    assert process.poll() is None
    process.kill()
    process.wait()
    (place,) = gather(tmp_path, log)
    assert place.startswith("rank 3 was in waits_for_ever (<string>:11), called by <module> (<string>:")
    text = log.read_text()
    assert text.startswith("what it printed\nrank 3: Timeout (0:00:00.75")
    assert "in helper" in text
    assert [path.name for path in tmp_path.iterdir()] == ["worker.log"]
    assert gather(tmp_path, log) == []


def test_a_rank_that_a_signal_ends_says_where_that_was(tmp_path: Path) -> None:
    process = run(tmp_path, "ctypes.string_at(0)")
    assert process.wait(30.0) == -signal.SIGSEGV
    (place,) = gather(tmp_path, tmp_path / "worker.log")
    assert place.startswith("rank 3 was in string_at (")
    assert "Fatal Python error: Segmentation fault" in (tmp_path / "worker.log").read_text()


def test_a_rank_that_comes_back_leaves_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "pass").wait(30.0) == 0
    assert list(tmp_path.iterdir()) == []


PRINTS = """
import ctypes, os
from overlap_sweep.runtime.worker import _print_by_lines

_print_by_lines()
ctypes.CDLL(None).puts(b"waits for rank 1")
# As a process that is killed, which flushes nothing.
os._exit(0)
"""


def test_what_c_libraries_print_is_in_the_log_of_a_process_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    with log.open("w") as file:
        subprocess.run([sys.executable, "-c", PRINTS], stdout=file, check=True)
    assert log.read_text() == "waits for rank 1\n"
