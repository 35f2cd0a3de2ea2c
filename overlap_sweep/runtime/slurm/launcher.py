"""`hydra/launcher=slurm`: have a sweep's points worked off by few Slurm jobs, and wait for their results.

What a dead job leaves undone is handed on to another.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from hydra.core.utils import JobReturn

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Result, write_result
from overlap_sweep.runtime.attempts import Attempts, stop_if_told
from overlap_sweep.runtime.jobs import Job, Sweep, begin, distinct, job_return, keep_results
from overlap_sweep.runtime.kept import LASTING, is_of, of_launch, whole_result
from overlap_sweep.runtime.outcome import Outcome, Outcomes, outcomes, progress, tail
from overlap_sweep.runtime.slurm.queue import JobRecord, JobState, forget, forget_if_done, job_states, living_jobs
from overlap_sweep.runtime.slurm.submission import Pack, Submitted, check_slurm, launcher_options, pack, submit

LOG_TAIL_LINES = 20

TELL_EVERY_S = 10.0

PATIENCE_POLLS = 2
"""A job counts as ended when seen so this often in a row: on network file systems its last results show later."""

NOT_ITS_FAULT = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED")
"""States in which a job ends whatever it does."""


def launch(sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[JobReturn]:
    """Run every job that has no result yet and that no living Slurm job is to run, one that occurs twice once; returns
    in the order of `job_overrides`.

    UserError before anything is submitted when any job's configuration is wrong, or the directory is in use; or when
    Slurm refuses.
    """
    check_slurm()
    jobs = begin(sweep, job_overrides, first_index)
    points = distinct(jobs)
    results = keep_results(sweep, points)
    left = [job for job in points if job.directory not in results]
    if left:
        with progress(len(left), outcomes):
            results |= _have_measured(sweep, left)
    return [job_return(job, results.get(job.directory)) for job in jobs]


def _have_measured(sweep: Sweep, jobs: Sequence[Job]) -> dict[Path, Result]:
    adopted = adopt(living_jobs(sweep.directory), jobs)
    taken = {job.directory for submitted in adopted.values() for job in submitted.pack.jobs}
    new = [job for job in jobs if job.directory not in taken]
    poll_s = launcher_options(jobs[0])["poll_s"]
    watch = Watch(sweep.directory, dict(adopted), partial(submit, sweep), outcomes, poll_s)
    try:
        own = submit(sweep, pack(new), uuid.uuid4().hex[:12])
        watch.jobs |= own
        if taken:
            outcomes.say(f"slurm: {len(taken)} points are left to jobs of an earlier launch: {', '.join(adopted)}")
        if own:
            outcomes.say(f"slurm: {len(new)} points in {len(own)} jobs: {', '.join(own)}")
        watch.run()
    except BaseException:
        if watch.jobs:
            outcomes.say(f"slurm: jobs go on without this process; end them with: scancel {' '.join(watch.jobs)}")
        raise
    return watch.results


def adopt(records: Sequence[JobRecord], jobs: Sequence[Job]) -> dict[str, Submitted]:
    """Returns by id the living jobs of earlier launches that are to measure some of these points, or just have. Points
    that failed there are tried anew.

    UserError when one of them measures another point in the same directory.
    """
    by_name = {job.name: job for job in jobs}
    found = {}
    for record in records:
        points = [by_name[name] for name in record.points if name in by_name]
        if others := [job.name for job in points if job.key != record.points[job.name]]:
            raise UserError(
                f"Slurm job {record.job_id} measures {others[0]} with another configuration; wait for it, or end it: "
                f"scancel {record.job_id}."
            )
        results = [(job, whole_result(job.directory)) for job in points]
        theirs = [job for job, result in results if not (result and _failed_in(result, record.launch))]
        if theirs:
            found[record.job_id] = Submitted(Pack(pack(theirs)[0].options, theirs), record.launch, Path(record.log))
    return found


def _failed_in(result: Result, launch: str) -> bool:
    return of_launch(result, launch) and result.status not in LASTING


@dataclass
class Watch:
    """`run` returns when every point has a result or is given up."""

    directory: Path
    jobs: dict[str, Submitted]
    """By id. What is handed on is added."""
    submit: Callable[[Sequence[Pack], str], dict[str, Submitted]]
    """For the launch of that name, by id."""
    outcomes: Outcomes
    poll_s: float
    results: dict[Path, Result] = field(default_factory=dict)
    _told: str = ""
    _told_at_s: float = -math.inf

    def run(self) -> None:
        submitted = [*self.jobs.values()]
        self._left = {job.directory: job for one in submitted for job in one.pack.jobs}
        self._launches = {one.launch for one in submitted}
        while True:
            self._collect()
            if not self._left:
                break
            stop_if_told()
            self._look_after_jobs()
            if self._left:
                time.sleep(self.poll_s)
        for job_id in list(self.jobs):
            forget_if_done(self.directory, job_id)

    def _collect(self) -> None:
        """Takes the results that have come since: what lay there before is of another launch."""
        for directory, job in list(self._left.items()):
            result = whole_result(directory)
            if result and is_of(result, job.point) and any(of_launch(result, launch) for launch in self._launches):
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
        """Says it unless it was said already, or something else just now."""
        if news != self._told and time.monotonic() - self._told_at_s > TELL_EVERY_S:
            self._told, self._told_at_s = news, time.monotonic()
            self.outcomes.say(news)

    def _inherit(self, job_id: str, submitted: Submitted, state: JobState) -> None:
        """Decides what becomes of the points that an ended job leaves."""
        left = [job for job in submitted.pack.jobs if job.directory in self._left]
        for job in left:
            # What the job found there and took for as good as its own.
            result = whole_result(job.directory)
            if state.state == "COMPLETED" and result and result.status in LASTING and is_of(result, job.point):
                self._has_result(job.directory, result)
        left = [job for job in left if job.directory in self._left]
        if not left:
            return
        if state.cancelled:
            self._give_up(left, f"Slurm job {job_id} was cancelled")
            return
        story = "\n".join(filter(None, (f"Slurm job {job_id} ended: {state}", tail(submitted.log, LOG_TAIL_LINES))))
        finished = len(left) < len(submitted.pack.jobs)
        attempts = {job.directory: Attempts(job.directory, submitted.launch) for job in left}
        for one in attempts.values():
            one.bury(story, lost=state.state in NOT_ITS_FAULT)
            if state.state == "TIMEOUT" and not finished:
                one.condemn(story)
        tried = sum(len(one.ended) for one in attempts.values())
        worked = finished or tried > submitted.attempts
        idle_deaths = 0 if worked else submitted.idle_deaths + (state.state not in NOT_ITS_FAULT)
        if idle_deaths > max(job.point["runtime"]["retries"] for job in left):
            for job in left:
                self._has_result(job.directory, _failed(job, story, submitted.launch, attempts[job.directory]))
            return
        try:
            ((successor_id, successor),) = self.submit([Pack(submitted.pack.options, left)], submitted.launch).items()
        except UserError as error:
            self._give_up(left, f"Slurm job {job_id} ended: {state}; its successor was refused: {error}")
            return
        successor.idle_deaths, successor.attempts = idle_deaths, tried
        self.jobs[successor_id] = successor
        self.outcomes.say(f"slurm: job {successor_id} goes on with the {len(left)} points that {job_id} left")

    def _give_up(self, jobs: list[Job], reason: str) -> None:
        for job in jobs:
            del self._left[job.directory]
            self.outcomes.given_up[job.directory] = reason


def _failed(job: Job, error: str, launch: str, attempts: Attempts) -> Result:
    result = Result(
        name=job.name,
        point=job.point,
        status="failed",
        error=error,
        launch=launch,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        earlier_attempts=attempts.ended,
    )
    job.directory.mkdir(parents=True, exist_ok=True)
    write_result(job.directory, result)
    attempts.forget()
    return result
