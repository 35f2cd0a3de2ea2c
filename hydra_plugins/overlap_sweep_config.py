"""Makes our schemas, resolvers and config groups known in every process in which Hydra looks for plugins.

That includes the jobs of other launchers, which never run launch.py's main block.
"""

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin

from overlap_sweep import workloads
from overlap_sweep.errors import UserError
from overlap_sweep.runtime.composition import register
from overlap_sweep.runtime.plugin_options import LAUNCHERS, SWEEPERS


class OverlapSweepPlugin(SearchPathPlugin):
    """Called when all plugins are loaded: only then do Hydra's grid and the stock launcher for Slurm not take their
    names back."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in workloads.config_folders():
            search_path.append("overlap_sweep", f"file://{folder}")
        for group, nodes in {"hydra/sweeper": SWEEPERS, "hydra/launcher": LAUNCHERS}.items():
            for name, node in nodes.items():
                ConfigStore.instance().store(group=group, name=name, node=node, provider="overlap_sweep")


def _share_registered() -> None:
    """Let Hydra use its store of registered configs where it would copy it: once for every configuration that it
    composes, and a hundred times for --help. What it loads from the store is a copy anyway."""
    ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]


try:
    register()
except UserError as error:
    sys.exit(f"error: {error}")
_share_registered()
