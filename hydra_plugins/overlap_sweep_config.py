"""Makes our schemas, resolver and options known in every process in which Hydra looks for plugins.

That includes the jobs of other launchers, which never run launch.py's main block.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from overlap_sweep.backends import registered_kernels
from overlap_sweep.config import register_schemas
from overlap_sweep.numeric_options import accept_numeric_options


def _register_backends() -> None:
    """Let `backend=mine` choose what conf/backend/ has no file for."""
    for name in registered_kernels():
        ConfigStore.instance().store(group="backend", name=name, node={"backend": name}, package="_global_")


def _share_registered() -> None:
    """Let Hydra use its store of registered configs where it would copy it: once for every configuration that it
    composes, and a hundred times for --help. What it loads from the store is a copy anyway."""
    ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]


register_schemas()
accept_numeric_options()
_register_backends()
_share_registered()
