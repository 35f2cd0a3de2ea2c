"""What one point runs. Each workload is a module with three functions.

`refusal(point)` decides from the resolved configuration alone whether the point makes sense (no torch import);
`overlap_settings(point)` gives, by variant or for the whole point under "", what the backend is given, for the run
directory (UserError when that cannot be told); `run(point, directory, ranks)` is
called on every rank of the group, writes what belongs into the run directory, and returns the `Measured` part of
the point's result. `Refused` from it skips the point with that reason.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from overlap_sweep.errors import UserError

WORKLOADS = {"operator": "overlap_sweep.workloads.operator", "layer": "overlap_sweep.workloads.layer"}


def load(name: str) -> Any:
    """The workload's module. UserError for an unknown name."""
    if name not in WORKLOADS:
        raise UserError(f"workload={name} is not known; choose one of {', '.join(WORKLOADS)}.")
    return import_module(WORKLOADS[name])
