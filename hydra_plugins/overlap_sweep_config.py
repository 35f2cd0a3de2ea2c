"""Makes our schemas, resolver and numeric options known in every process in which Hydra looks for plugins.

That includes the jobs of other launchers, which never run launch.py's main block.
"""

from __future__ import annotations

from overlap_sweep.config import register_schemas
from overlap_sweep.numeric_options import accept_numeric_options

register_schemas()
accept_numeric_options()
