"""`hydra/sweeper=bisect`: see overlap_sweep/search/sweeper.py."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class BisectSweeperConf:
    _target_: str = "hydra_plugins.bisect_sweeper.BisectSweeper"
    params: dict[str, Any] = field(default_factory=dict)
    """Values to choose from, by key; the command line's win."""


ConfigStore.instance().store(group="hydra/sweeper", name="bisect", node=BisectSweeperConf)


class BisectSweeper(Sweeper):
    """Searches the space that the swept values span instead of measuring all of it."""

    def __init__(self, params: dict[str, Any]) -> None:
        self._params = params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: Sequence[str]) -> None:
        from overlap_sweep.search.sweeper import sweep

        self.run(sweep, arguments)

    def run(self, function: Callable[..., None], arguments: Sequence[str]) -> None:
        """Call it with everything that a sweep needs. A UserError becomes one line, not an exception that Hydra would
        wrap in its own."""
        from overlap_sweep.errors import UserError

        try:
            function(self.config, self.hydra_context, self.launcher, self._params, arguments)
        except UserError as error:
            sys.exit(f"error: {error}")
