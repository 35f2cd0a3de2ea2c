"""What is read from a command's output: why it ended, and numbers of its steps."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.recorder.recording import STEPS_FILE
from overlap_sweep.workloads.job import run as job_run
from overlap_sweep.workloads.job.output import ending, first_error
from tests.workloads.job.commands import failure, job, job_point, measured, recorded, recording, shell

LONG = "sleep 600"


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_run, "POLL_S", 0.02)


def test_errors_are_read_of_the_attempt_alone(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\n  x\nValueError: before\n")
    start = log.stat().st_size
    with log.open("a") as more:
        more.write("train.py: error: unrecognized arguments: --bucket 3\n")
    assert ending(2, log, start) == "ended with exit status 2: train.py: error: unrecognized arguments: --bucket 3"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["loss 3", "an Error: of its own"], ""),
        (
            ["[rank1]: Traceback (most recent call last):", "[rank1]:   File", "[rank1]: a.b.OutOfMemoryError: 3 GiB"],
            "a.b.OutOfMemoryError: 3 GiB",
        ),
        (["Traceback (most recent call last):", "step 4", "AssertionError", "later"], "AssertionError"),
        (
            ["exitcode : -9", "  traceback : Signal 9 (SIGKILL) received by PID 12"],
            "Signal 9 (SIGKILL) received by PID 12",
        ),
        (["  traceback : Signal 15 (SIGTERM) received by PID 12"], ""),
        (["/v/bin/python3: No module named train"], "/v/bin/python3: No module named train"),
        (
            ["python: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')"],
            "python: Error while finding module specification for 'a.b' (ModuleNotFoundError: No module named 'a')",
        ),
    ],
)
def test_errors_are_told_from_what_else_is_printed(lines: list[str], error: str) -> None:
    assert first_error(lines) == error


TPS = "tps: ([0-9.,]+)"


def printing(*pieces: str, then: str = LONG) -> str:
    """A command that prints pieces of text, as printf knows them, one after the other."""
    return shell("; sleep 0.05; ".join(f'printf "{piece}"' for piece in pieces) + f"; {then}")


def test_a_metric_may_have_separators_that_its_expression_lacks(tmp_path: Path) -> None:
    lines = "tps: 1,250\\ntps: 382,941, mfu 1\\ntps: 1,000,000.5\\ntps: 400,1\\ntps: 500,50 6\\n"
    found = measured(tmp_path, printing(lines), metric="tps: ([0-9.]+)")
    assert [1e6 / time_us for time_us in job(found).step.samples_us] == pytest.approx([382941, 1000000.5, 400, 500])


def test_a_metric_is_read_from_pieces_of_colourful_lines(tmp_path: Path) -> None:
    pieces = (
        "loss 7 tps: 1\\n",
        "tps: 2",
        "00 x\\nt",
        "ps: \\033[32m1,000.0\\033[0m\\r",
        "tps: 400\\ntps: 500\\ntps: 9",
    )
    found = measured(tmp_path, printing(*pieces), metric=TPS)
    assert job(found).step.samples_us == [5000.0, 1000.0, 2500.0, 2000.0]
    assert (job(found).timed_by, job(found).unit) == ("metric", "tps")
    assert job(found).calls_per_step is None
    (warning,) = found["warnings"]
    assert "no rank recorded" in warning


def test_a_metric_of_several_ranks_counts_by_the_slowest(tmp_path: Path) -> None:
    lines = [f"[rank{rank}]:step tps: {10 * step + rank}" for step in range(1, 6) for rank in (1, 0)]
    found = measured(tmp_path, printing("\\n".join([*lines, ""])), metric=TPS, ranks=2)
    assert job(found).step.samples_us == [1e6 / rate for rate in (20, 30, 40, 50)]


@pytest.mark.parametrize(
    ("changes", "first_us", "unit", "objective_us"),
    [
        ({"metric_is": "seconds"}, 2e6, "", 3.5e6),
        ({"metric_is": "milliseconds"}, 2e3, "", 3.5e3),
        ({"metric_is": "seconds", "samples_per_step": "10"}, 2e6, "", 3.5e5),
        ({"samples_per_step": "10"}, 5e6, "", (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4 * 1e6),
        ({"tokens_per_step": "10"}, 5e6, "", (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4 * 1e6),
        (
            {"metric": "(?P<tokens>[0-9]+)", "samples_per_step": "10"},
            5e5,
            "tokens",
            (1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4 * 1e6,
        ),
    ],
)
def test_a_metric_is_a_rate_or_a_time(
    tmp_path: Path, changes: dict[str, Any], first_us: float, unit: str, objective_us: float
) -> None:
    found = measured(tmp_path, printing("1\\n2\\n3\\n4\\n5\\n"), **{"metric": "([0-9]+)", **changes})
    assert (job(found).step.samples_us[0], job(found).unit) == (first_us, unit)
    assert found["objective_us"] == pytest.approx(objective_us)


def test_a_metric_may_be_printed_too_rarely_or_be_no_number(tmp_path: Path) -> None:
    found = measured(tmp_path, printing("tps: 1\\ntps: 2\\ntps: 3\\ntps: 4", then="exit 0"), metric=TPS)
    assert len(job(found).step.samples_us) == 3
    assert any("ended after 3 timed steps of 4" in warning for warning in found["warnings"])
    failed = failure(tmp_path, printing("tps: 1\\ntps: 2\\ntps: 3\\n", then="exit 0"), metric=TPS)
    assert (failed.final, "only 2 numbers of job.metric" in str(failed)) == (True, True)
    for number in ("fast", "0", "nan"):
        failed = failure(tmp_path, printing(f"tps: {number}\\n" * 5), metric="tps: (.+)")
        assert (failed.final, f"found '{number}'" in str(failed)) == (True, True)
    failed = failure(tmp_path, printing("tps: 1\\n"), limit_s=0.5, metric=TPS)
    assert (failed.timed_out, "found 1 times of 5" in str(failed)) == (True, True)


PROFILES = """
import json, os, sys, time

