"""Runs a sweep's points in a few jobs of a cluster, as `hydra/launcher=slurm` does, and waits for their results.

The unfinished points of a dead job go to a new one.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from hydra.core.utils import JobReturn

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Attempt, Result, clear, now, write_result
from overlap_sweep.runtime.cluster import Cluster, JobState
from overlap_sweep.runtime.cluster.packs import Pack, Submitted, options_of, pack, submit
from overlap_sweep.runtime.cluster.records import JobRecord, forget, given_up_path, living_jobs
from overlap_sweep.runtime.jobs import Job, Sweep, begin, distinct, job_return, keep_results
from overlap_sweep.runtime.kept import whole_result
from overlap_sweep.runtime.lock import CLAIM_FILE
from overlap_sweep.runtime.nodes import nodes_refusal
from overlap_sweep.runtime.outcome import Outcome, Outcomes, outcomes, stop_if_requested, tail
from overlap_sweep.runtime.point import measure
from overlap_sweep.runtime.progress import announce, progress

LOG_TAIL_LINES = 20

PRINT_EVERY_S = 10.0

PATIENCE_POLLS = 2
"""Polls in a row that must report a job as ended: on network file systems its last results appear late."""

MOST_LOST = 3
"""Lost jobs or nodes that a point is tried again after; if there are more, it may cause them."""


def launch(cluster: Cluster, sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[JobReturn]:
    """Runs every distinct job that has no result and belongs to no living job of the cluster; returns in the order of
    `job_overrides`.

    UserError if a configuration is wrong or the directory is in use, before anything is submitted, or if the cluster
    refuses.
    """
    cluster.check()
    jobs = begin(sweep, job_overrides, first_index)
    points = distinct(jobs)
    announce([job.point for job in points], outcomes)
    results = keep_results(sweep, points)
    left = [job for job in points if job.directory not in results]
    if left:
        with progress(len(left), outcomes):
            refused = _refuse(left)
            left = [job for job in left if job.directory not in refused]
            results |= refused
            results |= _have_measured(cluster, sweep, left, results.keys()) if left else {}
    return [job_return(job, results.get(job.directory)) for job in jobs]


def _refuse(jobs: Sequence[Job]) -> dict[Path, Result]:
    """Returns the results of points that cannot be spread over their nodes. No job asks for nodes only to say that."""
    refused = {}
    for job in jobs:
        if nodes_refusal(job.point):
            job.directory.mkdir(parents=True, exist_ok=True)
            refused[job.directory] = measure(job.point, job.directory)
            outcomes.add(Outcome(job.directory, refused[job.directory]))
    return refused


def _have_measured(cluster: Cluster, sweep: Sweep, jobs: Sequence[Job], done: Collection[Path]) -> dict[Path, Result]:
    """Returns the results of the jobs, after those that are done."""
    adopted = adopt(cluster, living_jobs(cluster, sweep.directory), jobs, {directory.name for directory in done})
    taken = {job.directory for submitted in adopted.values() for job in submitted.pack.jobs}
    new = [job for job in jobs if job.directory not in taken]
    submitted = partial(submit, cluster, sweep)
    poll_s = options_of(cluster, jobs[0])[0].poll_s
    watch = Watch(cluster, sweep.directory, dict(adopted), submitted, outcomes, poll_s)
    try:
        for job in new:
            # Old results are not reusable and must not be mistaken for new ones.
            clear(job.directory)
            (job.directory / CLAIM_FILE).unlink(missing_ok=True)
        own = submitted(pack(cluster, new))
        watch.jobs |= own
        if taken:
            print(
                f"{cluster.name}: {len(taken)} points are in jobs of an earlier launch: {', '.join(adopted)}",
                flush=True,
            )
        if own:
            print(f"{cluster.name}: submitted {len(new)} points in {len(own)} jobs: {', '.join(own)}", flush=True)
        watch.run()
    except BaseException:
        if watch.jobs:
            cancel = cluster.cancel_command(list(watch.jobs))
            print(f"{cluster.name}: jobs continue without this process; cancel with: {cancel}", flush=True)
        raise
    return watch.results


def adopt(
    cluster: Cluster, records: Sequence[JobRecord], jobs: Sequence[Job], done: Collection[str] = ()
) -> dict[str, Submitted]:
    """Returns the living jobs of earlier launches that measure some of these points, by id. `done`: names of points
    that this launch requests, too, but which have results.

    UserError if one of them measures a different point in the same directory.
    """
    by_name = {job.name: job for job in jobs}
    found = {}
    for record in records:
        points = [by_name[name] for name in record.points if name in by_name]
        if others := [job.name for job in points if job.key != record.points[job.name]]:
            raise UserError(
                f"{cluster.title} job {record.job_id} measures {others[0]} with a different configuration; wait for "
                f"it, or cancel it with: {cluster.cancel_command([record.job_id])}"
            )
        if points:
            packed = Pack(pack(cluster, points)[0].options, points)
            has_others = not record.points.keys() <= by_name.keys() | set(done)
            found[record.job_id] = Submitted(packed, Path(record.log), has_others=has_others)
    return found


@dataclass
class Watch:
    """Waits for the results of jobs. `run` returns when every point has a result or is given up."""

    cluster: Cluster
    directory: Path
    jobs: dict[str, Submitted]
    """Jobs by id; successors of dead jobs are added."""
    submit: Callable[[Sequence[Pack]], dict[str, Submitted]]
    """Submits a job for each pack; returns them by id."""
    outcomes: Outcomes
    poll_s: float
    results: dict[Path, Result] = field(default_factory=dict)
    deaths: dict[Path, list[Attempt]] = field(default_factory=lambda: defaultdict(list))
    """Attempts that ended with their job, by the point's directory."""
    _printed: str = ""
    _printed_at_s: float = -math.inf

    def run(self) -> None:
        self._left = {job.directory for one in self.jobs.values() for job in one.pack.jobs}
        while True:
            self._collect()
            if not self._left:
                break
            stop_if_requested()
            self._look_after_jobs()
            if self._left:
                time.sleep(self.poll_s)
        for job_id, submitted in self.jobs.items():
            if not submitted.has_others:
                forget(self.cluster, self.directory, job_id)

    def _collect(self) -> None:
        for directory in list(self._left):
            if result := whole_result(directory):
                self._has_result(directory, result)

    def _has_result(self, directory: Path, result: Result) -> None:
        self._left.remove(directory)
        self.results[directory] = result
        self.outcomes.add(Outcome(directory, result))

    def _look_after_jobs(self) -> None:
        states = self.cluster.states({job_id: submitted.log for job_id, submitted in self.jobs.items()})
        if states is None:
            self._print("the controller does not answer; jobs continue")
            return
        counts = Counter(str(state) for state in states.values())
        self._print("jobs: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
        for job_id, state in states.items():
            submitted = self.jobs[job_id]
            submitted.seen_ended = submitted.seen_ended + 1 if state.end else 0
            if submitted.seen_ended >= PATIENCE_POLLS:
                self._collect()
                del self.jobs[job_id]
                self._inherit(job_id, submitted, state)
                forget(self.cluster, self.directory, job_id)

    def _print(self, line: str) -> None:
        """Prints the line unless it repeats the last one or that was printed less than PRINT_EVERY_S ago."""
        line = f"{self.cluster.name}: {line}"
        if line != self._printed and time.monotonic() - self._printed_at_s > PRINT_EVERY_S:
            self._printed, self._printed_at_s = line, time.monotonic()
            print(line, flush=True)

    def _inherit(self, job_id: str, submitted: Submitted, state: JobState) -> None:
        """Gives up the unfinished points of an ended job, or submits them again."""
        left = [job for job in submitted.pack.jobs if job.directory in self._left]
        name = f"{self.cluster.title} job {job_id}"
        if state.end == "cancelled":
            self._give_up(left, f"{name} was cancelled")
            return
        if (reason := given_up_path(self.cluster, self.directory, job_id)).exists():
            self._give_up(left, f"{name}: {reason.read_text()}")
            return
        story = "\n".join(filter(None, (f"{name} ended: {state}", tail(submitted.log, LOG_TAIL_LINES))))
        status: Literal["lost", "timeout", "failed"] = (
            state.end if state.end == "lost" or state.end == "timeout" else "failed"
        )
        for job in _blamed(left, state, finished=len(left) < len(submitted.pack.jobs)):
            earlier = self.deaths[job.directory]
            death = Attempt(status=status, error=story, started=now(), where=name)
            lost = sum(one.status == "lost" for one in (*earlier, death))
            if lost > MOST_LOST or len(earlier) + 1 - lost > job.point.runtime.retries:
                self._has_result(job.directory, _failed(job, death, earlier))
            else:
                earlier.append(death)
        left = [job for job in left if job.directory in self._left]
        if not left:
            return
        try:
            ((successor_id, successor),) = self.submit([Pack(submitted.pack.options, left)]).items()
        except UserError as error:
            self._give_up(left, f"{name} ended: {state}; {self.cluster.title} refused its successor: {error}")
            return
        self.jobs[successor_id] = successor
        print(
            f"{self.cluster.name}: job {successor_id} measures the {len(left)} points that job {job_id} left",
            flush=True,
        )

    def _give_up(self, jobs: list[Job], reason: str) -> None:
        for job in jobs:
            self._left.remove(job.directory)
            self.outcomes.given_up[job.directory] = reason


def _blamed(left: Sequence[Job], state: JobState, finished: bool) -> Sequence[Job]:
    """Returns the points that a job's end counts against: the running one, or all if the job finished none; no point if
    the job finished some and reached its time limit or completed."""
    if left and (left[0].directory / CLAIM_FILE).exists():
        return [] if finished and state.end in ("timeout", "completed") else left[:1]
    return [] if finished else left


def _failed(job: Job, death: Attempt, earlier: list[Attempt]) -> Result:
    result = Result(
        name=job.name,
        recorded=dict(job.point),
        status="timeout" if death.status == "timeout" else "failed",
        error=death.error,
        started=death.started,
        earlier_attempts=earlier,
    )
    job.directory.mkdir(parents=True, exist_ok=True)
    write_result(job.directory, result)
    return result
