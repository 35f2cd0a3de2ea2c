"""`hydra/launcher=torchrun`, the default: see overlap_sweep/runtime/launcher.py."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class TorchrunLauncherConf:
    _target_: str = "hydra_plugins.torchrun_launcher.TorchrunLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="torchrun", node=TorchrunLauncherConf)


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
        from overlap_sweep.errors import UserError

        try:
            return self.function()(self._sweep, job_overrides, initial_job_idx)
        except UserError as error:
            # Not an exception that Hydra would wrap in its own lines.
            sys.exit(f"error: {error}")

    def function(self) -> Callable[..., list[JobReturn]]:
        """What launches."""
        from overlap_sweep.runtime.launcher import launch

        return launch
