"""A sweep's points as Hydra passes them to a launcher: composes, checks and runs them, and returns their results."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from overlap_sweep import workloads
from overlap_sweep.config import ResolvedPoint
from overlap_sweep.errors import UserError
from overlap_sweep.gpus import elsewhere
from overlap_sweep.hydra_adapter.composition import compose_point
from overlap_sweep.hydra_adapter.jobs import PreparedJob, prepare, run
from overlap_sweep.hydra_adapter.overrides import as_typed
from overlap_sweep.hydra_adapter.plugins import error_of, finished_job
from overlap_sweep.report.numbers import counted
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.run_directory import Result, find_points
from overlap_sweep.runtime.cluster.records import refuse_living_jobs
from overlap_sweep.runtime.deferred import deferring, later
from overlap_sweep.runtime.group import GROUP_LOG, shared_pool
from overlap_sweep.runtime.group_config import shared_by
from overlap_sweep.runtime.kept import check_store, kept_result, whole_result
from overlap_sweep.runtime.outcome import Outcome, listen, outcomes, stop_if_requested
from overlap_sweep.runtime.point import limits, objective_us, resolve
from overlap_sweep.runtime.progress import announce, progress, shown_waiting


@dataclass(frozen=True)
class Job:
    """One point of a sweep."""

    number: int
    """Hydra's job number, which may be part of the directory's name."""
    overrides: list[str]
    config: DictConfig
    """The configuration that Hydra composed."""
    point: ResolvedPoint
    """The resolved configuration, as plain data."""
    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def key(self) -> str:
        """Returns a key that is equal for equal points."""
        return point_key(self.point)

    @cached_property
    def prepared(self) -> PreparedJob:
        return prepare(self.config, self.directory)

    def prepare_ahead(self) -> None:
        """Prepares the job while another one runs."""
        # What is raised concerns this job, and is raised again when it runs.
        with suppress(Exception):
            _ = self.prepared


@dataclass(frozen=True)
class Sweep:
    """What Hydra gives to a launcher to compose and run points. Can be pickled."""

    config: DictConfig
    context: HydraContext
    task: TaskFunction

    @property
    def typed_directory(self) -> Path:
        """Returns the directory as the user typed it, for messages."""
        return Path(str(self.config.hydra.sweep.dir))

    @property
    def directory(self) -> Path:
        # Normalised like Hydra's directories of points, without `..`.
        return Path(os.path.normpath(self.typed_directory.absolute()))

    def set_up(self) -> None:
        """Prepares Hydra's globals and logging, as every launcher must before it composes."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)

    def compose(self, overrides: list[str], number: int) -> Job:
        """Returns the composed job. UserError for a wrong configuration."""
        config = compose_point(self.context.config_loader, self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        # Not by `set_config`, which would copy it.
        HydraConfig.instance().cfg = config  # type: ignore[assignment]
        point = resolve(config)
        subdir = str(config.hydra.sweep.subdir)
        directory = self.directory / subdir
        if not directory.resolve().is_relative_to(self.directory.resolve()):
            raise UserError(f"hydra.sweep.subdir={subdir} leaves {self.typed_directory}; give one inside it.")
        return Job(number, overrides, config, point, directory)

    def run(self, job: Job) -> JobReturn:
        """Runs the task in this process, as Hydra does."""
        returned = run(job.prepared, self.context, self.task)
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        return returned


def distinct(jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs without repetitions: a sampling sweeper may draw a point twice. UserError if different points
    would share a directory."""
    found: dict[Path, Job] = {}
    for job in jobs:
        first = found.setdefault(job.directory, job)
        if job.point != first.point:
            raise UserError(
                f"Jobs {first.number} and {job.number} of the sweep differ but would both be written to {job.name}; "
                "set a hydra.sweep.subdir that distinguishes them."
            )
    return list(found.values())


def keep_results(sweep: Sweep, jobs: Sequence[Job]) -> dict[Path, Result]:
    """Returns the reusable results in the jobs' directories and records them as outcomes; the others are expected."""
    outcomes.expect(job.directory for job in jobs)
    found = {job.directory: result for job in jobs if (result := kept_result(job.directory, job.point))}
    if found:
        print(f"already measured: {len(found)} of {len(jobs)} points", flush=True)
    for directory, result in found.items():
        limits.learn(result)
        kept = Outcome(directory, result)
        outcomes.keep(kept)
        print(f"[kept] {kept}", flush=True)
    return found


def run_jobs(sweep: Sweep, jobs: Sequence[Job]) -> dict[Path, JobReturn]:
    """Runs the jobs in this process, one after the other, as long as a search has time. Raises `Stopped` between two
    jobs after a stop signal.

    A point with an OSError, such as an unwritable directory, is given up, and the next one is run.
    """
    returns = {}
    with deferring():
        for job, following in zip_longest(jobs, jobs[1:]):
            stop_if_requested()
            if limits.are_over:
                outcomes.expected.discard(job.directory)
                continue
            if following:
                later(following.directory, following.prepare_ahead)
            try:
                returned = sweep.run(job)
                if isinstance(error := error_of(returned), OSError):
                    raise error
            except OSError as error:
                outcomes.give_up(job.directory, error)
                returned = job_return(job, None)
            returns[job.directory] = returned
    return returns


def job_return(job: Job, result: Result | None) -> JobReturn:
    """Returns the JobReturn of a job that this process did not run."""
    return finished_job(job.config, job.overrides, job.directory, objective_us(result))


def begin(sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[Job]:
    """Returns all jobs that Hydra requests. UserError if a job's configuration is wrong, or two different jobs would
    share a directory."""
    sweep.set_up()
    typed = [list(map(as_typed, overrides)) for overrides in job_overrides]
    with shown_waiting(f"composing {counted(len(typed), 'point')}"):
        jobs = [sweep.compose(overrides, first_index + i) for i, overrides in enumerate(typed)]
    distinct(jobs)
    check_store(sweep.config)
    listen()
    # A search itself knows which of its later points were measured.
    return _where_measured(sweep, jobs) if first_index == 0 else jobs


def _where_measured(sweep: Sweep, jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs, with the directories in which an earlier run of the sweep measured their points. These may have
    other names: names contain what varies, and that changes when values are added to a sweep."""
    own = {job.directory for job in jobs}
    results = ((path, whole_result(path)) for path in find_points(sweep.directory) if path not in own)
    earlier = {point_key(result.point): path for path, result in results if result}

    def placed(job: Job) -> Job:
        path = earlier.get(job.key)
        if path is None or kept_result(job.directory, job.point) or not kept_result(path, job.point):
            return job
        return replace(job, directory=path)

    return [placed(job) for job in jobs]


def expect(sweep: Sweep, point: ResolvedPoint) -> None:
    """Has workers start for a point that will be launched soon, unless it may be there already or needs none here."""
    workload = workloads.of(point)
    if not (elsewhere() or workload.run_here or workload.refusal(point) or find_points(sweep.directory)):
        shared_pool(sweep.directory / GROUP_LOG).start_early(point)


def launch(sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[JobReturn]:
    """Runs every distinct job without a result; returns in the order of `job_overrides`. UserError as in `begin`."""
    jobs = begin(sweep, job_overrides, first_index)
    refuse_living_jobs(sweep.typed_directory)
    points = distinct(jobs)
    announce([job.point for job in points], outcomes)
    kept = keep_results(sweep, points)
    left = sorted((job for job in points if job.directory not in kept), key=lambda job: shared_by(job.point))
    shared_pool(sweep.directory / GROUP_LOG)
    with progress(len(left), outcomes):
        returns = run_jobs(sweep, left)
    return [returns.get(job.directory) or job_return(job, kept.get(job.directory)) for job in jobs]
