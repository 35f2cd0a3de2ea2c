"""Points whose workers raise, die, hang or write nonsense: each fails by itself, and says why."""

from __future__ import annotations

import re
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import pytest

from overlap_sweep.run_directory import Result
from tests.faults.injection import TINY, faulty_launch, worker_pids
from tests.sweeps import Launch

pytestmark = pytest.mark.faults

TIMEOUT_S = 5

REASONS = {
    "raises": r"rank 1: RuntimeError: raised on purpose",
    "memory_error": r"rank [01]: MemoryError: no memory left, on purpose",
    "out_of_memory": r"rank 1: RuntimeError: .*(can't|not enough) .*memory",
    "segfault": r"rank [01] died \(exit code -11 .*SIGSEGV",
    "killed": r"rank [01] died \(exit code -9 .*SIGKILL",
    "exits": r"rank [01] died \(",
    "hangs": rf"no answer from ranks \[0, 1\] in {TIMEOUT_S} s",
    "hangs_in_c": rf"no answer from ranks \[0, 1\] in {TIMEOUT_S} s",
    "floods": r"rank [01]: RuntimeError: raised after the flood",
    "raises_at_length": r"rank [01]: RuntimeError: long long",
    "writes_nothing": r"the workers left no whole result\.json",
    "writes_half": r"the workers left no whole result\.json",
    "dies_while_writing": r"rank [01] died \(exit code 1 ",
}
"""By fault the first line of `error`."""
RANKS = {
    **dict.fromkeys(("writes_nothing", "writes_half", "dies_while_writing"), 0),
    # Where not all fail, the others wait for it in a collective, which takes the launcher a while to give up.
    **dict.fromkeys(("memory_error", "floods", "raises_at_length")),
}
"""On which it happens, if not on rank 1; None for all."""
HANGING = ("hangs", "hangs_in_c")
LASTING = [fault for fault in REASONS if fault != "hangs"]
PASSING = ["segfault", "hangs", "writes_half"]


class Swept(NamedTuple):
    root: Path
    launch: Launch
    done: CompletedProcess[str]
    results: dict[int, Result]
    """By num_sm. The odd ones have no fault."""


def num_sm_of(fault: str) -> int:
    return 2 * (1 + list(REASONS).index(fault))


def sweep(tmp_path: Path, times: dict[str, int], *arguments: str) -> Swept:
    """By fault how many attempts it spoils. Every faulty point between two healthy ones."""
    plan: list[dict[str, Any]] = [
        {"num_sm": num_sm_of(fault), "fault": fault, "times": count, "rank": RANKS.get(fault, 1)}
        for fault, count in times.items()
    ]
    launch = faulty_launch(tmp_path, plan)
    values = sorted({number for entry in plan for number in range(entry["num_sm"] - 1, entry["num_sm"] + 2)})
    chosen = f"num_sm={','.join(map(str, values))}"
    done = launch.run("-m", chosen, f"runtime.timeout_s={TIMEOUT_S}", *TINY, *arguments)
    results = {result.point["num_sm"]: result for result in launch.results().values()}
    return Swept(tmp_path, launch, done, results)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """No second chance."""
    return sweep(tmp_path_factory.mktemp("failed"), dict.fromkeys(LASTING, 1), "runtime.retries=0")


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_fails_its_point_with_the_reason(failed: Swept, fault: str) -> None:
    result = failed.results[num_sm_of(fault)]
    assert result.status == ("timeout" if fault in HANGING else "failed")
    error = str(result.error)
    assert re.match(REASONS[fault], error.splitlines()[0]), error
    assert len(error) < 200_000
    assert result.times == {}
    assert result.objective_us is None
    assert result.started
    assert result.environment["packages"]["torch"]
    assert result.earlier_attempts == []


@pytest.mark.parametrize("fault", LASTING)
def test_what_follows_a_fault_runs_in_a_fresh_group(failed: Swept, fault: str) -> None:
    number = num_sm_of(fault)
    (before,), (of_fault,), (after,) = (worker_pids(failed.root, value) for value in (number - 1, number, number + 1))
    assert before == of_fault
    assert not after & of_fault


