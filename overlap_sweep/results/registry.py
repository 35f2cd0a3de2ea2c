"""The workloads by name, and the types of their points: what reading results needs of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import msgspec

from overlap_sweep.config import PointConfig, ResolvedPoint
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.results.measured import Measured

GROUP = "overlap_sweep.workloads"
"""Entry point group for workloads of other packages."""
BUILT_IN = ("operator", "layer", "kernel", "fsdp", "copy_engine", "tp_training", "job")


class _Workload(msgspec.Struct):
    name: str


class Named(msgspec.Struct):
    """The part of a point that says whose it is."""

    workload: _Workload


class PointTypes(NamedTuple):
    """The types of a workload's points."""

    options: type[PointConfig]
    """As Hydra composes them."""
    asked: type[ResolvedPoint]
    """As composed, with what the workload fills in whatever the machine; `Resolved` if there is no `Asked`."""
    resolved: type[ResolvedPoint]
    """As completed and recorded."""
    measured: type[Measured]


@cache
def names() -> tuple[str, ...]:
    """Returns the names of all workloads, built-in and of other distributions."""
    return (*BUILT_IN, *sorted(entry.name for entry in entry_points(group=GROUP)))


@cache
def load(name: str) -> Any:
    """Returns the `WORKLOAD` of that name. UserError if there is none."""
    if name in BUILT_IN:
        return import_module(f"overlap_sweep.workloads.{name}").WORKLOAD
    entry = next((entry for entry in entry_points(group=GROUP) if entry.name == name), None)
    if entry is None:
        raise UsageError(f"workload={name} is not known; choose one of {', '.join(names())}.")
    try:
        return entry.load()
    except Exception as error:
        # Importing another package's code can raise anything.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"workload={name} cannot be loaded from {entry.value} ({reason}); fix or uninstall that package."
        ) from error


@cache
def types_of(name: str) -> PointTypes:
    """Returns the types of the workload's points: of its module `config`, and `MEASURED` of `result`. UserError if
    there is no such workload."""
    config = load(name).module("config")
    asked = getattr(config, "Asked", config.Resolved)
    return PointTypes(config.Config, asked, config.Resolved, load(name).module("result").MEASURED)


def decoded_point(point: Mapping[str, Any]) -> ResolvedPoint:
    """Returns a completed point, given as plain data, as its workload's dataclass. UserError for a value out of
    range."""
    options = {**point}
    resolved = types_of(msgspec.convert(options, Named).workload.name).resolved
    try:
        return msgspec.convert(options, resolved)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at ")
        raise UserError(f"{where.strip('`').removeprefix('$.') or 'point'}: {reason}.") from None
