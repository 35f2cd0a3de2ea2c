"""The options of our launchers and sweepers, as Hydra knows them by name.

Apart from the plugins, whose modules Hydra executes again in every process that looks for plugins: their classes would
not be those of the configurations that a Slurm job is given.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf


@dataclass
class TorchrunLauncherConf:
    _target_: str = "hydra_plugins.overlap_sweep_config.TorchrunLauncher"


@dataclass
class SlurmLauncherConf(SlurmQueueConf):
    """The stock launcher's options, resolved for every point, and how points are packed."""

    _target_: str = "hydra_plugins.overlap_sweep_config.SlurmLauncher"
    gpus_per_node: int | None = "${gpus_of_point:}"  # type: ignore[assignment]
    """What the point needs: tp_size; none with runtime.device=cpu."""
    cpus_per_task: int | None = "${cpus_of_point:}"  # type: ignore[assignment]
    """Two for each rank's threads."""
    points_per_job: int = 32
    """So many points of one TP size share a job."""
    max_jobs: int | None = 8
    """At most so many jobs for the points of one TP size: if need be more points share one."""
    poll_s: float = 5.0
    """How often Slurm and the run directories are looked at."""


@dataclass
class OnePointLauncherConf(SlurmLauncherConf):
    """Every point is a job of its own, as with the stock launcher, which itself would ask for the same GPUs at every TP
    size, and end the sweep with a job that dies."""

    points_per_job: int = 1
    max_jobs: int | None = None


LAUNCHERS = {
    "torchrun": TorchrunLauncherConf(),
    "slurm": SlurmLauncherConf(),
    "submitit_slurm": OnePointLauncherConf(),
}


@dataclass
class GridSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.overlap_sweep_config.GridSweeper"


@dataclass
class SearchSweeperConf:
    search: str
    """The function that searches."""
    _target_: str = "hydra_plugins.overlap_sweep_config.SearchSweeper"
    params: dict[str, Any] = field(default_factory=dict)
    """Values to choose from, by key; the command line's win."""


SWEEPERS = {
    # Under the name of Hydra's own: what conf/config.yaml overrides, no experiment could override again.
    "basic": GridSweeperConf(),
    "bisect": SearchSweeperConf("overlap_sweep.search.sweeper:sweep"),
    "knobs": SearchSweeperConf("overlap_sweep.search.knob_sweeper:sweep"),
    "tuner": SearchSweeperConf("overlap_sweep.tuner.workflow:tune"),
}
