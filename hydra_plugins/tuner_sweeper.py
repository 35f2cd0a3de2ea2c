"""`hydra/sweeper=tuner`, which `+experiment=tp_overlap_tuner` selects: see overlap_sweep/tuner/workflow.py."""

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
        from overlap_sweep.tuner.workflow import tune

        self.run(tune, arguments)
