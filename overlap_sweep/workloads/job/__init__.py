"""The user's own training command: which of its settings is fastest, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_sweep.errors import UserError
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import Here, Sample, Searchable, Workers, Workload
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.config import Resolved

if TYPE_CHECKING:
    from overlap_sweep.results.run_directory import Result

_KEPT = ("runtime", "profile", "repetition", "job")


def complete(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the point with the contents of its files, without unused options. UserError if it makes no sense."""
    if point["backend"] != "auto":
        raise UserError(f"backend={point['backend']}: workload=job has no backends; leave it out.")
    return as_measured(point) | command.completed(point)


def as_measured(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the composed point with what is the same for every job."""
    return {
        **{name: point[name] for name in _KEPT},
        "workload": {"name": "job", "tokens": None},
        "model": {"name": command.script_name(point)},
        "backend": "job",
        "precision": None,
        "tp_size": 1,
    }


def _run(point: Resolved, directory: Path, here: Here) -> dict[str, Any]:
    from overlap_sweep.workloads.job.run import run

    return run(point, directory, here)


def _overlap_configs(point: Mapping[str, Any]) -> dict[str, OverlapConfig]:
    config = command.overlap_config(point)
    return {"": config} if config else {}


def _workers(point: Mapping[str, Any], directory: Path) -> Workers:
    return Workers(max_connections=None, environment=command.environment(point, directory))


def _sample(result: Result) -> Sample:
    from overlap_sweep.workloads.job.result import sample

    return sample(result)


def _cost(point: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what a job's duration depends on: also its settings, one of which may compile for minutes."""
    job = point["job"]
    settings = (str(sorted(job[name].items())) for name in ("values", "env"))
    return job["command"], *settings, job["skip_steps"], job["steps"], job["finish"]


def _words(point: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    return [command.script_name(point), f"ranks{point['job']['ranks']}"]


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
    fewer_gpus=lambda point: (f"job.ranks={point['job']['ranks']}", "fewer ranks"),
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
