"""`hydra/launcher=slurm`: have a sweep's points worked off by few Slurm jobs, and wait for their results."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime.jobs import Job, Sweep, distinct, job_return, keep_results
from overlap_sweep.runtime.kept import of_launch, whole_result
from overlap_sweep.runtime.lock import hold
from overlap_sweep.runtime.memory import check_store
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.progress import progress
from overlap_sweep.runtime.slurm.packing import Pack, launcher_options, pack
from overlap_sweep.runtime.slurm.records import JobRecord, living_jobs
from overlap_sweep.runtime.slurm.submission import check_slurm, submit
from overlap_sweep.runtime.slurm.watch import Submitted, Watch
from overlap_sweep.runtime.stopping import listen


def launch(sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[JobReturn]:
    """Run every job that has no result yet and that no living Slurm job is to run, one that occurs twice once; returns
    in the order of `job_overrides`.

    UserError before anything is submitted when any job's configuration is wrong, or the directory is in use; or when
    Slurm refuses.
    """
    check_slurm()
    sweep.set_up()
    jobs = sweep.compose(job_overrides, first_index)
    check_store(sweep.config)
    sweep.directory.mkdir(parents=True, exist_ok=True)
    hold(sweep.directory)
    listen()
    points = distinct(jobs)
    outcomes.expect(job.directory for job in points)
    kept = keep_results(sweep, points)
    left = [job for job in points if job.directory not in kept]
    results = dict(kept)
    if left:
        with progress(len(left), outcomes):
            results |= _have_measured(sweep, left)
    return [job_return(job, results.get(job.directory)) for job in jobs]


def _have_measured(sweep: Sweep, jobs: Sequence[Job]) -> dict[Path, Result]:
    own_launch = uuid.uuid4().hex[:12]

    def submit_packs(packs: Sequence[Pack], launch: str = own_launch) -> dict[str, Submitted]:
        submitted = submit(sweep, packs, launch, outcomes.say)
        return {job_id: Submitted(one, launch, log) for job_id, (one, log) in submitted.items()}

    def submit_one(one: Pack, launch: str) -> tuple[str, Submitted]:
        return next(iter(submit_packs([one], launch).items()))

    adopted = _adopted(living_jobs(sweep.directory), jobs)
    taken = {job.directory for submitted in adopted.values() for job in submitted.pack.jobs}
    new = [job for job in jobs if job.directory not in taken]
    poll_s = launcher_options(jobs[0])["poll_s"]
    watch = Watch(sweep.directory, adopted, submit_one, outcomes, poll_s)
    try:
        own = submit_packs(pack(new))
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


def _adopted(records: Sequence[JobRecord], jobs: Sequence[Job]) -> dict[str, Submitted]:
    """Living jobs of earlier launches that are to measure some of these points. Those that failed there are tried anew.

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
        todo = [job for job, result in results if result is None or not of_launch(result, record.launch)]
        if todo:
            found[record.job_id] = Submitted(Pack(pack(todo)[0].options, todo), record.launch, Path(record.log))
    return found
