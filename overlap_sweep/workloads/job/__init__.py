"""The user's own training command: which of its settings is fastest, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import Here, Sample, Searchable, Workers, Workload
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.config import Config, Resolved

if TYPE_CHECKING:
    from overlap_sweep.results.run_directory import Result


def complete(config: Config) -> dict[str, Any]:
    """Returns the point with the contents of its files, without unused options. UserError if it makes no sense."""
    if config.backend != "auto":
        raise UserError(f"backend={config.backend}: workload=job has no backends; leave it out.")
    return as_measured(config) | command.completed(config)


def as_measured(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the composed point with what is the same for every job."""
    model = {"name": command.script_name(config)}
    return {**config, "model": model, "backend": "job", "precision": None, "tp_size": 1}


def _run(point: Resolved, directory: Path, here: Here) -> dict[str, Any]:
    from overlap_sweep.workloads.job.run import run

    return run(point, directory, here)


def _overlap_configs(point: Resolved) -> dict[str, OverlapConfig]:
    return {"": point.overlap_cfg} if point.overlap_cfg else {}


def _workers(point: Resolved, directory: Path) -> Workers:
    return Workers(max_connections=None, environment=command.environment(point, directory))


def _sample(result: Result) -> Sample:
    from overlap_sweep.workloads.job.result import sample

    return sample(result)


def _cost(point: Resolved) -> tuple[Any, ...]:
    """Returns what a job's duration depends on: also its settings, one of which may compile for minutes."""
    job = point.job
    settings = (str(sorted(given.items())) for given in (job.values, job.env))
    return job.command, *settings, job.skip_steps, job.steps, job.finish


def _words(config: Config, overrides: Sequence[str]) -> list[str]:
    return [command.script_name(config), f"ranks{config.job.ranks}"]


WORKLOAD = Workload(
    name="job",
    package=__name__,
    complete=complete,
    refusal=command.refusal,
    run_here=_run,
    overlap_configs=_overlap_configs,
    subject=lambda point: "job",
    words=_words,
    named={"job.ranks"},
    fewer_gpus=lambda point: (f"job.ranks={point.job.ranks}", "fewer ranks"),
    # What the command's processes need of each other is its own matter.
    on_one_node=lambda point: None,
    cost=_cost,
    workers=_workers,
    searchable=Searchable(
        sample=_sample,
        same_point=command.same_point,
        options=("job.values.", "job.env."),
        example="+job.values.bucket=25,100",
    ),
)
