"""Levers of a point as they were typed: by family and name, and which other option sets the same."""

from collections.abc import Mapping
from typing import Any

from overlap_sweep import levers
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.workloads.job.config import Config


def by_family(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of levers by family and name, however they were typed. UsageError for one that does not exist,
    or that is given twice."""
    found: dict[str, dict[str, Any]] = {}
    for key, own in given.items():
        family, _, name = key.partition(".")
        for below, value in own.items() if isinstance(own, Mapping) else ((name, own),):
            levers.lever_named(f"{family}.{below}".rstrip("."))
            if below in found.setdefault(family, {}):
                raise UsageError(f"job.levers.{family}.{below} is given twice; give it once.")
            found[family][below] = value
    return found


def set_elsewhere(config: Config, name: str) -> str:
    """Returns the option of the point that sets the variable of a lever; empty if none does."""
    variable = levers.levers()[name].environment
    if config.job.env.get(variable) is not None:
        return f"job.env.{variable}"
    is_set = variable == "CUDA_DEVICE_MAX_CONNECTIONS" and config.runtime.max_connections is not None
    return "runtime.max_connections" if is_set else ""


def check(config: Config) -> None:
    """Raises UsageError for a lever or a value that does not exist, UserError for a lever that another option sets."""
    for name in levers.chosen(config.job.levers):
        if other := set_elsewhere(config, name):
            raise UserError(f"job.levers.{name} and {other} set the same; give one of them.")
