"""Waiting for the results of Slurm jobs, and handing on what a dead job leaves undone."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from overlap_sweep.run_directory import Result, write_result
from overlap_sweep.runtime.attempts import Attempts
from overlap_sweep.runtime.jobs import Job
from overlap_sweep.runtime.kept import whole_result
from overlap_sweep.runtime.outcome import Outcome, Outcomes
from overlap_sweep.runtime.slurm.packing import Pack
from overlap_sweep.runtime.slurm.queue import JobState, job_states
from overlap_sweep.runtime.slurm.records import forget

LOG_TAIL_LINES = 20
TELL_EVERY_S = 10.0
PATIENCE_POLLS = 2
"""A job counts as ended when seen so this often in a row: on network file systems its last results show later."""


@dataclass
class Submitted:
    """A job and its forebears, whose points it took over."""

    pack: Pack
    launch: str
    log: Path
    idle_deaths: int = 0
    """How many of them in a row ended without a result or as much as an attempt."""
    attempts: int = 0
    seen_ended: int = 0


@dataclass
class Watch:
    """`run` returns when every point has a result or is given up."""

    directory: Path
    jobs: dict[str, Submitted]
    """By id. What is handed on is added."""
    submit: Callable[[Pack], tuple[str, Submitted]]
    outcomes: Outcomes
    poll_s: float
    results: dict[Path, Result] = field(default_factory=dict)
    _told: str = ""
    _told_at_s: float = -math.inf

    def run(self) -> None:
        self._left = {job.directory: job for submitted in self.jobs.values() for job in submitted.pack.jobs}
        while True:
            self._collect()
            if not self._left:
                break
            self._look_after_jobs()
            if self._left:
                time.sleep(self.poll_s)
        for job_id in list(self.jobs):
            forget(self.directory, job_id)

    def _collect(self) -> None:
        """Results that have come since."""
        for directory in list(self._left):
            if result := whole_result(directory):
                self._has_result(directory, result)

    def _has_result(self, directory: Path, result: Result) -> None:
        del self._left[directory]
        self.results[directory] = result
        self.outcomes.add(Outcome.of(result, directory))

    def _look_after_jobs(self) -> None:
        states = job_states({job_id: submitted.log for job_id, submitted in self.jobs.items()})
        if states is None:
            self._tell("slurm: the controller does not answer; jobs go on meanwhile")
            return
        counts = Counter(str(state) for state in states.values())
        self._tell("slurm: jobs: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
        for job_id, state in states.items():
            submitted = self.jobs[job_id]
            submitted.seen_ended = submitted.seen_ended + 1 if state.ended else 0
            if submitted.seen_ended >= PATIENCE_POLLS:
                self._collect()
                del self.jobs[job_id]
                forget(self.directory, job_id)
                self._inherit(job_id, submitted, state)

    def _tell(self, news: str) -> None:
        """Unless it was told already, or something else just now."""
        if news != self._told and time.monotonic() - self._told_at_s > TELL_EVERY_S:
            self._told, self._told_at_s = news, time.monotonic()
            self.outcomes.say(news)

    def _inherit(self, job_id: str, submitted: Submitted, state: JobState) -> None:
        """Decide what becomes of the points that an ended job leaves."""
        left = [job for job in submitted.pack.jobs if job.directory in self._left]
        if not left:
            return
        if state.cancelled:
            for job in left:
                del self._left[job.directory]
                self.outcomes.given_up[job.directory] = f"Slurm job {job_id} was cancelled"
            return
        story = "\n".join(filter(None, (f"Slurm job {job_id} ended: {state}", _tail(submitted.log))))
        tried = 0
        for job in left:
            attempts = Attempts(job.directory, submitted.launch)
            attempts.bury(story)
            tried += len(attempts.failed)
        worked = len(left) < len(submitted.pack.jobs) or tried > submitted.attempts
        idle_deaths = 0 if worked else submitted.idle_deaths + (state.state != "PREEMPTED")
        if idle_deaths > max(job.point["runtime"]["retries"] for job in left):
            for job in left:
                self._has_result(job.directory, _failed(job, story))
            return
        successor_id, successor = self.submit(Pack(submitted.pack.options, left))
        successor.idle_deaths, successor.attempts = idle_deaths, tried
        self.jobs[successor_id] = successor
        self.outcomes.say(f"slurm: job {successor_id} goes on with the {len(left)} points that {job_id} left")


def _failed(job: Job, error: str) -> Result:
    result = Result(
        name=job.name,
        point=job.point,
        status="failed",
        error=error,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    job.directory.mkdir(parents=True, exist_ok=True)
    write_result(job.directory, result)
    return result


def _tail(log: Path) -> str:
    """The end of what the job printed, empty if it printed nothing."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
