"""What the user's system refuses: the path and the fix in one line, and nothing half written stays."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_sweep.errors import in_words, is_of_users_system
from overlap_sweep.results.run_directory import RESULT_FILE, read_result, write_atomically
from overlap_sweep.runtime.outcome import Outcome
from tests.analyze import analyze_process
from tests.make_point import make_point
from tests.sweeps import ROOT, launch_here

LONG = "x" * 300


@pytest.mark.parametrize("arguments", [("-m", "num_sm=1,2", f"hydra.sweep.dir={LONG}"), (f"hydra.run.dir={LONG}",)])
def test_a_name_that_is_too_long_is_refused_at_once(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = launch_here(*arguments, "runtime.device=cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, f"error: {LONG}: File name too long; give a shorter name.\n")
    assert not list(tmp_path.iterdir())


def test_too_few_open_files_are_refused_at_once(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))

    command = [sys.executable, ROOT / "launch.py", "num_sm=1", "runtime.device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, preexec_fn=limit, check=False)
    assert done.stderr == "error: Only 60 files may be open at once; raise the limit: ulimit -n 1024.\n"
    assert not list(tmp_path.iterdir())


def test_analysis_that_cannot_write_says_where_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit of files' sizes, which is set as easily as a disk is full."""
    make_point("operator", tmp_path / "sweep", name="point")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    done = analyze_process(tmp_path / "sweep", "--output", tmp_path / "out", preexec_fn=limit)
    (error,) = done.stderr.splitlines()
    path = tmp_path / "out" / "tuning_report.json"
    assert error == f"error: {path}: File too large; raise the limit of files' sizes: ulimit -f unlimited."
    assert done.returncode == 1
    assert not list((tmp_path / "out").glob(".*"))
    long = analyze_process(tmp_path / LONG)
    assert (long.returncode, long.stderr.count("\n")) == (1, 1)
    assert long.stderr.endswith(f"{LONG}: File name too long; give a shorter name.\n")


def test_what_could_not_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as refused:
        write_atomically(tmp_path / "result.json", b"{}")
    assert is_of_users_system(refused.value)
    assert in_words(refused.value) == (
        f"{tmp_path}/result.json: No space left on device; free some space there, or give another directory."
    )
    assert not list(tmp_path.iterdir())


def test_a_progress_line_has_no_control_characters(tmp_path: Path) -> None:
    directory = make_point("operator", tmp_path, status="failed", error="\x1b[31mred\u202egnp.exe\x07 at \x9b1m")
    assert str(Outcome(directory, read_result(directory / RESULT_FILE))).endswith(
        r"\x1b[31mred\u202egnp.exe\x07 at \x9b1m"
    )
