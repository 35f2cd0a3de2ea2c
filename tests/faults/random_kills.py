"""Kill -9 processes of sweeps at random moments, go on until all points are measured, and count what went wrong.

A worker or an agent is killed under a launcher that lives; a killed launcher is followed by a resuming one. A sweep
that is complete before the kills are used up is checked, and followed by another in a new directory. Each is then
compared with one that nobody disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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


@dataclass
class Counts:
    kills: int = 0
    launches: int = 0
    sweeps: int = 0
    """Complete ones, the undisturbed one not counted."""
    points: int = 0
    """Of the complete sweeps."""
    killed_attempts: int = 0
    """Of worker or agent, noted in the results of the points that they were working for."""
    lost: int = 0
    """Results that were there before a kill and not after it."""
    measured_twice: int = 0
    wrong: list[str] = field(default_factory=list)
    """What else is not as it should be."""

    @property
    def clean(self) -> bool:
        return not (self.lost or self.measured_twice or self.wrong)

    def __str__(self) -> str:
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(self).items() if name != "wrong")
        return "\n".join([f"{told}, wrong {len(self.wrong)}", *self.wrong])


@dataclass
class Watched:
    """One sweep's directory, and what was finished in it when it was last looked at."""

    directory: Path
    counts: Counts
    finished: dict[str, Result] = field(default_factory=dict)

    def look(self) -> None:
        """Whether what was finished is still there, and the same measurement."""
        now = finished_points(self.directory)
        self.counts.lost += len(self.finished.keys() - now.keys())
        same = {name for name in now.keys() & self.finished.keys() if now[name] == self.finished[name]}
        self.counts.measured_twice += len(now.keys() & self.finished.keys()) - len(same)
        self.finished = now

    def check_complete(self, expected: dict[str, Any]) -> None:
        """Against the points of the undisturbed sweep, by name."""
        self.look()
        counts = self.counts
        counts.sweeps += 1
        counts.points += len(self.finished)
        found = {name: result.point for name, result in self.finished.items()}
        if found != expected:
            differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            counts.wrong.append(f"{self.directory}: other points than undisturbed: {', '.join(differing)}")
        for name, result in self.finished.items():
            counts.killed_attempts += len(result.earlier_attempts)
            if result.status != "ok" or not result.objective_us:
                counts.wrong.append(f"{self.directory}/{name}: {result.status}: {result.error}")
        left = [path for pattern in ("*.tmp", ".tmp_*", "attempts.json") for path in self.directory.rglob(pattern)]
        counts.wrong += [f"left behind: {path}" for path in left]


def finished_points(directory: Path) -> dict[str, Result]:
    """By name those whose result is there, and whole."""
    found = {path.name: whole_result(path) for path in find_points(directory) if (path / RESULT_FILE).exists()}
    return {name: result for name, result in found.items() if result}


class Kills:
    """As many as are asked for, over as many sweeps as that takes."""

    def __init__(self, victim: str, kills: int, seed: int, root: Path) -> None:
        self.victim, self.wanted, self.root = victim, kills, root
        self.counts = Counts()
        self._random = random.Random(seed)

    def run(self) -> Counts:
        started = time.monotonic()
        expected = self._undisturbed()
        self._usual_s = time.monotonic() - started
        while self.counts.kills < self.wanted and self.counts.clean:
            watched = Watched(self.root / f"sweep{self.counts.sweeps}", self.counts)
            one_sweep = self._kill_launchers if self.victim == "launcher" else self._kill_below
            one_sweep(watched)
            watched.check_complete(expected)
            print(f"{self.victim}: {self.counts}", flush=True)
        return self.counts

    def _undisturbed(self) -> dict[str, Any]:
        launch = Launch(self.root / "undisturbed")
        done = launch.run(*SWEEP)
        found = {name: result.point for name, result in finished_points(launch.directory).items()}
        if done.returncode or len(found) != 12:
            raise SystemExit(f"the undisturbed sweep did not end well:\n{done.stdout}\n{done.stderr}")
        return found

    def _kill_launchers(self, watched: Watched) -> None:
        """One after the other, until one comes to an end."""
        resume: tuple[str, ...] = ()
        while True:
            launch = Launch(watched.directory)
            process = self._start(launch, *resume)
            moment_s = self._random.uniform(0, self._usual_s) if self.counts.kills < self.wanted else LONGEST_LAUNCH_S
            ended = self._wait(process, moment_s)
            if not ended:
                process.kill()
                self.counts.kills += 1
            stdout, stderr = process.communicate()
            self._check_gone(launch)
            watched.look()
            if ended:
                self._check_end(process, stdout + stderr)
                return
            # One that was killed at once left nothing to go on with.
            resume = (f"resume={watched.directory}",) if watched.directory.exists() else ()

    def _kill_below(self, watched: Watched) -> None:
        """Workers or agents of one launcher, until it has come to an end nevertheless."""
        launch = Launch(watched.directory)
        process = self._start(launch)
        deadline = time.monotonic() + LONGEST_LAUNCH_S
        while not self._wait(process, self._random.uniform(0, PAUSE_S[self.victim])):
            if time.monotonic() > deadline:
                process.kill()
                self.counts.wrong.append(f"{watched.directory}: no end in {LONGEST_LAUNCH_S:g} s")
                break
            victims = _victims(launch, self.victim)
            if victims and self.counts.kills < self.wanted:
                _kill(self._random.choice(victims))
                self.counts.kills += 1
            watched.look()
        stdout, stderr = process.communicate()
        self._check_end(process, stdout + stderr)
        self._check_gone(launch)

    def _start(self, launch: Launch, *arguments: str) -> subprocess.Popen[str]:
        self.counts.launches += 1
        return launch.start(*SWEEP, *arguments)

    def _wait(self, process: subprocess.Popen[str], seconds: float) -> bool:
        """Whether it has ended."""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _check_end(self, process: subprocess.Popen[str], said: str) -> None:
        if process.returncode:
            self.counts.wrong.append(f"exit status {process.returncode}:\n{said}")

    def _check_gone(self, launch: Launch) -> None:
        deadline = time.monotonic() + GONE_S
        while (living := launch.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.counts.wrong += [f"process {pid} is left: {command}" for pid, command in living.items()]


def _victims(launch: Launch, kind: str) -> list[int]:
    if kind == "worker":
        return launch.workers()
    return [pid for pid, command in launch.processes().items() if "overlap_sweep.runtime.agent" in command]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        print(f"{pid} was gone already", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--victim", choices=VICTIMS, action="append", help="may be given more than once; default: all")
    parser.add_argument("--kills", type=int, default=50, help="of each victim (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where the sweeps go; default: a temporary one")
    given = parser.parse_args(arguments)
    clean = True
    with tempfile.TemporaryDirectory() as temporary:
        for victim in given.victim or VICTIMS:
            root = (given.directory or Path(temporary)).absolute() / victim
            started = time.monotonic()
            counts = Kills(victim, given.kills, given.seed, root).run()
            clean = clean and counts.clean
            print(f"{victim}: in {time.monotonic() - started:.0f} s {counts}", flush=True)
    return int(not clean)


if __name__ == "__main__":
    sys.exit(main())
