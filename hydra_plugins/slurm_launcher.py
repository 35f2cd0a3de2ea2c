"""`hydra/launcher=slurm` and `submitit_slurm`: see overlap_sweep/runtime/slurm/launcher.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from omegaconf import DictConfig

from hydra_plugins.torchrun_launcher import TorchrunLauncher


@dataclass
class SlurmLauncherConf(SlurmQueueConf):
    """The stock launcher's options, resolved for every point, and how points are packed."""

    _target_: str = "hydra_plugins.slurm_launcher.SlurmLauncher"
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


ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=SlurmLauncherConf, provider="overlap_sweep")


class StockNamePlugin(SearchPathPlugin):
    """Called when all plugins are loaded: only then does the stock launcher not take its name back."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        store = ConfigStore.instance()
        store.store(group="hydra/launcher", name="submitit_slurm", node=OnePointLauncherConf, provider="overlap_sweep")


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
