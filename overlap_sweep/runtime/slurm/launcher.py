"""`hydra/launcher=slurm`: have a sweep's points worked off by few Slurm jobs, and wait for their results."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from hydra.core.utils import JobReturn

from overlap_sweep.run_directory import Result, clear
from overlap_sweep.runtime.jobs import Job, Sweep, distinct, job_return, keep_results
from overlap_sweep.runtime.lock import hold
from overlap_sweep.runtime.memory import check_store
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.progress import progress
from overlap_sweep.runtime.slurm.packing import Pack, launcher_options, pack
from overlap_sweep.runtime.slurm.records import JobRecord, living_jobs
from overlap_sweep.runtime.slurm.submission import submit
from overlap_sweep.runtime.slurm.watch import Submitted, Watch
from overlap_sweep.runtime.stopping import listen


def launch(sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[JobReturn]:
    """Run every job that has no result yet and that no living Slurm job is to run, one that occurs twice once; returns
    in the order of `job_overrides`.

    UserError before anything is submitted when any job's configuration is wrong, or the directory is in use; or when
    Slurm refuses.
    """
    sweep.set_up()
    jobs = sweep.compose(job_overrides, first_index)
    check_store(sweep.config)
    sweep.directory.mkdir(parents=True, exist_ok=True)
    hold(sweep.directory)
    listen()
    points = distinct(jobs)
    outcomes.expect(job.directory for job in points)
    kept = keep_results(points)
    left = [job for job in points if job.directory not in kept]
    results = dict(kept)
    if left:
        with progress(len(left), outcomes):
            results |= _have_measured(sweep, left)
    return [job_return(job, results.get(job.directory)) for job in jobs]


def _have_measured(sweep: Sweep, jobs: Sequence[Job]) -> dict[Path, Result]:
    launch_id = uuid.uuid4().hex[:12]

    def submit_packs(packs: Sequence[Pack]) -> dict[str, Submitted]:
        submitted = submit(sweep, packs, launch_id, outcomes.say)
        return {job_id: Submitted(one, launch_id, log) for job_id, (one, log) in submitted.items()}

    adopted = _adopted(living_jobs(sweep.directory), jobs)
    taken = {job.directory for submitted in adopted.values() for job in submitted.pack.jobs}
    new = [job for job in jobs if job.directory not in taken]
    for job in new:
        # Whatever lies there when a job has ended is then of this launch.
        clear(job.directory)
    packs = pack(new)
    own = submit_packs(packs)
    if adopted:
        outcomes.say(f"slurm: {len(taken)} points are left to jobs of an earlier launch: {', '.join(adopted)}")
    if own:
        outcomes.say(f"slurm: {len(new)} points in {len(own)} jobs: {', '.join(own)}")
    poll_s = launcher_options(jobs[0])["poll_s"]
    watch = Watch(
        sweep.directory, {**adopted, **own}, lambda one: next(iter(submit_packs([one]).items())), outcomes, poll_s
    )
    try:
        watch.run()
    except KeyboardInterrupt:
        ids = " ".join(watch.jobs)
        outcomes.say(f"slurm: jobs go on without this process; end them with: scancel {ids}")
        raise
    return watch.results


def _adopted(records: Sequence[JobRecord], jobs: Sequence[Job]) -> dict[str, Submitted]:
    """Living jobs of earlier launches that are to measure some of these points."""
    by_name = {job.name: job for job in jobs}
    found = {}
    for record in records:
        points = [by_name[name] for name in record.points if name in by_name]
        if points:
            options = pack(points)[0].options
            found[record.job_id] = Submitted(Pack(options, points), record.launch, Path(record.log))
    return found
