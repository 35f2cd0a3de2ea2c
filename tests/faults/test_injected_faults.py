"""Points whose workers raise, die, hang or write nonsense: each fails by itself, and says why."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import pytest

from overlap_sweep.run_directory import Result
from tests.faults.injection import TINY, faulty_launch, worker_pids
from tests.sweeps import Launch

pytestmark = pytest.mark.faults

LEAST_S = 8
"""The shortest limit of a point, which is given up then although it may take five minutes: the others took less."""

DIED = r"rank [01] died \((exit code {}|its agent has not noticed)"
"""A busy machine's agent may take too long to say how."""
REASONS = {
    "raises": r"rank 1: RuntimeError: raised on purpose at length",
    "out_of_memory": r"rank 1: RuntimeError: .*(can't|not enough) .*memory",
    "segfault": DIED.format(r"-11 .*SIGSEGV"),
    "exits": r"rank [01] died \(",
    "writes_half": r"the workers left no whole result\.json",
    "dies_while_writing": DIED.format("1 "),
    "killed": DIED.format(r"-9 .*SIGKILL"),
    "hangs_in_c": r"no answer from ranks \[0, 1\] in [\d.]+ s",
    "floods": r"rank [01]: MemoryError: raised after the flood",
}
"""By fault the first line of `error`."""
RANKS = {
    **dict.fromkeys(("writes_half", "dies_while_writing"), 0),
    # Where not all fail, the others wait for it in a collective, which takes the launcher a while to give up.
    "floods": None,
}
"""On which it happens, if not on rank 1; None for all."""
LASTING = ("hangs_in_c", "floods")
PASSING = tuple(fault for fault in REASONS if fault not in LASTING)


class Swept(NamedTuple):
    root: Path
    launch: Launch
    done: CompletedProcess[str]
    results: dict[int, Result]
    """By num_sm. The odd ones have no fault."""

    @property
    def others(self) -> list[Result]:
        return [result for number, result in self.results.items() if number % 2]


def num_sm_of(fault: str) -> int:
    return 2 * (1 + list(REASONS).index(fault))


def status_of(fault: str) -> str:
    return "timeout" if fault == "hangs_in_c" else "failed"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Swept]:
    """Every faulty point between two healthy ones: `passing` faults do not happen again; at the same time `lasting`."""
    processes, launches = {}, {}
    for name, faults, times in (("passing", PASSING, 1), ("lasting", LASTING, 10)):
        root = tmp_path_factory.mktemp(name)
        plan: list[dict[str, Any]] = [
            {"num_sm": num_sm_of(fault), "fault": fault, "times": times, "rank": RANKS.get(fault, 1)}
            for fault in faults
        ]
        launch = faulty_launch(root, plan)
        (root / "faults" / "least_s").write_text(str(LEAST_S))
        values = sorted({number for entry in plan for number in range(entry["num_sm"] - 1, entry["num_sm"] + 2)})
        launches[name] = root, launch
        processes[name] = launch.start("-m", f"num_sm={','.join(map(str, values))}", *TINY)
    found = {}
    for name, (root, launch) in launches.items():
        stdout, stderr = processes[name].communicate(timeout=240)
        done = CompletedProcess((), processes[name].returncode, stdout, stderr)
        found[name] = Swept(root, launch, done, {one.point["num_sm"]: one for one in launch.results().values()})
    return found


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_is_made_up_for_in_a_fresh_group(swept: dict[str, Swept], fault: str) -> None:
    found, number = swept["passing"], num_sm_of(fault)
    result = found.results[number]
    assert (result.status, result.error) == ("ok", None)
    assert result.objective_us
    (earlier,) = result.earlier_attempts
    assert earlier.status == status_of(fault)
    assert re.match(REASONS[fault], earlier.error), earlier.error
    assert len(earlier.error) <= 10_000
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
    assert result.status == status_of(fault)
    assert re.match(REASONS[fault], str(result.error).splitlines()[0]), result.error
    assert len(str(result.error)) < 200_000
    assert (result.times, result.objective_us) == ({}, None)
    assert result.started
    assert result.environment["packages"]["torch"]
    assert [attempt.status for attempt in result.earlier_attempts] == [status_of(fault)]
    # Tried as often as allowed, each time by other workers.
    attempts = worker_pids(found.root, num_sm_of(fault))
    assert len(attempts) == 2
    assert len(set.union(*attempts)) == 4


def test_an_error_ends_with_the_log_s_even_if_that_is_flooded(swept: dict[str, Swept]) -> None:
    found = swept["lasting"]
    result = found.results[num_sm_of("floods")]
    error = str(result.error).splitlines()
    assert any("sitecustomize.py" in line for line in error)
    assert len(error) <= 30
    assert (found.launch.directory / result.name / "worker.log").stat().st_size > 20e6
    assert "raised after the flood" in error[-1]


@pytest.mark.parametrize(
    ("name", "status", "counts"), [("passing", 0, "{all} ok"), ("lasting", 1, "{others} ok, 1 failed, 1 timeout")]
)
def test_the_other_points_are_not_touched_and_nothing_is_left(
    swept: dict[str, Swept], name: str, status: int, counts: str
) -> None:
    found = swept[name]
    assert {(result.status, len(result.earlier_attempts)) for result in found.others} == {("ok", 0)}
    assert found.done.returncode == status
    expected = counts.format(all=len(found.results), others=len(found.others))
    assert found.done.stdout.splitlines()[-1].startswith(f"{expected}; analyse with: python analyze.py ")
    assert "Traceback" not in found.done.stdout + found.done.stderr
    assert found.launch.processes() == {}
    assert not list(found.launch.directory.rglob("*.tmp"))
    assert not list(found.launch.directory.rglob("attempts.json"))
    # Nobody asked for a profile.
    assert not list(found.launch.directory.rglob("trace*"))


def test_wrong_numbers_fail_the_point_whatever_its_speed_in_the_same_group(tmp_path: Path) -> None:
    launch = faulty_launch(tmp_path)
    launch.environment["TMPDIR"] = str(tmp_path / "tmp")
    (tmp_path / "tmp").mkdir()
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
        assert result.times == {}
        # That would end alike.
        assert result.earlier_attempts == []
        assert (launch.directory / result.name / "worker.log").exists()
    # What depends on no setting is measured once per group.
    assert results["none1"].times["fwd"].tp1 == results["none2"].times["fwd"].tp1
    assert [worker_pids(tmp_path, number)[0] for number in (1, 2)] == [worker_pids(tmp_path, 1)[0]] * 2
    # Nothing is left in the temporary directory but the cache of torch's compiler, which is for later processes too.
    assert not [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torchinductor")]
