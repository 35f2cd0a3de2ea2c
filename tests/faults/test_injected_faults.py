"""Points whose workers raise, die, hang or write nonsense: each fails by itself, and says why."""

import re
import subprocess
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from overlap_sweep.results.run_directory import RESULT_FILE, Result
from tests.faults.injection import TINY, faulty_launch, worker_pids
from tests.sweeps import Launch

pytestmark = pytest.mark.faults

DIED = r"rank [01] died \((exitcode : {}|cause unknown)"
"""A busy machine's agent may take too long to say how."""
PASSING = {
    "raises": (1, r"rank 1: RuntimeError: raised on purpose at length"),
    "segfault": (1, DIED.format(r"-11 .*SIGSEGV")),
    "writes_half": (0, r"the workers wrote no complete result\.json"),
    "dies_while_writing": (0, DIED.format("1 ")),
}
"""By fault, which does not happen again: the rank, and the first line of the error."""
LASTING = {
    "hangs_in_c": (1, r"no answer from ranks \[0, 1\] within [\d.]+ s"),
    # On all: where not all fail, the others wait for it in a collective, which takes the launcher a while to give up.
    "floods": (None, r"rank [01]: MemoryError: raised after the flood"),
}


class Swept(NamedTuple):
    root: Path
    launch: Launch
    process: subprocess.Popen[str]
    printed: list[str]
    results: dict[int, Result]
    """By num_sm. The odd ones have no fault."""


def num_sm_of(fault: str) -> int:
    return 2 * (1 + [*PASSING, *LASTING].index(fault))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Swept]:
    """Every faulty point between two healthy ones, in a sweep of the passing and one of the lasting faults."""
    found = {}
    for name, faults, times in (("passing", PASSING, 1), ("lasting", LASTING, 10)):
        root = tmp_path_factory.mktemp(name)
        plan = [
            {"num_sm": num_sm_of(fault), "fault": fault, "times": times, "rank": rank}
            for fault, (rank, _) in faults.items()
        ]
        launch = faulty_launch(root, plan)
        numbers = [num_sm_of(fault) for fault in faults]
        values = ",".join(map(str, range(numbers[0] - 1, numbers[-1] + 2)))
        found[name] = Swept(root, launch, launch.start("-m", f"num_sm={values}", "runtime.timeout_s=10", *TINY), [], {})
    for one in found.values():
        one.printed.extend(one.process.communicate(timeout=240))
        one.results.update({result.recorded["num_sm"]: result for result in one.launch.results().values()})
    return found


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_made_up_for_in_a_fresh_group(swept: dict[str, Swept], fault: str) -> None:
    found, number = swept["passing"], num_sm_of(fault)
    result = found.results[number]
    assert (result.status, result.error) == ("ok", None)
    assert result.objective_us
    (earlier,) = result.earlier_attempts
    assert earlier.status == "failed"
    assert re.match(PASSING[fault][1], earlier.error), earlier.error
    # Where the other rank was then comes after it.
    assert len(earlier.error.partition("\nrank 0 was in ")[0]) <= 10_000
    assert earlier.started <= str(result.started)
    assert earlier.where
    (before,), (first, second), (after,) = (worker_pids(found.root, value) for value in range(number - 1, number + 2))
    assert before == first
    assert not first & second
    assert second == after


