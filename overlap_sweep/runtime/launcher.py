"""Work off the jobs of a Hydra sweep in this process, with one torchrun group per world size."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from overlap_sweep import space
from overlap_sweep.errors import UserError
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.point import resolve
from overlap_sweep.runtime.pool import share_pool
from overlap_sweep.runtime.progress import progress

log = logging.getLogger(__name__)

WORTH_SAYING = 8
"""Points of a sweep from which on it takes a while to check them all."""


def launch(
    config: DictConfig,
    context: HydraContext,
    task: TaskFunction,
    job_overrides: Sequence[Sequence[str]],
    first_index: int,
) -> list[JobReturn]:
    """Run every job, one that occurs twice once; returns in the order of `job_overrides`, whatever that of running.

    UserError before anything is started when any job's configuration is wrong.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    # Hydra takes a twentieth of a second for each, and nothing else is to be seen meanwhile.
    if len(job_overrides) >= WORTH_SAYING:
        log.info(f"Points to measure: {len(job_overrides)}; checking all before the first")
    jobs = [_compose(config, context, list(given), first_index + i) for i, given in enumerate(job_overrides)]
    points = [resolve(_without_hydra(job)) for job in jobs]
    to_run = _first_of_same(jobs, points)
    distinct = sorted(dict.fromkeys(to_run), key=lambda index: space.world_size(points[index]))
    sweep_directory = Path(str(config.hydra.sweep.dir))
    sweep_directory.mkdir(parents=True, exist_ok=True)
    share_pool(sweep_directory)
    returned: dict[int, JobReturn] = {}
    with progress(len(distinct), outcomes):
        for index in distinct:
            returned[index] = run_job(
                hydra_context=context,
                task_function=task,
                config=jobs[index],
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    return [returned[index] for index in to_run]


def _compose(config: DictConfig, context: HydraContext, overrides: list[str], index: int) -> DictConfig:
    job = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job):
        job.hydra.job.id = str(index)
        job.hydra.job.num = index
    return job


def _without_hydra(job: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])


def _first_of_same(jobs: Sequence[DictConfig], points: Sequence[Mapping[str, Any]]) -> list[int]:
    """For each job the first that is the same point: a sweeper that samples may draw one twice.

    UserError for jobs that differ and share a directory; they would overwrite each other.
    """
    first: dict[str, int] = {}
    found = []
    for index, job in enumerate(jobs):
        HydraConfig.instance().set_config(job)
        directory = str(job.hydra.sweep.subdir)
        earlier = first.setdefault(directory, index)
        if points[index] != points[earlier]:
            raise UserError(
                f"jobs {earlier} and {index} of the sweep differ and would both be written to {directory}; "
                "give a hydra.sweep.subdir that tells them apart."
            )
        found.append(earlier)
    return found
