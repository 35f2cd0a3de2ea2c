"""What is done for other points while the ranks measure one, and that nothing of it is lost or harms that one."""

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from overlap_sweep.results.run_directory import read_result
from overlap_sweep.runtime import deferred
from overlap_sweep.runtime.deferred import catch_up, deferring, later
from overlap_sweep.runtime.jobs import Job
from overlap_sweep.runtime.outcome import Outcomes
from tests.sweeps import ROOT, SMALL

FULL = OSError(errno.ENOSPC, "No space left on device")

_TRACED = """
from overlap_sweep.runtime import group, point
flush, send = point.make_durable, group.WorkerGroup._send
def make_durable(directory):
    print("flushed", directory.name, flush=True)
    flush(directory)
    if directory.name == "sm2" and FULL:
        raise OSError(28, "No space left on device")
def sent(self, request):
    send(self, request)
    print("sent", request.directory.name, flush=True)
point.make_durable, group.WorkerGroup._send = make_durable, sent
from overlap_sweep.commands.launch import main
main()
"""


def traced(directory: Path, *, full: bool) -> tuple[list[tuple[str, str]], str]:
    """A sweep of num_sm=1,2,3: what happened to which point, in order, and what it said last."""
    words = ["-m", "operator=fc1", "method=bulk", "num_sm=1,2,3", "report=false", *SMALL]
    words += [f"hydra.sweep.dir={directory}", "hydra.sweep.subdir=sm${num_sm}"]
    script = _TRACED.replace("FULL", str(full))
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    found = re.findall(r"^(?:\[\d/3\] )?(sent|flushed|ok) +(sm\d)", done.stdout, re.MULTILINE)
    return found, done.stdout.splitlines()[-1] + done.stderr


def test_a_result_is_on_disk_before_its_line_and_the_next_point_is_sent_before_both(tmp_path: Path) -> None:
    happened, _ = traced(tmp_path, full=False)
    one, two, three = (f"sm{number}" for number in (1, 2, 3))
    assert happened == [
        ("sent", one),
        ("sent", two),
        ("flushed", one),
        ("ok", one),
        ("sent", three),
        ("flushed", two),
        ("ok", two),
        ("flushed", three),
        ("ok", three),
    ]


def test_a_result_that_cannot_be_flushed_is_missing_and_the_point_that_runs_meanwhile_is_not(tmp_path: Path) -> None:
    happened, said = traced(tmp_path, full=True)
    assert [name for what, name in happened if what == "ok"] == ["sm1", "sm3"]
    assert "2 ok, 1 missing" in said
    assert "1 missing: " in said
    assert "No space left on device; free some space there" in said
    assert read_result(tmp_path / "sm3" / "result.json").status == "ok"


def test_outside_of_a_sweep_nothing_waits(tmp_path: Path) -> None:
    done: list[int] = []
    later(tmp_path, lambda: done.append(1))
    assert done == [1]
    with pytest.raises(OSError, match="No space"):
        later(tmp_path, fails)


def fails() -> None:
    raise FULL


def test_what_waits_is_done_however_the_sweep_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "outcomes", found := Outcomes())
    done: list[int] = []

    def interrupted() -> None:
        with deferring():
            later(tmp_path / "1", lambda: done.append(1))
            later(tmp_path / "2", fails)
            assert not done
            catch_up()
            later(tmp_path / "3", lambda: done.append(3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [1, 3]
    assert list(found.given_up) == [tmp_path / "2"]


def test_a_job_that_cannot_be_prepared_says_so_in_its_turn(tmp_path: Path) -> None:
    job = Job(0, [], OmegaConf.create({}), {}, tmp_path)
    job.prepare_ahead()
    with pytest.raises(AttributeError):
        _ = job.prepared
