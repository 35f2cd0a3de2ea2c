"""What runs inside one Slurm job: some points of a sweep, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton

from overlap_sweep.errors import UserError
from overlap_sweep.runtime.attempts import count_for_launch
from overlap_sweep.runtime.jobs import Sweep, distinct, keep_results, work_off
from overlap_sweep.runtime.lock import hold
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.pool import share_pool
from overlap_sweep.runtime.progress import progress
from overlap_sweep.runtime.slurm.records import on_record
from overlap_sweep.runtime.stopping import Stopped, listen, told_to_stop

IDLE_RESTARTS = 3
"""A job that was told to stop before it had finished a point asks to be queued again no more often than this."""


@dataclass(frozen=True)
class Batch:
    """Called by submitit on the node, again from the start when Slurm queues the job again. Only this goes to the job
    by pickle, and nothing comes back so: results lie in the run directories."""

    sweep: Sweep
    overrides: list[list[str]]
    launch: str
    lock: Path
    """A directory for this batch alone: should Slurm start it twice, the second does nothing."""
    singletons: Any
    """Hydra's, without which it composes nothing."""

    def __call__(self) -> None:
        # Instead of submitit's handlers, which would give up the point that is running.
        listen()
        Singleton.set_state(self.singletons)
        count_for_launch(self.launch)
        self.sweep.set_up()
        self.lock.mkdir(parents=True, exist_ok=True)
        if not on_record(self.sweep.directory, _job_id(), self.launch):
            sys.exit(f"error: job {_job_id()} is not on record: its launch died before that, or has given it up.")
        try:
            hold(self.lock)
            jobs = distinct(self.sweep.compose(self.overrides, 0))
        except UserError as error:
            sys.exit(f"error: {error}")
        outcomes.expect(job.directory for job in jobs)
        kept = keep_results(jobs)
        left = [job for job in jobs if job.directory not in kept]
        share_pool(self.lock / "workers.log")
        try:
            with progress(len(left), outcomes):
                work_off(self.sweep, left)
        except Stopped as stopped:
            print(f"stopped by {stopped}: {outcomes.counts_line()}", flush=True)
            if told_to_stop() and (len(outcomes.missing) < len(left) or _restarts() < IDLE_RESTARTS):
                _queue_again()

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


def _job_id() -> str:
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array else os.environ["SLURM_JOB_ID"]
