"""The points that Hydra hands to a launcher, composed, checked, and with what they return to it."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from overlap_sweep.errors import UserError
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.run_directory import Result, find_points, last_sweep
from overlap_sweep.runtime.composition import compose_point
from overlap_sweep.runtime.group import GROUP_LOG, shared_pool
from overlap_sweep.runtime.group_config import shared_by
from overlap_sweep.runtime.kept import check_store, kept_result, whole_result
from overlap_sweep.runtime.lock import hold, refuse_if_held
from overlap_sweep.runtime.outcome import Outcome, outcomes, progress
from overlap_sweep.runtime.point import limits, objective_us, resolve
from overlap_sweep.runtime.slurm.queue import refuse_living_jobs
from overlap_sweep.runtime.stopping import listen, stop_if_told


@dataclass(frozen=True)
class Job:
    """One point of a sweep."""

    number: int
    """Hydra's, which a directory's name may be made from."""
    overrides: list[str]
    config: DictConfig
    """As Hydra composed it."""
    point: dict[str, Any]
    """Resolved."""
    directory: Path

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def key(self) -> str:
        """Returns a key that is equal for equal points."""
        return point_key(self.point)


@dataclass(frozen=True)
class Sweep:
    """What Hydra gives to a launcher: all that points are composed from and run with. Can be pickled."""

    config: DictConfig
    context: HydraContext
    task: TaskFunction

    @classmethod
    def of(cls, config: DictConfig, context: HydraContext, task: TaskFunction) -> Sweep:
        """Returns the sweep. UserError when it is to go on with a sweep that is not there."""
        if config.resume:
            earlier = last_sweep() if config.resume == "last" else Path(config.resume)
            if Path(config.hydra.sweep.dir) != earlier:
                raise UserError(f"resume={config.resume} and hydra.sweep.dir={config.hydra.sweep.dir}: give only one.")
            if not earlier.is_dir():
                raise UserError(f"{earlier} does not exist; give the directory of an earlier sweep, or resume=last.")
        sweep = cls(config, context, task)
        # Before a sweeper writes anything there.
        refuse_if_held(sweep.given)
        return sweep

    @property
    def given(self) -> Path:
        """Returns the directory as it was given, for messages."""
        return Path(str(self.config.hydra.sweep.dir))

    @property
    def directory(self) -> Path:
        # As Hydra makes it of the points', without `..`.
        return Path(os.path.normpath(self.given.absolute()))

    def set_up(self) -> None:
        """Does what Hydra expects of a launcher before it touches a configuration."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)

    def compose(self, overrides: list[str], number: int) -> Job:
        """Returns the composed job. UserError when the configuration is wrong."""
        config = compose_point(self.context.config_loader, self.config, overrides)
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        HydraConfig.instance().set_config(config)
        point = resolve(config)
        subdir = str(config.hydra.sweep.subdir)
        directory = self.directory / subdir
        if not directory.resolve().is_relative_to(self.directory.resolve()):
            raise UserError(f"hydra.sweep.subdir={subdir} is not inside of {self.given}; give one that stays there.")
        return Job(number, overrides, config, point, directory)

    def run(self, job: Job) -> JobReturn:
        """Has Hydra run the task in this process."""
        returned = run_job(
            hydra_context=self.context,
            task_function=self.task,
            config=job.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        return returned


def distinct(jobs: Sequence[Job]) -> list[Job]:
    """Returns each point once, where it comes first: a sweeper that samples may draw one twice. UserError where two
    that differ would share a directory."""
    found: dict[Path, Job] = {}
    for job in jobs:
        first = found.setdefault(job.directory, job)
        if job.point != first.point:
            raise UserError(
                f"jobs {first.number} and {job.number} of the sweep differ and would both be written to {job.name}; "
                "give a hydra.sweep.subdir that tells them apart."
            )
    return list(found.values())


def keep_results(sweep: Sweep, jobs: Sequence[Job]) -> dict[Path, Result]:
    """Returns the results that the jobs' directories have already. They count as outcomes; others are expected."""
    outcomes.expect(job.directory for job in jobs)
    found = {job.directory: result for job in jobs if (result := kept_result(job.directory, job.point))}
    for directory, result in found.items():
        limits.learn(result)
        outcomes.keep(Outcome(directory, result))
    if found:
        print(f"measured before: {len(found)} of {len(jobs)} points", flush=True)
    return found


def work_off(sweep: Sweep, jobs: Sequence[Job]) -> dict[Path, JobReturn]:
    """Runs the jobs in this process, one after the other; raises `Stopped` between two where that was asked for.

    A point whose directory cannot be written, say, is given up, and the next one is run.
    """
    returned = {}
    for job in jobs:
        stop_if_told()
        try:
            found = sweep.run(job)
            if found.status == JobStatus.FAILED and isinstance(found._return_value, OSError):
                raise found._return_value
        except OSError as error:
            outcomes.given_up[job.directory] = str(error)
            found = job_return(job, None)
        returned[job.directory] = found
    return returned


def job_return(job: Job, result: Result | None) -> JobReturn:
    """Returns what a launcher returns for a job that it did not run itself."""
    with read_write(job.config.hydra.runtime), open_dict(job.config.hydra.runtime):
        job.config.hydra.runtime.output_dir = str(job.directory.absolute())
    HydraConfig.instance().set_config(job.config)
    hydra_config: Any = HydraConfig.instance().cfg
    return JobReturn(
        overrides=job.overrides,
        cfg=OmegaConf.masked_copy(job.config, [str(key) for key in job.config if key != "hydra"]),
        hydra_cfg=copy.deepcopy(hydra_config),
        working_dir=str(Path.cwd()),
        status=JobStatus.COMPLETED,
        _return_value=objective_us(result),
    )


def begin(sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[Job]:
    """Returns every point that Hydra asks for, and locks the sweep's directory.

    UserError when any job's configuration is wrong, two that differ would share a directory, or the sweep's is in use.
    """
    sweep.set_up()
    jobs = [sweep.compose(list(given), first_index + i) for i, given in enumerate(job_overrides)]
    distinct(jobs)
    check_store(sweep.config)
    sweep.directory.mkdir(parents=True, exist_ok=True)
    hold(sweep.given)
    listen()
    # Of its later points a search knows by itself which were measured.
    return _where_measured(sweep, jobs) if first_index == 0 else jobs


def _where_measured(sweep: Sweep, jobs: Sequence[Job]) -> list[Job]:
    """Returns the jobs, each whose point an earlier run of the sweep has measured under another name there: names show
    what varies, which the values that are added to a sweep change."""
    own = {job.directory for job in jobs}
    results = ((path, whole_result(path)) for path in find_points(sweep.directory) if path not in own)
    earlier = {point_key(result.point): path for path, result in results if result}

    def placed(job: Job) -> Job:
        path = earlier.get(job.key)
        if path is None or kept_result(job.directory, job.point) or not kept_result(path, job.point):
            return job
        return replace(job, directory=path)

    return [placed(job) for job in jobs]


def launch(sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_index: int) -> list[JobReturn]:
    """Runs every job that has no result yet, one that occurs twice once; returns in the order of `job_overrides`,
    whatever that of running. UserError as `begin`."""
    jobs = begin(sweep, job_overrides, first_index)
    refuse_living_jobs(sweep.given)
    points = distinct(jobs)
    kept = keep_results(sweep, points)
    left = sorted((job for job in points if job.directory not in kept), key=lambda job: shared_by(job.point))
    shared_pool(sweep.directory / GROUP_LOG)
    with progress(len(left), outcomes):
        returned = work_off(sweep, left)
    return [returned.get(job.directory) or job_return(job, kept[job.directory]) for job in jobs]