@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_stays_fails_its_point_with_the_reason(swept: dict[str, Swept], fault: str) -> None:
    found = swept["lasting"]
    result = found.results[num_sm_of(fault)]
    assert result.status == ("timeout" if fault == "hangs_in_c" else "failed")
    error = str(result.error).splitlines()
    assert re.match(LASTING[fault][1], error[0])
    assert len(error) <= 30
    assert len(str(result.error)) < 200_000
    assert (result.measured, result.objective_us) == (None, None)
    written_s = (found.launch.directory / result.name / RESULT_FILE).stat().st_mtime
    took_s = written_s - datetime.fromisoformat(str(result.started)).timestamp()
    assert took_s > (9 if fault == "hangs_in_c" else 0)
    assert result.environment["packages"]["torch"]
    assert [attempt.status for attempt in result.earlier_attempts] == [result.status]
    # Tried as often as allowed, each time by other workers.
    attempts = worker_pids(found.root, num_sm_of(fault))
    assert len(attempts) == 2
    assert len(set.union(*attempts)) == 4
    if fault == "floods":
        # The error ends as the log does.
        assert (found.launch.directory / result.name / "worker.log").stat().st_size > 20e6
        assert any("sitecustomize.py" in line for line in error)
        assert "raised after the flood" in error[-1]


@pytest.mark.parametrize(
    ("name", "status", "counts"), [("passing", 0, "9 ok"), ("lasting", 1, "3 ok, 1 failed, 1 timeout")]
)
def test_the_other_points_are_not_touched_and_nothing_is_left(
    swept: dict[str, Swept], name: str, status: int, counts: str
) -> None:
    found = swept[name]
    others = [result for number, result in found.results.items() if number % 2]
    assert {(result.status, len(result.earlier_attempts)) for result in others} == {("ok", 0)}
    stdout, stderr = found.printed
    assert found.process.returncode == status
    assert stdout.splitlines()[-1].startswith(f"{counts}; next: python analyze.py ")
    assert "Traceback" not in stdout + stderr
    # Every failed attempt is named as it happens, before the point's outcome.
    faults = {"passing": PASSING, "lasting": LASTING}[name]
    lines = stdout.splitlines()
    for fault in faults:
        point = f"tp2_sm{num_sm_of(fault)}"
        again, outcome = (i for i, line in enumerate(lines) if point in line.split() and "..." not in line.split()[0])
        assert re.match(rf"again   {point}  (failed|timeout): {faults[fault][1]}", lines[again])
        assert lines[again].endswith("(attempt 2 of 2)")
        assert again < outcome
    assert found.launch.processes() == {}
    # Nobody asked for a profile.
    for left in ("*.tmp", "trace*"):
        assert not list(found.launch.directory.rglob(left))


def test_wrong_numbers_fail_the_point_whatever_its_speed_in_the_same_group(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    launch = faulty_launch(tmp_path)
    # Short, since sockets are made in it, whose paths have at most 107 characters.
    temporary = tmp_path_factory.mktemp("t")
    launch.environment["TMPDIR"] = str(temporary)
    # A ring adds in another order than gloo does, and no tolerance forgives that. Without overlap the point is its own
    # reference.
    wrong = ("tp_size=4", "operator=proj", "method=none,ring_exchange", "workload.tolerance=0", "runtime.retries=3")
    done = launch.run("-m", "num_sm=1,2", *wrong, *TINY, "hydra.sweep.subdir=${method}${num_sm}")
    assert done.returncode == 1
    results = launch.results()
    assert {name: result.status for name, result in results.items()} == {
        **{"none1": "ok", "none2": "ok", "ring_exchange1": "failed", "ring_exchange2": "failed"}
    }
    for result in (results["ring_exchange1"], results["ring_exchange2"]):
        assert "wrong numbers" in str(result.error)
        assert {"output", "input_grad", "weight_grad"} <= set(result.relative_error)
        assert 0 < (result.relative_error["output"] or 0) < 1e-5
        assert result.measured is None
        # That would end alike.
        assert result.earlier_attempts == []
        assert (launch.directory / result.name / "worker.log").exists()
    # What depends on no setting is measured once per group.
    assert results["none1"].measured.times["fwd"].tp1 == results["none2"].measured.times["fwd"].tp1
    assert [worker_pids(tmp_path, number)[0] for number in (1, 2)] == [worker_pids(tmp_path, 1)[0]] * 2
    # Nothing is left in the temporary directory but the cache of torch's compiler, which is for later processes too.
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")]
