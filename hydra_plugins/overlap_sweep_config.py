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


register_schemas()
accept_numeric_options()
_register_backends()


# For every configuration that Hydra composes, it copies its sources with all that is registered here. That is never
# changed afterwards, and copying it took most of the time of a composition, and of --help.
ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]
