"""`hydra/launcher=torchrun`, which is the default, `slurm` and `submitit_slurm`: see `overlap_sweep.runtime`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from omegaconf import DictConfig


@dataclass
class TorchrunLauncherConf:
    _target_: str = "hydra_plugins.overlap_sweep_launchers.TorchrunLauncher"


@dataclass
class SlurmLauncherConf(SlurmQueueConf):
    """The stock launcher's options, resolved for every point, and how points are packed."""

    _target_: str = "hydra_plugins.overlap_sweep_launchers.SlurmLauncher"
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
    """As the stock launcher every point is a job of its own. The stock launcher itself would ask for the same GPUs at
    every TP size, and a job that dies would end the sweep."""

    points_per_job: int = 1
    max_jobs: int | None = None


LAUNCHERS = {
    "torchrun": TorchrunLauncherConf(),
    "slurm": SlurmLauncherConf(),
    "submitit_slurm": OnePointLauncherConf(),
}


class TorchrunLauncher(Launcher):
    """Feeds the points of a sweep to one torchrun group per world size."""

    checks_all_first = True
    """It composes every point before it runs any."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from overlap_sweep.errors import UserError
        from overlap_sweep.runtime.jobs import Sweep

        try:
            self._sweep = Sweep.of(config, hydra_context, task_function)
        except UserError as error:
            sys.exit(f"error: {error}")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Exits with one line for a UserError, which Hydra would wrap in lines of its own."""
        from overlap_sweep.errors import UserError

        try:
            return self.function()(self._sweep, job_overrides, initial_job_idx)
        except UserError as error:
            sys.exit(f"error: {error}")

    def function(self) -> Callable[..., list[JobReturn]]:
        """Returns what launches."""
        from overlap_sweep.runtime.jobs import launch

        return launch


class SlurmLauncher(TorchrunLauncher):
    """Submits the points of a sweep to Slurm, and waits for them."""

    def __init__(self, **options: Any) -> None:
        """Resolved for the sweep as a whole they are of no use: every point has its own."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from overlap_sweep.runtime.group_config import run_elsewhere

        run_elsewhere()
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def function(self) -> Callable[..., list[JobReturn]]:
        from overlap_sweep.runtime.slurm.launcher import launch

        return launch
