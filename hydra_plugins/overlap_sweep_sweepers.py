"""`hydra/sweeper=...`: the grid, which is the default, and the searches, which are in `overlap_sweep.search` and
`overlap_sweep.tuner`."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


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
        from overlap_sweep.errors import UserError

        module, _, function = self._search.partition(":")
        try:
            search = getattr(import_module(module), function)
            search(self.config, self.hydra_context, self.launcher, self._params, arguments)
        except UserError as error:
            sys.exit(f"error: {error}")
