"""What one point runs. Each workload is a module with four functions; only `run` imports torch.

`complete(point)`
    The point with what its configuration only names filled in: the backend, knobs, the content of files. What comes
    after reads nothing else. UserError when something of the user's cannot be understood.

`refusal(point)`
    Why the completed point makes no sense, or None.

`overlap_configs(point)`
    By variant, or for the whole point under "", what the backend is given: an OverlapConfig, for the run directory.

`run(point, directory, ranks)`
    Called on every rank of the group: writes what belongs into the run directory, and returns the measured fields of
    the point's `Result`. `Refused` from it skips the point with that reason, `WrongNumbers` fails it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from overlap_sweep.errors import UserError

WORKLOADS = {
    "operator": "overlap_sweep.workloads.operator",
    "layer": "overlap_sweep.workloads.layer",
    "kernel": "overlap_sweep.workloads.kernel",
    "fsdp": "overlap_sweep.workloads.fsdp",
    "copy_engine": "overlap_sweep.workloads.copy_engine",
    "tp_training": "overlap_sweep.workloads.tp_training",
}


WITH_SECTIONS = ("copy_engine",)
"""The workloads whose `section` module says all that is told of them."""


def section_modules() -> list[Any]:
    """The modules with `section(sources)`, what a workload says of what was measured, and its TABLE of points."""
    return [section_module(name) for name in WITH_SECTIONS]


def section_module(name: str) -> Any:
    """The workload's `section` module."""
    return import_module(f"{WORKLOADS[name]}.section")


def load(name: str) -> Any:
    """The workload's module. UserError for an unknown name."""
    if name not in WORKLOADS:
        raise UserError(f"workload={name} is not known; choose one of {', '.join(WORKLOADS)}.")
    return import_module(WORKLOADS[name])
