"""Makes our schemas, resolvers and config groups known in every process in which Hydra looks for plugins.

That includes the jobs of other launchers, which never run launch.py's main block.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from overlap_sweep.runtime.composition import register


def _share_registered() -> None:
    """Let Hydra use its store of registered configs where it would copy it: once for every configuration that it
    composes, and a hundred times for --help. What it loads from the store is a copy anyway."""
    ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]


register()
_share_registered()
