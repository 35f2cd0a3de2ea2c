"""Kill -9 processes of sweeps at random moments, go on until all points are measured, and say what went wrong.

A worker or an agent is killed under a launcher that lives; a killed launcher is followed by a resuming one. A sweep
that is complete before the kills are used up is checked, and followed by another in a new directory. Each is compared
with one that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlap_sweep.run_directory import RESULT_FILE, Result, find_points
from overlap_sweep.runtime.kept import whole_result
from tests.faults.injection import TINY
from tests.sweeps import Launch

VICTIMS = ("worker", "agent", "launcher")
SWEEP = ("-m", "tp_size=2,4", "num_sm=1,2,3,4,5,6", "runtime.retries=100", *TINY)
LONGEST_LAUNCH_S = 300.0
PAUSE_S = {"worker": 2.0, "agent": 8.0}
"""At most between two kills. A group takes two or three seconds to start, and has workers only then."""
GONE_S = 20.0
"""How long processes may live on after a launcher was killed."""


def finished_points(directory: Path) -> dict[str, Result]:
    """By name those whose result is there, and whole."""
    found = {path.name: whole_result(path) for path in find_points(directory) if (path / RESULT_FILE).exists()}
    return {name: result for name, result in found.items() if result}


@dataclass(frozen=True)
class Undisturbed:
    """A sweep that came to its end by itself."""

    sweep: Sequence[str]
    points: dict[str, Any]
    """By name."""
    wall_s: float

    @classmethod
    def run(cls, sweep: Sequence[str], directory: Path) -> Undisturbed:
        started = time.monotonic()
        done = Launch(directory).run(*sweep)
        found = {name: result.point for name, result in finished_points(directory).items()}
        if done.returncode or not found:
            raise SystemExit(f"the undisturbed sweep did not end well:\n{done.stdout}\n{done.stderr}")
        return cls(sweep, found, time.monotonic() - started)


@dataclass
class Kills:
    """As many as are wanted, over as many sweeps as that takes."""

    undisturbed: Undisturbed
    victim: str
    wanted: int
    seed: int
    root: Path
    kills: int = 0
    complete: int = 0
    """Sweeps."""
    points: int = 0
    """Of the complete sweeps."""
    wrong: list[str] = field(default_factory=list)
    """What is not as it should be."""

    def run(self) -> Kills:
        self._random = random.Random(self.seed)
        while self.kills < self.wanted and not self.wrong:
            directory = self.root / f"sweep{self.complete}"
            self._finished: dict[str, Result] = {}
            if self.victim == "launcher":
                self._kill_launchers(directory)
            else:
                self._kill_below(directory)
            self._check_complete(directory)
            print(self, flush=True)
        return self

    def __str__(self) -> str:
        counts = f"{self.victim}: {self.kills} kills, {self.complete} sweeps, {self.points} points"
        return "\n".join([f"{counts}, {len(self.wrong)} wrong", *self.wrong])

    def _kill_launchers(self, directory: Path) -> None:
        """One after the other, until one comes to an end."""
        resume: tuple[str, ...] = ()
        while True:
            launch = Launch(directory)
            process = launch.start(*self.undisturbed.sweep, *resume)
            left = self.kills < self.wanted
            moment_s = self._random.uniform(0, self.undisturbed.wall_s) if left else LONGEST_LAUNCH_S
            if self._end(launch, process, moment_s):
                return
            # One that was killed at once left nothing to go on with.
            resume = (f"resume={directory}",) if directory.exists() else ()

    def _end(self, launch: Launch, process: subprocess.Popen[str], moment_s: float) -> bool:
        """Kills the launcher at that moment; whether it had come to its end before."""
        ended = _wait(process, moment_s)
        if not ended:
            process.kill()
            self.kills += 1
        self._check_end(launch, process, ended)
        self._look(launch.directory)
        return ended

    def _kill_below(self, directory: Path) -> None:
        """Workers or agents of one launcher, until it has come to an end nevertheless."""
        launch = Launch(directory)
        process = launch.start(*self.undisturbed.sweep)
        deadline = time.monotonic() + LONGEST_LAUNCH_S
        while not _wait(process, self._random.uniform(0, PAUSE_S[self.victim])):
            if time.monotonic() > deadline:
                process.kill()
                self.wrong.append(f"{directory}: no end in {LONGEST_LAUNCH_S:g} s")
                break
            victims = _victims(launch, self.victim)
            if victims and self.kills < self.wanted:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._random.choice(victims), signal.SIGKILL)
                self.kills += 1
            self._look(directory)
        self._check_end(launch, process, ended=True)

    def _look(self, directory: Path) -> None:
        """Whether what was finished is still there, and the same measurement."""
        now = finished_points(directory)
        for name, result in self._finished.items():
            if now.get(name) != result:
                self.wrong.append(f"{directory}/{name}: {'measured twice' if name in now else 'lost'}")
        self._finished = now

    def _check_end(self, launch: Launch, process: subprocess.Popen[str], ended: bool) -> None:
        """How it ended, if it was not killed, and that nothing of it lives on."""
        stdout, stderr = process.communicate()
        if ended and process.returncode:
            self.wrong.append(f"exit status {process.returncode}:\n{stdout}{stderr}")
        deadline = time.monotonic() + GONE_S
        while (living := launch.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.wrong += [f"process {pid} is left: {command}" for pid, command in living.items()]

    def _check_complete(self, directory: Path) -> None:
        self._look(directory)
        self.complete += 1
        self.points += len(self._finished)
        if {name: result.point for name, result in self._finished.items()} != self.undisturbed.points:
            self.wrong.append(f"{directory}: other points than undisturbed")
        for name, result in self._finished.items():
            if result.status != "ok" or not result.objective_us:
                self.wrong.append(f"{directory}/{name}: {result.status}: {result.error}")
        left = [path for pattern in ("*.tmp", ".tmp_*", "attempts.json") for path in directory.rglob(pattern)]
        self.wrong += [f"left behind: {path}" for path in left]


def _wait(process: subprocess.Popen[str], seconds: float) -> bool:
    """Whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def _victims(launch: Launch, kind: str) -> list[int]:
    if kind == "worker":
        return launch.workers()
    return [pid for pid, command in launch.processes().items() if "overlap_sweep.runtime.agent" in command]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", choices=VICTIMS, action="append", help="may be given more than once; default: all")
    parser.add_argument("--kills", type=int, default=50, help="of each victim (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where the sweeps go; default: a temporary one")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        root = (given.directory or Path(temporary)).absolute()
        undisturbed = Undisturbed.run(SWEEP, root / "undisturbed")
        victims = given.victim or VICTIMS
        done = [Kills(undisturbed, victim, given.kills, given.seed, root / victim).run() for victim in victims]
    return int(any(kills.wrong for kills in done))


if __name__ == "__main__":
    sys.exit(main())