made, directory = sys.argv[1:]
for step in range(1, 200):
    if step == 6:
        began = time.time()
    time.sleep(0.1)
    print(f"tps: {step}", flush=True)
    if step == 8:
        content = json.load(open(f"{made}/job_rank0.json")) | {"profiled_s": [began, time.time()]}
        json.dump(content, open(f"{directory}/.job", "w"))
        os.rename(f"{directory}/.job", f"{directory}/job_rank0.json")
"""
"""Profiles the sixth to the eighth step."""


@pytest.mark.end_to_end
def test_what_is_printed_while_the_profiler_works_does_not_count(tmp_path: Path) -> None:
    """Nor the first number after it, whose time began before."""
    recorded(tmp_path / "made", recording(host_us=[100.0] * 8))
    (tmp_path / "train.py").write_text(PROFILES)
    command = f"{sys.executable} -I -S {tmp_path}/train.py {tmp_path}/made {{run}}"
    found = measured(tmp_path, command, metric=TPS, steps=8)
    counted = {round(1e6 / us) for us in job(found).step.samples_us}
    assert len(counted) == 8
    assert not counted & {1, 6, 7, 8, 9}
    # It is known within some hundredths of a second when something was printed: those next to it may count or not.
    assert counted >= {2, 3, 11}


@pytest.mark.parametrize("recorder", ["records", "is lost", "sees no step"])
def test_recordings_are_waited_for_if_there_are_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorder: str
) -> None:
    monkeypatch.setattr(job_run, "SETTLE_S", 0.5 if recorder == "is lost" else 120.0)
    steps = "true" if recorder == "sees no step" else f"touch {{run}}/{STEPS_FILE}"
    record = recorded(tmp_path / "made", recording(calls_per_step=2)) if recorder == "records" else "true"
    print_five = "for i in 1 2 3 4 5; do echo tps: $i; done"
    began = time.monotonic()
    found = measured(tmp_path, shell(f"{steps}; {print_five}; sleep 0.4; {record}; {LONG}"), metric=TPS)
    assert job(found).calls_per_step == (2 if recorder == "records" else None)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "changes",
    [
        {"metric": "tps: ([0-9"},
        {"metric": "tps: [0-9]"},
        {"metric": "(tps|rate): ([0-9])"},
        {"metric": "tps: ([0-9])", "tokens_per_step": "2", "samples_per_step": "2"},
    ],
)
def test_a_metric_that_cannot_be_understood_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"job\.metric="):
        job_point("true", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"metric": "tps: ([0-9])", "metric_is": "seconds"},
        {"metric": "tps: (?P<tokens>[0-9])"},
        {"metric": "(?:tps|rate): ([0-9])", "samples_per_step": None},
    ],
)
def test_a_metric_whose_work_is_known_is_not_refused(changes: dict[str, Any]) -> None:
    assert job_point("true", **{"tokens_per_step": "2", "samples_per_step": "2", **changes})["job"]["metric"]
