"""What a worker's libraries print."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
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
        subprocess.run([sys.executable, "-c", PROGRAM], stdout=file, check=True)
    assert log.read_text() == "waits for rank 1\n"
