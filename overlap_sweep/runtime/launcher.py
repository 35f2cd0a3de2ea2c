"""Work off the jobs of a Hydra sweep in this process, with one torchrun group per world size."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

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


def launch(
    config: DictConfig,
    context: HydraContext,
    task: TaskFunction,
    job_overrides: Sequence[Sequence[str]],
    first_index: int,
) -> list[JobReturn]:
    """Run every job; returns in the order of `job_overrides`, whatever the order of running.

    UserError before anything is started when any job's configuration is wrong.
    """
    setup_globals()
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    # Hydra takes a twentieth of a second for each, and nothing else is to be seen meanwhile.
    log.info(f"Points to measure: {len(job_overrides)}; checking all before the first")
    jobs = [_compose(config, context, list(given), first_index + i) for i, given in enumerate(job_overrides)]
    world_sizes = [space.world_size(resolve(_without_hydra(job))) for job in jobs]
    _check_names(jobs)
    sweep_directory = Path(str(config.hydra.sweep.dir))
    sweep_directory.mkdir(parents=True, exist_ok=True)
    share_pool(sweep_directory)
    returned: dict[int, JobReturn] = {}
    with progress(len(jobs), outcomes):
        for index in sorted(range(len(jobs)), key=world_sizes.__getitem__):
            returned[index] = run_job(
                hydra_context=context,
                task_function=task,
                config=jobs[index],
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    return [returned[index] for index in range(len(jobs))]


def _compose(config: DictConfig, context: HydraContext, overrides: list[str], index: int) -> DictConfig:
    job = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(job):
        job.hydra.job.id = str(index)
        job.hydra.job.num = index
    return job


def _without_hydra(job: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(job, [str(key) for key in job if key != "hydra"])


def _check_names(jobs: list[DictConfig]) -> None:
    """Two points in one directory would overwrite each other."""
    seen: dict[str, int] = {}
    for index, job in enumerate(jobs):
        HydraConfig.instance().set_config(job)
        name = str(job.hydra.sweep.subdir)
        if name in seen:
            raise UserError(f"jobs {seen[name]} and {index} of the sweep are the same point, {name}; remove one.")
        seen[name] = index
