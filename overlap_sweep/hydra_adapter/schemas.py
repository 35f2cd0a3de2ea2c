"""The options of all workloads, which Hydra composes, and help, completion and errors look up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore

from overlap_sweep.config import PointConfig
from overlap_sweep.declared import has_key
from overlap_sweep.options import Option, options_of, sections_of

Groups = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Options that a config group sets, by group and choice."""

_schemas: dict[str, type[PointConfig]] = {}
"""Options by workload, as `register` got them."""


def register(schemas: Mapping[str, type[PointConfig]], groups: Groups) -> None:
    """Registers the workloads' options, their config groups and further ones with Hydra."""
    _schemas.update(schemas)
    store = ConfigStore.instance()
    for name, each in schemas.items():
        store.store(name=f"{name}_options", node=each)
    for some in (groups, *(each.groups for each in schemas.values())):
        for group, choices in some.items():
            for name, node in choices.items():
                store.store(group=group, name=name, node=dict(node), package="_global_")


def workload_names() -> tuple[str, ...]:
    """Returns the names of all workloads."""
    return tuple(_schemas)


def schema(workload: str) -> type[PointConfig]:
    """Returns the options of a workload."""
    return _schemas[workload]


def all_options() -> Iterator[Option]:
    """Yields the options of every workload."""
    return (option for each in _schemas.values() for option in options_of(each))


def workloads_with(key: str) -> list[str]:
    """Returns the workloads that have the dotted key, which may be below a map such as distributed.env."""
    return [name for name, each in _schemas.items() if has_key(each, key)]


def is_in_map(key: str) -> bool:
    """Returns whether the dotted key is one that users choose, directly below a map such as distributed.env."""
    return key.rpartition(".")[0] in _maps(workload_names())


@cache
def _maps(_workloads: tuple[str, ...]) -> frozenset[str]:
    return frozenset(option.name for option in all_options() if option.is_map)


@cache
def workloads_with_section(section: type) -> tuple[str, ...]:
    """Returns the workloads that have the dataclass's options."""
    return tuple(name for name, each in _schemas.items() if section in sections_of(each))
