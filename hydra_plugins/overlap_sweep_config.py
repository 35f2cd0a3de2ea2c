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


class WorkloadsPlugin(SearchPathPlugin):
    """Has Hydra find the YAML files of workloads that other packages bring."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in workloads.config_folders():
            search_path.append("overlap_sweep", f"file://{folder}")


def _share_registered() -> None:
    """Let Hydra use its store of registered configs where it would copy it: once for every configuration that it
    composes, and a hundred times for --help. What it loads from the store is a copy anyway."""
    ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]


try:
    register()
except UserError as error:
    sys.exit(f"error: {error}")
_share_registered()
