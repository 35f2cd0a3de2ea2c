"""`overlap-sweep optimize` on a real training, whose pauses are levers of a package of their own."""

import os
import shlex
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

import overlap_sweep
from overlap_sweep.optimizer.answer import Answer
from overlap_sweep.optimizer.record import OptimizeRecord
from tests import json_schemas
from tests.optimizer.training import optimizing


@pytest.mark.end_to_end
def test_what_helps_is_found_proven_and_said(tmp_path: Path) -> None:
    with optimizing(tmp_path, "--format=json", "--fail-if", "gain < 0.9") as process:
        stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 3, stderr
    json_schemas.check(["optimize", "--format=json"], stdout)
    answer = msgspec.json.decode(stdout, type=Answer)

    assert answer.settings == {"test.a_ms": 10}
    assert answer.proven
    assert answer.verdict == "proven"
    assert 0 < answer.low < answer.gain < answer.high
    assert answer.lines == [f"run: A_MS=10 {shlex.quote(sys.executable)} train.py"]
    assert answer.results == "equal"
    by_settings = {tuple(one.settings.items()): one for one in answer.trials}
    assert by_settings[()].gain == 0
    # Slower steps are given up after a few.
    assert "given up" in stderr or by_settings[("test.a_ms", 90),].gain < -0.5  # type: ignore[operator]
    (wrong,) = [one for settings, one in by_settings.items() if ("test.lr", 0.2) in settings]
    assert "does not compute the same" in wrong.note
    # What cannot apply costs no run.
    assert answer.left_out == {
        "test.workers": "does not apply: this training has made no DataLoader",
        "test.b_ms=1": "needs --allow rounding; expected: unknown",
    }
    assert not [one for one in by_settings if ("test.workers", 2) in one or ("test.workers", "2") in one]
    assert "left out: test.workers: does not apply: this training has made no DataLoader" in stderr
    assert [one.name for one in answer.not_allowed] == ["test.b_ms=1"]
    page = (tmp_path / "found" / "report.html").read_text()
    assert "test.b_ms=1: needs --allow rounding" in page
    assert "From the baseline to the answer" in page
    assert page.index("Failed, or must not be used") < page.index("What was left out, and why (")
    assert "test.workers: does not apply: this training has made no DataLoader" in page
    assert "fail-if: gain < 0.9 holds" in stderr
    # What is worth trying is said before any of it is tried.
    assert stderr.index("values of levers apply") < stderr.index("a_ms=90")


@pytest.mark.end_to_end
def test_without_a_lever_to_try_two_runs_are_enough(tmp_path: Path) -> None:
    with optimizing(tmp_path, "--levers=test.workers", "search.repeats=3", "--format=json") as process:
        stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    answer = msgspec.json.decode(stdout, type=Answer)
    assert answer.runs == 2
    assert answer.answer.startswith("Keep the command as it is")
    assert answer.verdict == "keep"
    assert [one.settings for one in answer.trials] == [{}]
    assert not answer.stopped


@pytest.mark.faults
def test_ctrl_c_ends_with_the_best_so_far_and_resume_goes_on(tmp_path: Path) -> None:
    with optimizing(tmp_path) as process:
        record = tmp_path / "found" / OptimizeRecord.FILE
        deadline = time.monotonic() + 120
        while not record.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout.startswith("Not finished, ")
    assert " Go on with --resume --minutes N" in stdout
    assert "ended early: interrupted" in stdout
    (line,) = (line for line in stderr.splitlines() if line.startswith("resume with: "))
    assert line.startswith("resume with: overlap-sweep optimize --resume --output found --levers=test ")
    assert line.endswith(f" -- {shlex.quote(sys.executable)} train.py")
    before = {path.parent.name for path in (tmp_path / "found").glob("*/result.json")}
    assert len(before) >= 2

    with optimizing(tmp_path, "--resume", "--runs=4") as process:
        stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert "--runs 4 is used up" in stdout
    # What was measured before is not measured again.
    assert not [
        line for line in stderr.splitlines() if "] ok " in line and line.split()[2] in before and "[kept]" not in line
    ]
    assert len(list((tmp_path / "found").glob("*/result.json"))) > len(before)


@pytest.mark.end_to_end
def test_a_command_that_does_not_train_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(overlap_sweep.UserError, match=r"no Python with the recorder has imported torch"):
        overlap_sweep.optimize([sys.executable, "-c", "pass"], overrides=["runtime.device=cpu"], quiet=True)
