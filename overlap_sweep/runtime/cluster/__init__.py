"""Points in jobs of a cluster: what we need of one, and which there are.

`launcher` packs points into jobs and waits for their results, `batch` runs inside a job, `records` keeps which jobs
measure which points for later launches; none of them knows which cluster it is. `slurm` is one. Those of other packages
are found by the entry point group GROUP, whose names are those of their launchers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, cast

GROUP = "overlap_sweep.clusters"

BUILT_IN = {"slurm": "slurm", "submitit_slurm": "slurm"}
"""Modules here by the names of launchers."""

End = Literal["completed", "failed", "timeout", "lost", "cancelled"]
"""How a job has ended. `lost`: by no fault of its points. `failed` also if nobody knows."""


@dataclass(frozen=True)
class JobState:
    state: str
    """The cluster's name of the state, such as RUNNING."""
    end: End | None = None
    """None if the job may still run."""
    reason: str = ""
    """The cluster's reason, such as what a pending job waits for."""

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


@dataclass(frozen=True)
class JobHere:
    """The job in which this process runs."""

    job_id: str
    restarts: int = 0
    """How often it was queued again."""
    node: int = 0
    """This process's node among the job's; there is one process on each."""
    nodes: int = 1
    host: str = ""
    """Name by which the other nodes know this one."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A kind of cluster. Its nodes share our folders."""

    name: str
    """Of a launcher, and after a dot of the folder with records of its jobs in a sweep's directory."""
    title: str
    """Its name in sentences."""
    check: Callable[[], None]
    """Raises UserError if jobs cannot be submitted here."""
    options: Callable[[dict[str, Any]], dict[str, object]]
    """Returns the options that `submit` takes for a job of one point, from those of its launcher that are not common to
    all clusters. UserError if they contradict one another."""
    submit: Callable[[Sequence[Callable[[], None]], Mapping[str, object]], list[tuple[str, Path]]]
    """Submits a job that calls it for each of the calls, which can be pickled, on each node of the job; again from the
    start when the job is queued again. Returns id and log file of each. UserError if that is refused; then no job is
    left. Jobs go on when this process ends."""
    states: Callable[[Mapping[str, Path]], dict[str, JobState] | None]
    """Returns the state of each job, given by id with its log; None if the cluster does not answer at the moment.
    UserError if it cannot be asked here."""
    cancel: Callable[[Sequence[str]], bool]
    """Cancels jobs; returns whether that worked."""
    cancel_command: Callable[[Sequence[str]], str]
    """Returns the command line with which a user cancels jobs."""
    here: Callable[[], JobHere]
    """Returns the job in which this process runs."""
    requeue: Callable[[str], bool]
    """Queues the job in which this process runs again, and prints that or why not. Returns whether that worked; then
    the job is about to be ended."""
    launcher: object = None
    """Configuration of the launcher: a dataclass with `_target_` as SlurmLauncherConf has it, the common options, and
    the cluster's own. Those of ours are in hydra_adapter/plugins.py."""


@cache
def load(launcher: str) -> Cluster:
    """Returns the cluster whose launcher has that name."""
    if launcher in BUILT_IN:
        return cast(Cluster, import_module(f"{__name__}.{BUILT_IN[launcher]}").CLUSTER)
    (entry,) = entry_points(group=GROUP, name=launcher)
    return cast(Cluster, entry.load())


def outside_clusters() -> dict[str, Cluster]:
    """Returns the clusters of other packages, by the names of their launchers."""
    return {name: load(name) for name in sorted(entry.name for entry in entry_points(group=GROUP))}


def clusters() -> list[Cluster]:
    """Returns all clusters."""
    return list({cluster.name: cluster for cluster in [*map(load, BUILT_IN), *outside_clusters().values()]}.values())
