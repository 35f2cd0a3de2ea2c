"""Tries at one point, how long one may take, and when no further one is begun.

Tries are counted beyond the death of the process that makes them where a successor takes over. How long a point may
take is learnt from how long its like took. A process is told to stop at once (SIGTERM), or after the point that is
running (SIGUSR2, which cluster managers send ahead of a time limit or a preemption).
"""

from __future__ import annotations

import os
import platform
import signal
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from overlap_sweep import workloads
from overlap_sweep.results.run_directory import Attempt, Result, write_atomically

ATTEMPTS_FILE = "attempts.json"

MOST_LOST = 3
"""A point whose node or job goes away again and again may be what drives them away."""

_launch: str | None = None

LEAST_S = 30.0
"""A first pass may compile, and a profile may be written: no reason to give up."""


class AttemptsRecord(msgspec.Struct):
    """The content of attempts.json, which lies in the run directory while the point has no result."""

    launch: str
    """Attempts of another launch don't count: its user has given the point another chance."""
    attempts: list[Attempt] = []


def count_for_launch(launch: str) -> None:
    """Has this process's attempts counted together with those of others that work for the same launch."""
    global _launch
    _launch = launch


def current_launch() -> str | None:
    return _launch


class Attempts:
    """Those at the point of one run directory."""

    def __init__(self, directory: Path, launch: str | None = None) -> None:
        self._directory, self._path = directory, directory / ATTEMPTS_FILE
        self._shared = launch or _launch
        self._all = self._earlier()

    def _earlier(self) -> list[Attempt]:
        if self._shared is None or not self._path.exists():
            return []
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=AttemptsRecord)
        except msgspec.DecodeError:
            # Somebody else's file of that name: there is nothing to count in it.
            return []
        return record.attempts if record.launch == self._shared else []

    def bury(self, error: str, lost: bool = False) -> None:
        """The attempt that is noted as running, if there is one, has died with its process for `error`; `lost` where
        that need not be the point's fault."""
        running = [attempt for attempt in self._all if attempt.status == "running"]
        for attempt in running:
            attempt.status, attempt.error = "lost" if lost else "failed", error
        if running:
            self._write()

    def begin(self) -> None:
        job = os.environ.get("SLURM_JOB_ID")
        where = platform.node() + (f", Slurm job {job}" if job else "")
        self._all.append(Attempt(started=datetime.now(UTC).isoformat(timespec="seconds"), where=where))
        self._write()

    def end(self, status: Literal["interrupted", "failed", "timeout"], error: str = "") -> None:
        self._all[-1].status, self._all[-1].error = status, error
        self._write()

    def condemn(self, error: str) -> None:
        """The last attempt, which was interrupted, had all the time that there is."""
        if self._all and self._all[-1].status == "interrupted":
            self.end("timeout", error)

    @property
    def ended(self) -> list[Attempt]:
        """Returns the attempts that have ended without a result."""
        return [one for one in self._all if one.status in ("failed", "timeout", "lost")]

    @property
    def failed(self) -> list[Attempt]:
        """Returns the failed attempts that count: of the lost ones only what comes after the first few."""
        lost = [one for one in self._all if one.status == "lost"]
        return [one for one in self.ended if one not in lost[:MOST_LOST]]

    def forget(self) -> None:
        """Removes what is noted: there is a result now."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._shared is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, msgspec.json.encode(AttemptsRecord(self._shared, self._all)))


class TimeLimits:
    """Learns from every result that it is shown."""

    def __init__(self) -> None:
        self._longest_s: dict[tuple[Any, ...], float] = defaultdict(float)

    def learn(self, result: Result) -> None:
        if result.status == "ok" and result.wall_s and not result.reused_from:
            kind = _kind(result.point)
            self._longest_s[kind] = max(self._longest_s[kind], result.wall_s)

    def limit_s(self, point: Mapping[str, Any]) -> float:
        """Returns `runtime.timeout_s`, and less where points of this kind were measured."""
        runtime = point["runtime"]
        most_s, factor = float(runtime["timeout_s"]), runtime["timeout_factor"]
        longest_s = self._longest_s.get(_kind(point))
        if not longest_s or not factor:
            return most_s
        return min(most_s, max(LEAST_S, factor * longest_s))


def _kind(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what decides, roughly, how long a point takes."""
    workload, asked = workloads.of(point), point["workload"]
    of_point = (point["model"]["name"], workload.world_size(point), point["backend"], point["precision"])
    of_workload = (workload.name, workload.subject(point), asked["tokens"], asked["repeats"], *workload.cost(point))
    return (*of_point, point["runtime"]["device"], *of_workload)


limits = TimeLimits()
"""Of this process."""


STOP_AFTER_POINT = signal.SIGUSR2
STOP_NOW = signal.SIGTERM


class Stopped(KeyboardInterrupt):
    """By a signal, as by Ctrl-C: what is running is given up and leaves no result."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number
        self.exit_status = 128 + number


_stop_signal: signal.Signals | None = None


def listen() -> None:
    """Listens for signals from now on; called in the main thread."""
    signal.signal(STOP_AFTER_POINT, _after_the_point)
    signal.signal(STOP_NOW, _now)


def stop_if_told() -> None:
    """Raises `Stopped` if no further point should be begun."""
    if _stop_signal is not None:
        raise Stopped(_stop_signal)


def _after_the_point(number: int, frame: Any) -> None:
    global _stop_signal
    _stop_signal = signal.Signals(number)


def _now(number: int, frame: Any) -> None:
    # Slurm sends it twice, and the second must not disturb the tidying up after the first.
    signal.signal(STOP_NOW, signal.SIG_IGN)
    raise Stopped(signal.Signals(number))