@pytest.mark.parametrize("fault", ["raises", "memory_error", "out_of_memory", "floods"])
def test_an_error_ends_with_the_log_s(failed: Swept, fault: str) -> None:
    error = str(failed.results[num_sm_of(fault)].error).splitlines()
    assert any(re.search(r"sitecustomize\.py", line) for line in error)
    assert len(error) <= 30


def test_of_a_flooded_log_the_end_is_told(failed: Swept) -> None:
    result = failed.results[num_sm_of("floods")]
    log = failed.launch.directory / result.name / "worker.log"
    assert log.stat().st_size > 20e6
    assert len(str(result.error)) < 100_000
    assert "raised after the flood" in str(result.error).splitlines()[-1]


def test_the_other_points_are_not_touched(failed: Swept) -> None:
    others = [result for number, result in failed.results.items() if number % 2]
    assert len(others) == len(failed.results) - len(LASTING)
    assert {result.status for result in others} == {"ok"}


def test_the_sweep_s_end_tells_what_failed(failed: Swept) -> None:
    done = failed.done
    assert done.returncode == 1
    counts = f"{len(failed.results) - len(LASTING)} ok, {len(LASTING) - 1} failed, 1 timeout"
    assert done.stdout.splitlines()[-1].startswith(f"{counts}; analyse with: python analyze.py ")
    assert "Traceback" not in done.stdout + done.stderr
    assert failed.launch.processes() == {}
    assert not list(failed.launch.directory.rglob("*.tmp"))


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Faults that do not happen again, and one that does."""
    root = tmp_path_factory.mktemp("recovered")
    return sweep(root, {**dict.fromkeys(PASSING, 1), "killed": 10}, "runtime.retries=2")


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_made_up_for(recovered: Swept, fault: str) -> None:
    result = recovered.results[num_sm_of(fault)]
    assert result.status == "ok"
    assert result.error is None
    assert result.objective_us
    (earlier,) = result.earlier_attempts
    assert earlier.status == ("timeout" if fault in HANGING else "failed")
    assert re.match(REASONS[fault], earlier.error)
    assert earlier.started <= str(result.started)
    assert earlier.where
    first, second = worker_pids(recovered.root, num_sm_of(fault))
    assert not first & second


def test_a_fault_that_stays_is_tried_as_often_as_allowed(recovered: Swept) -> None:
    result = recovered.results[num_sm_of("killed")]
    assert result.status == "failed"
    assert [attempt.status for attempt in result.earlier_attempts] == ["failed", "failed"]
    assert re.match(REASONS["killed"], str(result.error))
    attempts = worker_pids(recovered.root, num_sm_of("killed"))
    assert len(attempts) == 3
    assert len(set.union(*attempts)) == 6


def test_what_was_made_up_for_counts_as_ok(recovered: Swept) -> None:
    assert recovered.done.returncode == 1
    ok = len(recovered.results) - 1
    assert recovered.done.stdout.splitlines()[-1].startswith(f"{ok} ok, 1 failed; analyse with")
    assert not list(recovered.launch.directory.rglob("*.tmp"))
    assert not list(recovered.launch.directory.rglob("attempts.json"))
    assert recovered.launch.processes() == {}


def test_wrong_numbers_are_not_tried_again(tmp_path: Path) -> None:
    launch = faulty_launch(tmp_path)
    wrong = ("tp_size=4", "operator=proj", "method=ring_exchange", "workload.tolerance=0", "runtime.retries=3")
    assert launch.run("-m", *wrong, *TINY).returncode == 1
    (result,) = launch.results().values()
    assert "wrong numbers" in str(result.error)
    assert result.earlier_attempts == []
    assert len(worker_pids(tmp_path, 4)) == 1


@pytest.mark.faults
def test_after_quick_points_a_hanging_one_is_given_up_long_before_the_timeout(tmp_path: Path) -> None:
    launch = faulty_launch(tmp_path, [{"num_sm": 2, "fault": "hangs"}])
    started = time.monotonic()
    done = launch.run("-m", "num_sm=1,2,3", "runtime.timeout_s=300", "runtime.retries=0", *TINY)
    assert time.monotonic() - started < 100
    assert done.stdout.splitlines()[-1].startswith("2 ok, 1 timeout; analyse with")
    assert str(launch.results()["tp2_sm2"].error).startswith("no answer from ranks [0, 1] in 30 s")
