"""`hydra/sweeper=basic`, the default: every combination of the values that were given."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore


@dataclass
class GridSweeperConf(BasicSweeperConf):
    _target_: str = "hydra_plugins.grid_sweeper.GridSweeper"


# Under the name of Hydra's own: what conf/config.yaml overrides, no experiment could override again.
ConfigStore.instance().store(group="hydra/sweeper", name="basic", node=GridSweeperConf)


class GridSweeper(BasicSweeper):
    """Hydra's basic sweeper. It composes every point before any is run, which our launchers do themselves."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        if not getattr(self.launcher, "checks_all_first", False):
            super().validate_batch_is_legal(batch)
