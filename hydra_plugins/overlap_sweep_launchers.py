"""`hydra/launcher=torchrun`, which is the default, `slurm` and `submitit_slurm`: see `overlap_sweep.runtime`."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


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
