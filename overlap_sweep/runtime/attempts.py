"""Tries at one point. They are counted beyond the death of the process that makes them where a successor takes over."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from overlap_sweep.run_directory import FailedAttempt, Status, write_atomically

ATTEMPTS_FILE = "attempts.json"

AttemptStatus = Literal["running", "interrupted", "failed", "timeout"]


class Attempt(msgspec.Struct):
    started: str
    where: str
    status: AttemptStatus = "running"
    error: str = ""


class AttemptsRecord(msgspec.Struct):
    """The content of attempts.json, which lies in the run directory while the point has no result."""

    launch: str
    """Attempts of another launch don't count: its user has given the point another chance."""
    attempts: list[Attempt] = []


_launch: str | None = None


def count_for_launch(launch: str) -> None:
    """From now on this process's attempts count together with those of others that work for the same launch."""
    global _launch
    _launch = launch


class Attempts:
    """`with attempts.next(): ...` around each."""

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

    def bury(self, error: str) -> bool:
        """The attempt that is noted as running has died with its process, for `error`; whether there was one."""
        running = [attempt for attempt in self._all if attempt.status == "running"]
        for attempt in running:
            attempt.status, attempt.error = "failed", error
        if running:
            self._write()
        return bool(running)

    def begin(self) -> None:
        job = os.environ.get("SLURM_JOB_ID")
        where = platform.node() + (f", Slurm job {job}" if job else "")
        self._all.append(Attempt(datetime.now(UTC).isoformat(timespec="seconds"), where))
        self._write()

    def end(self, status: AttemptStatus, error: str = "") -> None:
        self._all[-1].status, self._all[-1].error = status, error
        self._write()

    @property
    def failed(self) -> list[FailedAttempt]:
        """Those that count: not those that were interrupted."""
        return [
            FailedAttempt(
                status=_STATUS[attempt.status], error=attempt.error, started=attempt.started, where=attempt.where
            )
            for attempt in self._all
            if attempt.status in _STATUS
        ]

    def forget(self) -> None:
        """There is a result now."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self._shared is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, msgspec.json.encode(AttemptsRecord(self._shared, self._all)))


_STATUS: dict[AttemptStatus, Status] = {"failed": "failed", "timeout": "timeout"}
