"""The user's own training command: which of its settings is fastest, and why."""

from collections.abc import Sequence
from pathlib import Path

from overlap_sweep import levers
from overlap_sweep.overlap.overlap_cfg import OverlapConfig
from overlap_sweep.workloads import Searchable, UsersCommand, Workers, Workload, run_of
from overlap_sweep.workloads.job import command
from overlap_sweep.workloads.job.config import Config, Resolved
from overlap_sweep.workloads.job.lever_values import set_elsewhere
from overlap_sweep.workloads.job.result import sample


def _overlap_configs(point: Resolved) -> dict[str, OverlapConfig]:
    return {"": point.overlap_cfg} if point.overlap_cfg else {}


def _workers(point: Resolved, directory: Path) -> Workers:
    return Workers(max_connections=None, environment=command.environment(point, directory))


def _cost(point: Resolved) -> tuple[object, ...]:
    """Returns what a job's duration depends on: also its settings, one of which may compile for minutes."""
    job = point.job
    settings = (str(sorted(given.items())) for given in (job.values, job.env, job.levers))
    return job.command, *settings, job.skip_steps, job.steps, job.finish


def _words(config: Config, overrides: Sequence[str]) -> list[str]:
    return [command.script_name(config), f"ranks{config.job.ranks}"]


def _users_command(point: Resolved) -> UsersCommand:
    words, texts = command.without_levers(point)
    given = len([*levers.flat(point.job.levers)])
    elsewhere = {name: other for name in levers.levers() if (other := set_elsewhere(point, name))}
    return UsersCommand(
        template=point.job.command, words=words, texts=texts, elsewhere=elsewhere, number_of_levers=given
    )


WORKLOAD = Workload(
    name="job",
    package=__name__,
    complete=command.complete,
    refusal=command.refusal,
    run_here=run_of(__name__),
    overlap_configs=_overlap_configs,
    subject=lambda point: "job",
    words=_words,
    named={"job.ranks"},
    fewer_gpus=lambda point: (f"job.ranks={point.job.ranks}", "fewer ranks"),
    # What the command's processes need of each other is its own matter.
    on_one_node=lambda point: None,
    cost=_cost,
    workers=_workers,
    users_command=_users_command,
    searchable=Searchable(
        sample=sample,
        same_point=command.same_point,
        options=("job.values.", "job.env.", "job.levers."),
        example="+job.values.bucket=25,100",
    ),
)
