"""`hydra/sweeper=tuner`, which `+experiment=tp_overlap_tuner` selects: see overlap_sweep/tuner/workflow.py."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from hydra_plugins.bisect_sweeper import BisectSweeper, BisectSweeperConf


@dataclass
class TunerSweeperConf(BisectSweeperConf):
    _target_: str = "hydra_plugins.tuner_sweeper.TunerSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="tuner", node=TunerSweeperConf)


class TunerSweeper(BisectSweeper):
    """Searches every TP size, tries the best settings together, and proves them on the whole layer."""

    def sweep(self, arguments: Sequence[str]) -> None:
        from overlap_sweep.errors import UserError
        from overlap_sweep.tuner.workflow import tune

        config, context, launcher = self.config, self.hydra_context, self.launcher
        assert config is not None
        assert context is not None
        assert launcher is not None
        try:
            tune(config, context, launcher, self._params, arguments)
        except UserError as error:
            # Not an exception that Hydra would wrap in its own lines.
            sys.exit(f"error: {error}")
