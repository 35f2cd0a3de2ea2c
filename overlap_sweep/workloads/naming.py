"""The names of run directories."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from overlap_sweep import workloads
from overlap_sweep.results.identity import HOW_TO_RUN
from overlap_sweep.workloads import Config

LONGEST_NAME = 160
"""File systems take 255 bytes; a longer name ends in a digest of itself."""

_NOT_APPENDED = (
    *("hydra", "experiment=", "search.", "tuner.", "max_tp_size=", "resume=", "store=", "reuse="),
    *(f"runtime.{name}=" for name in HOW_TO_RUN),
)
"""What begins so is no part of what is measured."""
_ALWAYS_NAMED = {"workload", "model", "model.name"}


def point_name(config: Config, overrides: Sequence[str]) -> str:
    """Returns the name of a point's run directory: short, stable, and different for every point of a sweep.

    `overrides` are the command line's; those that the workload's words do not show are appended.
    """
    workload = workloads.of(config)
    named = _ALWAYS_NAMED | {*workload.named}
    others = (override.lstrip("+~") for override in overrides)
    appended = [o for o in others if o.partition("=")[0] not in named and not o.startswith(_NOT_APPENDED)]
    words = "_".join([*workload.words(config, overrides), *appended])
    name = re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", words).removesuffix(".json")
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}_{digest}"
