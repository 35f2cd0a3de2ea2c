"""What runs inside one Slurm job: some points of a sweep, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import point_identity
from overlap_sweep.runtime.attempts import STOP_AFTER_POINT, Stopped, count_for_launch, listen, stop_if_told
from overlap_sweep.runtime.group import GROUP_LOG, close_shared, share_pool
from overlap_sweep.runtime.jobs import Job, Sweep, keep_results, work_off
from overlap_sweep.runtime.lock import claimed
from overlap_sweep.runtime.outcome import outcomes, progress
from overlap_sweep.runtime.slurm.queue import RECORDS, on_record

IDLE_RESTARTS = 3
"""A job that was told to stop before it had finished a point asks to be queued again no more often than this."""
CLAIM_PATIENCE_S = 300.0
"""How long to wait for a point that another job has: it may be one that Slurm has given up, and is about to die."""
END_PATIENCE_S = 600.0
"""How long to wait to be killed, where that was announced."""


def composed_here(sweep: Sweep, submitted: Job) -> Job:
    """Returns the job as it is composed on this node. UserError where that is something else than where it was
    submitted, which would be measured in the other's name."""
    job = sweep.compose_one(submitted.overrides, submitted.number)
    here, there = point_identity(job.point), point_identity(submitted.point)
    different = [
        f"{name} is {here.get(name)}" for name in here.keys() | there.keys() if here.get(name) != there.get(name)
    ]
    if job.directory != submitted.directory:
        different.append(f"its directory is {job.directory}")
    if different:
        raise UserError(
            f"{submitted.directory} is another point on this node than where it was submitted: {'; '.join(different)}; "
            "give what differs explicitly, such as runtime.device."
        )
    return job


@dataclass(frozen=True)
class Batch:
    """Called by submitit on the node, again from the start when Slurm queues the job again. Only this goes to the job
    by pickle, and nothing comes back so: results lie in the run directories."""

    sweep: Sweep
    points: list[Job]
    """As they were composed where they were submitted."""
    launch: str
    singletons: Any
    """Hydra's, without which it composes nothing."""

    def __call__(self) -> None:
        # Instead of submitit's handlers, which would give up the point that is running.
        listen()
        Singleton.set_state(self.singletons)
        count_for_launch(self.launch)
        self.sweep.set_up()
        if not on_record(self.sweep.directory, _job_id(), self.launch):
            sys.exit(f"error: job {_job_id()} is not on record: its launch died before that, or has given it up.")
        try:
            jobs = [composed_here(self.sweep, point) for point in self.points]
        except UserError as error:
            sys.exit(f"error: {error}")
        kept = keep_results(self.sweep, jobs)
        left = [job for job in jobs if job.directory not in kept]
        share_pool(self.sweep.directory / RECORDS / f"{_job_id()}_{GROUP_LOG}")
        try:
            with progress(len(left), outcomes):
                returned = self._work_off(left)
        except Stopped as stopped:
            print(f"stopped by {stopped}: {outcomes.counts_line()}", flush=True)
            if stopped.number != STOP_AFTER_POINT:
                _await_the_end()
            elif len(outcomes.missing) < len(left) or _restarts() < IDLE_RESTARTS:
                _queue_again()
            return
        for directory, reason in outcomes.given_up.items():
            print(f"{directory.name}: {reason}", file=sys.stderr, flush=True)
        for job_return in returned:
            # Raises what the task did: Hydra keeps that for whoever asks, and submitit writes it to the job's log.
            _ = job_return.return_value

    def _work_off(self, jobs: Sequence[Job]) -> list[JobReturn]:
        returned: list[JobReturn] = []
        for job in jobs:
            job.directory.mkdir(parents=True, exist_ok=True)
            with claimed(job.directory, CLAIM_PATIENCE_S) as ours:
                stop_if_told()
                if ours:
                    returned += work_off(self.sweep, [job]).values()
        return returned

    def checkpoint(self) -> Any:
        """For submitit's own handlers, should the signal come before `listen`."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def _queue_again() -> None:
    """Where that is not allowed, whoever waits for the results submits a new job."""
    answer = subprocess.run(["scontrol", "requeue", _job_id()], capture_output=True, text=True, check=False)
    print(answer.stderr.strip() or f"job {_job_id()} is queued again", flush=True)


def _await_the_end() -> None:
    """Slurm announces with SIGTERM that it will kill the job. One that ends by itself before counts as complete, and is
    not queued again after a preemption."""
    close_shared()
    time.sleep(END_PATIENCE_S)
    sys.exit(1)


def _job_id() -> str:
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array else os.environ["SLURM_JOB_ID"]
