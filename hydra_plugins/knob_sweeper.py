"""`hydra/sweeper=knobs`, which `+experiment=fsdp_overlap` selects: see overlap_sweep/search/knob_sweeper.py."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from hydra_plugins.bisect_sweeper import BisectSweeper, BisectSweeperConf


@dataclass
class KnobSweeperConf(BisectSweeperConf):
    _target_: str = "hydra_plugins.knob_sweeper.KnobSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="knobs", node=KnobSweeperConf)


class KnobSweeper(BisectSweeper):
    """Searches knobs of any workload, and says what each contributes."""

    def sweep(self, arguments: Sequence[str]) -> None:
        from overlap_sweep.search.knob_sweeper import sweep

        self.run(sweep, arguments)
