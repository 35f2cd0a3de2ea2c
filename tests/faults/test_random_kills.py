"""Processes of sweeps are killed at random moments: in the end every point is there, measured once, and nothing else.

A worker or an agent is killed under a launcher that lives; a killed launcher is followed by a resuming one. A sweep
that is complete before the kills are used up is followed by another in a new directory.
"""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from overlap_sweep.results.run_directory import RESULT_FILE, Result, find_points
from overlap_sweep.runtime.kept import whole_result
from tests.faults.injection import TINY
from tests.sweeps import Launch, wait_for

KILLS = int(os.environ.get("OVERLAP_SWEEP_KILLS", "1"))
"""Of each victim."""
PAUSE_S = {"worker": 2.0, "agent": 8.0, "launcher": 8.0}
"""At most before a kill. A group takes two or three seconds to start, and has workers only then."""
LONGEST_SWEEP_S = 200.0 + 60 * KILLS
SWEEP = ("-m", "tp_size=2", "num_sm=1,2,3,4,5,6", "runtime.retries=100", *TINY)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240 + 180 * KILLS)]


class Kills:
    """As many as are wanted, over as many sweeps as that takes."""

    def __init__(self, victim: str, root: Path) -> None:
        self.victim, self.root, self.kills = victim, root, 0
        self._random = random.Random(len(victim))

    def run(self) -> None:
        for number in itertools.count():
            if self.kills >= KILLS:
                break
            self._disturb(self.root / f"sweep{number}")

    def _disturb(self, directory: Path) -> None:
        """Kills victims until the kills are used up or the sweep has come to its end, which is checked."""
        finished: dict[str, Result] = {}
        launch, deadline = Launch(directory), time.monotonic() + LONGEST_SWEEP_S
        process = launch.start(*SWEEP)
        try:
            while not _ended(process, self._random.uniform(0, PAUSE_S[self.victim])):
                assert time.monotonic() < deadline, "the sweep does not come to its end"
                if self.kills < KILLS and self._kill_one(launch, process) and self.victim == "launcher":
                    process.communicate()
                    wait_for(lambda launch=launch: not launch.processes(), 20)
                    # One that was killed at once left nothing to go on with.
                    resume = [f"resume={directory}"] if directory.exists() else []
                    launch = Launch(directory)
                    process = launch.start(*SWEEP, *resume)
                finished = _finished(directory, finished)
        finally:
            process.kill()
            stdout, stderr = process.communicate()
        assert process.returncode == 0, stdout + stderr
        finished = _finished(directory, finished)
        measured = {name: (result.status, result.recorded["num_sm"]) for name, result in finished.items()}
        assert measured == {f"tp2_sm{num_sm}": ("ok", num_sm) for num_sm in range(1, 7)}
        assert all(result.objective_us for result in finished.values())
        wait_for(lambda: not launch.processes(), 20)
        assert not [path for left in ("*.tmp", ".tmp_*") for path in directory.rglob(left)]

    def _kill_one(self, launch: Launch, process: subprocess.Popen[str]) -> bool:
        """Whether there was a victim."""
        victims = {"launcher": [process.pid], "agent": [*launch.agents()], "worker": launch.workers()}[self.victim]
        if victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(victims), signal.SIGKILL)
            self.kills += 1
        return bool(victims)


def _ended(process: subprocess.Popen[str], within_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


def _finished(directory: Path, before: dict[str, Result]) -> dict[str, Result]:
    """By name the results that are whole: also those that were there before, unchanged."""
    found = {path.name: whole_result(path) for path in find_points(directory) if (path / RESULT_FILE).exists()}
    now = {name: result for name, result in found.items() if result}
    lost_or_measured_twice = [name for name, result in before.items() if now.get(name) != result]
    assert not lost_or_measured_twice
    return now


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[None]]:
    """By victim, all at the same time."""
    root = tmp_path_factory.mktemp("kills")
    with ThreadPoolExecutor() as pool:
        return {victim: pool.submit(Kills(victim, root / victim).run) for victim in PAUSE_S}


@pytest.mark.parametrize("victim", PAUSE_S)
def test_random_kills_lose_and_repeat_nothing(done: dict[str, Future[None]], victim: str) -> None:
    assert done[victim].result() is None
