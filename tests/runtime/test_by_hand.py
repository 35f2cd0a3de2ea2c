"""Sweeps over two nodes by torchrun on each, with kill -9 of every kind of process: what can run is run, nothing is
left behind, and `resume=` completes the rest."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overlap_sweep.results.run_directory import LOG_FILE, log_file
from tests.by_hand import FSDP, NODE, ByHand
from tests.faults.injection import faults_in, injected, journal
from tests.faults.sitecustomize import HOLD
from tests.sweeps import Launch, wait_for

SWEEP = (*FSDP, "runtime.nodes=1,2", "hydra.sweep.subdir='${runtime.nodes}_${repetition}'", "runtime.retries=2")
HELD = "2_0"
"""The point on two nodes that waits until something was done to it."""


def started(folder: Path, *arguments: str, torchrun: bool, hold: bool = True) -> ByHand:
    faults = folder / "faults" if (folder / "faults").exists() else faults_in(folder)
    (faults / HOLD / HELD).touch() if hold else (faults / HOLD / HELD).unlink()
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**injected(faults, light=not torchrun), "TMPDIR": str(folder / "tmp")}
    return ByHand(Launch(folder / "sweep", environment), [*SWEEP, *arguments], torchrun=torchrun)


def pids(folder: Path) -> dict[int, int]:
    """The process of each rank that runs the held point, in the last attempt."""
    return {run["rank"]: run["pid"] for run in journal(folder) if run["point"] == HELD}


def is_held(folder: Path, attempts: int = 1) -> bool:
    """Returns whether every rank of the attempt has begun the held point."""
    return sum(run["point"] == HELD for run in journal(folder)) == 4 * attempts


def nothing_is_left(folder: Path, one: ByHand) -> None:
    wait_for(lambda: not one.launch.processes(), 20)
    wait_for(lambda: not list((folder / "tmp").glob("overlap_sweep_*")), 5)


@pytest.mark.end_to_end
def test_a_sweep_on_one_and_two_nodes_outlives_a_rank_and_an_agent_of_the_second(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # Short, since its folder of temporary files has sockets.
    tmp_path = tmp_path_factory.mktemp("two")
    one = started(tmp_path, "profile=all", torchrun=True)
    try:
        wait_for(lambda: is_held(tmp_path), 180)
        os.kill(pids(tmp_path)[3], signal.SIGKILL)
        wait_for(lambda: is_held(tmp_path, attempts=2), 120)
        (agent,) = one.launch.agents(f"{NODE}=1")
        os.kill(agent, signal.SIGKILL)
        wait_for(lambda: is_held(tmp_path, attempts=3), 120)
        (tmp_path / "faults" / HOLD / HELD).unlink()
        (printed, error), _ = one.end(180)
    finally:
        one.kill()
    assert [process.returncode for process in one.nodes] == [0, 0], error
    assert "2 ok; next" in printed
    nothing_is_left(tmp_path, one)
    assert not one.meeting_file.exists()
    # torch's agents make one each where they are not told otherwise; these are the two that the user started.
    assert len(list((tmp_path / "tmp").glob("torchelastic_*"))) == 2

    results = one.launch.results()
    assert {name: (result.status, result.recorded["runtime"]["nodes"]) for name, result in results.items()} == {
        "1_0": ("ok", 1),
        HELD: ("ok", 2),
    }
    host = results["1_0"].environment["host"]
    assert "hosts" not in results["1_0"].environment
    assert results[HELD].environment["hosts"] == [host, host]
    rank_died, agent_died = results[HELD].earlier_attempts
    assert rank_died.error.startswith("rank 3 died (exitcode : -9 ")
    assert "its agent exited with -9" in agent_died.error
    directory = one.launch.directory / HELD
    assert (one.launch.directory / "1_0" / LOG_FILE).exists()
    assert not (one.launch.directory / "1_0" / log_file(1)).exists()
    assert {file.name for file in directory.glob("worker*.log")} == {LOG_FILE, log_file(1)}
    assert all((directory / f"trace_rank{rank}.json.gz").exists() for rank in range(4))


def _kill_serving(folder: Path, one: ByHand) -> None:
    os.kill(one.nodes[1].pid, signal.SIGKILL)


def _kill_launcher(folder: Path, one: ByHand) -> None:
    os.kill(one.nodes[0].pid, signal.SIGKILL)


def _interrupt(folder: Path, one: ByHand) -> None:
    os.kill(one.nodes[0].pid, signal.SIGINT)


def _interrupt_serving(folder: Path, one: ByHand) -> None:
    os.kill(one.nodes[1].pid, signal.SIGINT)


ENDINGS: dict[str, tuple[Callable[[Path, ByHand], None], list[int], str]] = {
    "serving process killed": (_kill_serving, [1, -9], "is lost"),
    "ctrl-c at the second": (_interrupt_serving, [1, 130], "is lost"),
    "launcher killed": (_kill_launcher, [-9, 1], ""),
    "ctrl-c at the first": (_interrupt, [130, 0], "interrupted: "),
}
"""Ends of a launch, the exit statuses of both nodes, and what the first one says."""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, ByHand]]]:
    """Launches whose first point on two nodes is running, by what will end them."""
    found = {}
    for ending in ENDINGS:
        folder = tmp_path_factory.mktemp("held")
        found[ending] = (folder, started(folder, "repetition=0,1", torchrun=False))
    try:
        for folder, _ in found.values():
            wait_for(lambda folder=folder: is_held(folder), 120)
        yield found
    finally:
        for _, one in found.values():
            one.kill()


@pytest.mark.faults
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_launch_that_ends_leaves_nothing_and_is_completed(held: dict[str, tuple[Path, ByHand]], ending: str) -> None:
    folder, one = held[ending]
    act, statuses, said = ENDINGS[ending]
    act(folder, one)
    (_, error), _ = one.end()
    assert [process.returncode for process in one.nodes] == statuses, error
    assert said in error
    nothing_is_left(folder, one)
    assert sorted(one.launch.results()) == ["1_0", "1_1"]

    again = started(folder, "repetition=0,1", f"resume={one.launch.directory}", torchrun=False, hold=False)
    try:
        (printed, error), _ = again.end()
    finally:
        again.kill()
    assert [process.returncode for process in again.nodes] == [0, 0], error
    assert "already measured: 2 of 4 points" in printed
    assert {name: result.status for name, result in again.launch.results().items()} == dict.fromkeys(
        ("1_0", "1_1", "2_0", "2_1"), "ok"
    )
    nothing_is_left(folder, again)
