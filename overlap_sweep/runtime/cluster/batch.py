"""Runs inside a job of a cluster: measures some points of a sweep, one after the other."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import point_identity
from overlap_sweep.results.run_directory import write_atomically
from overlap_sweep.runtime.cluster import Cluster, JobHere, load
from overlap_sweep.runtime.cluster.records import MEETING, folder_of, given_up_path
from overlap_sweep.runtime.group import GROUP_LOG, shared_pool
from overlap_sweep.runtime.jobs import Job, Sweep, run_jobs
from overlap_sweep.runtime.kept import whole_result
from overlap_sweep.runtime.lock import claimed
from overlap_sweep.runtime.meeting import Place
from overlap_sweep.runtime.nodes import gather, late, lost
from overlap_sweep.runtime.outcome import STOP_AFTER_POINT, Stopped, listen, outcomes, stop_if_requested
from overlap_sweep.runtime.point import resolve
from overlap_sweep.runtime.progress import progress
from overlap_sweep.runtime.serve import serve

IDLE_RESTARTS = 3
"""How often a job that was stopped before it finished a point is requeued."""
CLAIM_PATIENCE_S = 300.0
"""How long to wait for a point that another job holds: The cluster may have given that job up, and it may be about to
die."""
END_PATIENCE_S = 600.0
"""How long to wait for the kill that a SIGTERM announced."""


def refuse_another_point(job: Job) -> None:
    """Raises UserError if the job resolves to a different point on this node than where it was submitted."""
    HydraConfig.instance().set_config(job.config)
    here, there = point_identity(resolve(job.config)), point_identity(job.point)
    if different := sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)):
        raise UserError(
            f"{job.name} is a different point on this node than where it was submitted: {', '.join(different)} differ. "
            "Set these options explicitly, such as runtime.device."
        )


@dataclass(frozen=True)
class Batch:
    """The pickled job that the cluster calls on each of its nodes, again from the start after a requeue. It returns
    nothing: results are in the run directories."""

    cluster: str
    sweep: Sweep
    points: list[Job]
    """The points, as composed by the launcher."""
    singletons: object
    """Hydra's singletons, which it needs to compose."""

    def __call__(self) -> None:
        # Replaces the cluster's handlers, which would abort the running point.
        listen()
        cluster = load(self.cluster)
        here, records = cluster.here(), folder_of(cluster, self.sweep.directory)
        if here.nodes > 1:
            # The launcher is on the first node.
            file = records.absolute() / f"{here.job_id}_{here.restarts}{MEETING}"
            place = Place(here.node, here.nodes, file, () if here.node else (here.host,))
            if here.node:
                _serve_first_node(place)
            gather(place)
        Singleton.set_state(self.singletons)
        self.sweep.set_up()
        try:
            for job in self.points:
                refuse_another_point(job)
        except UserError as error:
            sys.exit(f"error: {error}")
        # The launcher removed older results, so existing ones were measured by this job before a requeue.
        left = [job for job in self.points if whole_result(job.directory) is None]
        outcomes.expect(job.directory for job in left)
        pool = shared_pool(records / f"{here.job_id}_{GROUP_LOG}")
        try:
            with progress(len(left), outcomes):
                returned = self._run_jobs(left)
        except Stopped as stopped:
            print(f"stopped by {stopped}: {outcomes.counts_line()}", flush=True)
            if stopped.number != STOP_AFTER_POINT:
                pool.close()
                _await_the_end()
            self._rest_later(cluster, here, left)
            return
        if lost():
            # The cluster has other nodes, on which the rest can be measured.
            self._rest_later(cluster, here, left)
            return
        for directory, reason in outcomes.given_up.items():
            print(f"{directory.name}: {reason}", file=sys.stderr, flush=True)
        for job_return in returned:
            # Raises the task's exception, which Hydra keeps; it goes to the job's log.
            _ = job_return.return_value

    def _rest_later(self, cluster: Cluster, here: JobHere, left: Sequence[Job]) -> None:
        """Requeues the job for what is left, unless it came to nothing too often. Then the waiting launcher gives up
        all points if a node never joined, and otherwise blames the first, which may be why a node was lost."""
        for directory, reason in outcomes.given_up.items():
            print(f"{directory.name}: {reason}", file=sys.stderr, flush=True)
        again = len(outcomes.missing) < len(left) or here.restarts < IDLE_RESTARTS
        if again and (cluster.requeue(here.job_id) or not late()):
            return
        if late():
            write_atomically(given_up_path(cluster, self.sweep.directory, here.job_id), late().encode())
            sys.exit(f"error: {late()}")
        if lost():
            sys.exit(f"error: nodes were lost {IDLE_RESTARTS + 1} times before a point was measured")

    def _run_jobs(self, jobs: Sequence[Job]) -> list[JobReturn]:
        returned: list[JobReturn] = []
        for job in jobs:
            if lost():
                break
            job.directory.mkdir(parents=True, exist_ok=True)
            with claimed(job.directory, CLAIM_PATIENCE_S) as ours:
                stop_if_requested()
                if ours and whole_result(job.directory) is None:
                    returned += run_jobs(self.sweep, [job]).values()
        return returned


def _serve_first_node(place: Place) -> NoReturn:
    """Starts and ends processes on this node as the job's first one asks, where the launcher is."""
    try:
        sys.exit(serve(place))
    except Stopped:
        _await_the_end()


def _await_the_end() -> NoReturn:
    """Waits until the cluster kills the job, as its SIGTERM announced. If the job exited before, it would count as
    completed and not be requeued after a preemption."""
    time.sleep(END_PATIENCE_S)
    sys.exit(1)
