"""Registers our search path, launchers and sweepers with Hydra, in every process that loads plugins: also in the jobs
of other launchers, which never run launch.py's main block.

`hydra/launcher=torchrun` (the default), and those of clusters, are in `overlap_sweep.runtime`; `hydra/sweeper=`
is the grid or a search of `overlap_sweep.search` or `overlap_sweep.tuner`.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from overlap_sweep import workloads
from overlap_sweep.config import ResolvedPoint
from overlap_sweep.errors import UserError, end
from overlap_sweep.hydra_adapter.composition import compose_point, read_files_once
from overlap_sweep.hydra_adapter.mistakes import check_keys
from overlap_sweep.hydra_adapter.overrides import NumberSource, as_choice
from overlap_sweep.hydra_adapter.plugins import LAUNCHERS, SWEEPERS
from overlap_sweep.runtime import cluster
from overlap_sweep.runtime.resolvers import register

RUN_HERE = ("basic", "submitit_local", "joblib")
"""Launchers, other than ours, that run points on this machine and its GPUs."""


class OverlapSweepPlugin(SearchPathPlugin):
    """Registers our nodes after all plugins are loaded; earlier, Hydra's grid and its Slurm launcher would overwrite
    those of the same names."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        read_files_once()
        search_path.append("overlap_sweep", f"{NumberSource.scheme()}://")
        for folder in workloads.config_folders():
            search_path.append("overlap_sweep", f"file://{folder}")
        sweepers: dict[str, Any] = {name: sweeper.conf for name, sweeper in SWEEPERS.items()}
        # Also for the help and for mistakes.
        LAUNCHERS.update((name, found.launcher) for name, found in cluster.outside_clusters().items())
        for group, nodes in {"hydra/sweeper": sweepers, "hydra/launcher": LAUNCHERS}.items():
            for name, node in nodes.items():
                ConfigStore.instance().store(group=group, name=name, node=node, provider="overlap_sweep")


class TorchrunLauncher(Launcher):
    """Feeds the points of a sweep to one torchrun group per world size."""

    checks_all_first = True
    """Every point is composed before any runs."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from overlap_sweep.runtime.jobs import Sweep

        self._sweep = Sweep(config, hydra_context, task_function)

    def expect(self, point: ResolvedPoint) -> None:
        """Begins what takes long of a point that will be launched soon."""
        from overlap_sweep.runtime.jobs import expect

        expect(self._sweep, point)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs. Exits with one line on a UserError, since Hydra would print a traceback."""
        try:
            return self.function()(self._sweep, job_overrides, initial_job_idx)
        except UserError as error:
            end(error)

    def function(self) -> Callable[..., list[JobReturn]]:
        """Returns the function that launches the jobs."""
        from overlap_sweep.runtime.jobs import launch

        return launch


class ClusterLauncher(TorchrunLauncher):
    """Submits the points of a sweep to the cluster whose launcher was chosen, and waits for their results."""

    def __init__(self, **options: Any) -> None:
        """Ignores `options`, resolved for the whole sweep: they are resolved again for every point."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from overlap_sweep.gpus import run_elsewhere

        run_elsewhere()
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def function(self) -> Callable[..., list[JobReturn]]:
        from overlap_sweep.runtime.cluster.launcher import launch

        return partial(launch, cluster.load(self._sweep.config.hydra.runtime.choices["hydra/launcher"]))


class GridSweeper(BasicSweeper):
    """Hydra's basic sweeper, without its composition of every point in advance where our launchers do that."""

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Has the settings of a job take turns, wherever `repetition` was written: else drift of the machine would
        make those faster that ran first. Others keep the order, since changing processes costs them more."""
        assert self.config
        if self.config.workload.name == "job":
            overrides = sorted(overrides, key=lambda override: override.get_key_element() != "repetition")
        return super().split_arguments(overrides, max_batch_size)

    def get_job_batch(self) -> Sequence[Sequence[str]]:
        return [list(map(as_choice, overrides)) for overrides in super().get_job_batch()]

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Exits with one line if a point is wrong and the launcher would notice only in the middle of the sweep."""
        if getattr(self.launcher, "checks_all_first", False):
            return
        super().validate_batch_is_legal(batch)
        assert self.config
        assert self.hydra_context
        if self.config.hydra.runtime.choices["hydra/launcher"] in RUN_HERE:
            from overlap_sweep.runtime.point import resolve

            try:
                for overrides in batch:
                    resolve(compose_point(self.hydra_context.config_loader, self.config, overrides))
            except UserError as error:
                end(error)


class SearchSweeper(Sweeper):
    """Searches the space of the swept values instead of measuring all of it."""

    def __init__(self, search: str, params: dict[str, Any]) -> None:
        self._search, self._params = search, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: Sequence[str]) -> None:
        """Runs the search. Exits with one line on a UserError, since Hydra would print a traceback."""
        from overlap_sweep.search.measured import SearchInputs

        assert self.config
        assert self.hydra_context
        assert self.launcher
        module, _, function = self._search.partition(":")
        try:
            check_keys(arguments)
            search = getattr(import_module(module), function)
            search(SearchInputs(self.config, self.hydra_context, self.launcher, self._params, arguments))
        except UserError as error:
            end(error)


def _complete(plugin: BashCompletion, config_name: str | None) -> None:
    from overlap_sweep.hydra_adapter.help import complete

    complete(plugin, config_name)


# Hydra takes one plugin for each shell.
BashCompletion.query = _complete  # type: ignore[method-assign, assignment]
try:
    register()
except UserError as error:
    sys.exit(f"error: {error}")
# Hydra would copy its store for every configuration that it composes, a hundred times for --help. Nodes are copied when
# they are loaded anyway.
ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]
