"""What runs inside one Slurm job: some points of a sweep, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import point_identity
from overlap_sweep.runtime.group import GROUP_LOG, WorkerPool, shared_pool
from overlap_sweep.runtime.jobs import Job, Sweep, run_jobs
from overlap_sweep.runtime.kept import whole_result
from overlap_sweep.runtime.lock import claimed
from overlap_sweep.runtime.outcome import outcomes, progress
from overlap_sweep.runtime.point import resolve
from overlap_sweep.runtime.slurm.queue import RECORDS
from overlap_sweep.runtime.stopping import STOP_AFTER_POINT, Stopped, listen, stop_if_requested

IDLE_RESTARTS = 3
"""A job that was told to stop before it had finished a point asks to be queued again no more often than this."""
CLAIM_PATIENCE_S = 300.0
"""How long to wait for a point that another job has: it may be one that Slurm has given up, and is about to die."""
END_PATIENCE_S = 600.0
"""How long to wait to be killed, where that was announced."""


def refuse_another_point(job: Job) -> None:
    """Raises UserError where the job is another point on this node than where it was submitted, in whose name it would
    be measured."""
    HydraConfig.instance().set_config(job.config)
    here, there = point_identity(resolve(job.config)), point_identity(job.point)
    if different := sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
        raise UserError(
            f"{job.name} is another point on this node than where it was submitted ({', '.join(different)} differ); "
            "give what differs explicitly, such as runtime.device."
        )


@dataclass(frozen=True)
class Batch:
    """What submitit calls on the node, again from the start when Slurm queues the job again. Only this is pickled to
    the job, and nothing comes back so: results lie in the run directories."""

    sweep: Sweep
    points: list[Job]
    """As they were composed where they were submitted."""
    singletons: Any
    """Hydra's, without which it composes nothing."""

    def __call__(self) -> None:
        # Instead of submitit's handlers, which would give up the point that is running.
        listen()
        Singleton.set_state(self.singletons)
        self.sweep.set_up()
        try:
            for job in self.points:
                refuse_another_point(job)
        except UserError as error:
            sys.exit(f"error: {error}")
        # What was there before the launch was removed: a job that is queued again goes on.
        left = [job for job in self.points if whole_result(job.directory) is None]
        outcomes.expect(job.directory for job in left)
        pool = shared_pool(self.sweep.directory / RECORDS / f"{_job_id()}_{GROUP_LOG}")
        try:
            with progress(len(left), outcomes):
                returned = self._run_jobs(left)
        except Stopped as stopped:
            print(f"stopped by {stopped}: {outcomes.counts_line()}", flush=True)
            if stopped.number != STOP_AFTER_POINT:
                _await_the_end(pool)
            elif len(outcomes.missing) < len(left) or _restarts() < IDLE_RESTARTS:
                _queue_again()
            return
        for directory, reason in outcomes.given_up.items():
            print(f"{directory.name}: {reason}", file=sys.stderr, flush=True)
        for job_return in returned:
            # Raises what the task did: Hydra keeps that for whoever asks, and submitit writes it to the job's log.
            _ = job_return.return_value

    def _run_jobs(self, jobs: Sequence[Job]) -> list[JobReturn]:
        returned: list[JobReturn] = []
        for job in jobs:
            job.directory.mkdir(parents=True, exist_ok=True)
            with claimed(job.directory, CLAIM_PATIENCE_S) as ours:
                stop_if_requested()
                if ours and whole_result(job.directory) is None:
                    returned += run_jobs(self.sweep, [job]).values()
        return returned


def _restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT", 0))


def _queue_again() -> None:
    """Queues the job again; where that is not allowed, whoever waits for the results submits a new one."""
    answer = subprocess.run(["scontrol", "requeue", _job_id()], capture_output=True, text=True, check=False)
    print(answer.stderr.strip() or f"job {_job_id()} is queued again", flush=True)


def _await_the_end(pool: WorkerPool) -> None:
    """Waits until Slurm kills the job, as its SIGTERM announced. A job that ends by itself before counts as complete,
    and is not queued again after a preemption."""
    pool.close()
    time.sleep(END_PATIENCE_S)
    sys.exit(1)


def _job_id() -> str:
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array else os.environ["SLURM_JOB_ID"]
