"""`hydra/launcher=torchrun`: work off a sweep's points in this process, with one torchrun group per world size
and CUDA_DEVICE_MAX_CONNECTIONS."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.utils import JobReturn

from overlap_sweep.runtime.group import GROUP_LOG, share_pool
from overlap_sweep.runtime.group_config import shared_by
from overlap_sweep.runtime.jobs import Sweep, distinct, job_return, keep_results, work_off
from overlap_sweep.runtime.kept import check_store
from overlap_sweep.runtime.lock import hold
from overlap_sweep.runtime.outcome import outcomes, progress
from overlap_sweep.runtime.slurm.queue import refuse_living_jobs
from overlap_sweep.runtime.stopping import listen


def launch(sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[JobReturn]:
    """Run every job that has no result yet, one that occurs twice once; returns in the order of `job_overrides`,
    whatever that of running.

    UserError before anything is started when any job's configuration is wrong, or the directory is in use.
    """
    sweep.set_up()
    jobs = sweep.compose(job_overrides, first_index)
    check_store(sweep.config)
    sweep.directory.mkdir(parents=True, exist_ok=True)
    hold(sweep.directory)
    refuse_living_jobs(sweep.directory)
    listen()
    points = distinct(jobs)
    outcomes.expect(job.directory for job in points)
    kept = keep_results(sweep, points)
    left = sorted((job for job in points if job.directory not in kept), key=lambda job: shared_by(job.point))
    share_pool(sweep.directory / GROUP_LOG)
    with progress(len(left), outcomes):
        returned = work_off(sweep, left)
    returned |= {job.directory: job_return(job, kept[job.directory]) for job in points if job.directory in kept}
    return [returned[job.directory] for job in jobs]
