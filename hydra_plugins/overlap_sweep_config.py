"""What Hydra knows of us, in every process in which it looks for plugins: also in the jobs of other launchers, which
never run launch.py's main block.

`hydra/launcher=torchrun`, which is the default, `slurm` and `submitit_slurm` are in `overlap_sweep.runtime`;
`hydra/sweeper=...` is the grid, or a search of `overlap_sweep.search` or `overlap_sweep.tuner`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from omegaconf import DictConfig

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.runtime.composition import register


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
    """As the stock launcher every point is a job of its own. The stock launcher itself would ask for the same GPUs at
    every TP size, and a job that dies would end the sweep."""

    points_per_job: int = 1
    max_jobs: int | None = None


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


GROUPS = {
    "hydra/launcher": {
        "torchrun": TorchrunLauncherConf(),
        "slurm": SlurmLauncherConf(),
        "submitit_slurm": OnePointLauncherConf(),
    },
    "hydra/sweeper": {
        # Under the name of Hydra's own: what conf/config.yaml overrides, no experiment could override again.
        "basic": GridSweeperConf(),
        "bisect": SearchSweeperConf("overlap_sweep.search.sweeper:sweep"),
        "knobs": SearchSweeperConf("overlap_sweep.search.knob_sweeper:sweep"),
        "tuner": SearchSweeperConf("overlap_sweep.tuner.workflow:tune"),
    },
}


class OverlapSweepPlugin(SearchPathPlugin):
    """Called when all plugins are loaded: only then do Hydra's grid and the stock launcher for Slurm not take their
    names back."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in workloads.config_folders():
            search_path.append("overlap_sweep", f"file://{folder}")
        for group, nodes in GROUPS.items():
            for name, node in nodes.items():
                ConfigStore.instance().store(group=group, name=name, node=node, provider="overlap_sweep")


class TorchrunLauncher(Launcher):
    """Feeds the points of a sweep to one torchrun group per world size."""

    checks_all_first = True
    """It composes every point before it runs any."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from overlap_sweep.runtime.jobs import Sweep

        try:
            self._sweep = Sweep.of(config, hydra_context, task_function)
        except UserError as error:
            sys.exit(f"error: {error}")

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Exits with one line for a UserError, which Hydra would wrap in lines of its own."""
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


class GridSweeper(BasicSweeper):
    """Hydra's basic sweeper. It composes every point before any is run, which our launchers do themselves."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        if not getattr(self.launcher, "checks_all_first", False):
            super().validate_batch_is_legal(batch)


class SearchSweeper(Sweeper):
    """Searches the space that the swept values span instead of measuring all of it."""

    def __init__(self, search: str, params: dict[str, Any]) -> None:
        self._search, self._params = search, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: Sequence[str]) -> None:
        """Exits with one line for a UserError, which Hydra would wrap in lines of its own."""
        module, _, function = self._search.partition(":")
        try:
            search = getattr(import_module(module), function)
            search(self.config, self.hydra_context, self.launcher, self._params, arguments)
        except UserError as error:
            sys.exit(f"error: {error}")


try:
    register()
except UserError as error:
    sys.exit(f"error: {error}")
# Hydra would copy its store for every configuration that it composes, and a hundred times for --help. What it loads
# from it is a copy anyway.
ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]
