"""Ranges and choices that a configuration's fields declare, and `check`, which enforces them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from overlap_sweep.errors import UsageError


def ranged(default: Any, low: float, high: float) -> Any:
    return field(default=default, metadata={"range": (low, high)})


def one_of(default: Any, *choices: str | None, also: Mapping[str, str] | None = None) -> Any:
    """`also`: other spellings of choices, with the choice that each stands for."""
    return field(default=default, metadata={"choices": choices, "also": also or {}})


def verbatim(default: Any) -> Any:
    """Declares a field that takes the rest of the word as it was typed, without Hydra's grammar."""
    return field(default=default, metadata={"verbatim": True})


def any_of(default: Any, values: str) -> Any:
    """Declares a field that takes values of several types; `complete` of its workload checks them."""
    return field(default=default, metadata={"values": values})


@cache
def types_of(schema: type) -> dict[str, Any]:
    """Returns each field's type, in order."""
    hints = get_type_hints(schema)
    return {declared.name: hints[declared.name] for declared in fields(schema)}


def spellings(schema: type) -> dict[str, Mapping[str, str]]:
    """Returns the other spellings of each option's values, by dotted name."""
    found: dict[str, Mapping[str, str]] = {}
    for declared in fields(schema):
        kind = types_of(schema)[declared.name]
        if is_dataclass(kind):
            below = spellings(kind)  # type: ignore[arg-type]
            found |= {f"{declared.name}.{name}": also for name, also in below.items()}
        elif also := declared.metadata.get("also"):
            found[declared.name] = also
    return found


def verbatim_options(schema: type) -> list[str]:
    """Returns the dotted names of the options that are taken as they were typed."""
    found = []
    for declared in fields(schema):
        kind = types_of(schema)[declared.name]
        if is_dataclass(kind):
            found += [f"{declared.name}.{name}" for name in verbatim_options(kind)]  # type: ignore[arg-type]
        elif declared.metadata.get("verbatim"):
            found.append(declared.name)
    return found


def spelled(config: dict[str, Any], schema: type) -> dict[str, Any]:
    """Returns the configuration with one spelling for every value, so that each spelling gives the same point."""
    for name, also in spellings(schema).items():
        *parents, last = name.split(".")
        node = config
        for parent in parents:
            node = node.get(parent) or {}
        if node.get(last) in also:
            node[last] = also[node[last]]
    return config


def check(config: Mapping[str, Any], schema: type, where: str = "") -> None:
    """Raises UsageError for the first value outside the range or the choices that `schema` declares, or the first
    missing field. Nested dataclasses are checked too. null passes."""
    # Plain values first: nested ones may be interpolated from them, and those of `workload` from nested ones.
    types = types_of(schema)
    for declared in sorted(fields(schema), key=lambda one: (is_dataclass(types[one.name]), one.name == "workload")):
        name = f"{where}{declared.name}"
        if declared.name not in config:
            raise UsageError(f"{name} cannot be deleted; set it to a value or null instead of using ~{name}.")
        value, kind = config[declared.name], types_of(schema)[declared.name]
        if is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise UsageError(f"{name} is a group of options; set one, such as {name}.{fields(kind)[0].name}=... .")
            check(value, kind, f"{name}.")  # type: ignore[arg-type]
        elif value is None:
            continue
        elif "choices" in declared.metadata and value not in declared.metadata["choices"]:
            raise UsageError(f"{name}={value} is not known; choose one of {', '.join(declared.metadata['choices'])}.")
        elif "range" in declared.metadata:
            low, high = declared.metadata["range"]
            if not low <= value <= high:
                raise UsageError(f"{name}={value} is out of range; give a value from {low} to {high}.")


def unknown_key(config: Mapping[str, Any], schema: type) -> str | None:
    """Returns the first dotted key that the schema lacks. Hydra lets `+` add any key; nothing would read it, and points
    that differ only in it would be pooled."""
    types = types_of(schema)
    for name, value in config.items():
        if name not in types:
            return f"{name}.{_first_leaf(value)}".rstrip(".")
        if is_dataclass(types[name]) and isinstance(value, Mapping):
            below = unknown_key(value, types[name])
            if below:
                return f"{name}.{below}"
    return None


def _first_leaf(value: Any) -> str:
    if not isinstance(value, Mapping) or not value:
        return ""
    name, below = next(iter(value.items()))
    return f"{name}.{_first_leaf(below)}".rstrip(".")


def has_key(schema: type, key: str) -> bool:
    """Returns whether the schema has the dotted key. Keys below a field that is no dataclass are not checked."""
    name, _, below = key.partition(".")
    kind = types_of(schema).get(name)
    return kind is not None and (not below or not is_dataclass(kind) or has_key(kind, below))  # type: ignore[arg-type]


def short_key(key: str, schema: type) -> str:
    """Returns the last part of a dotted key; the whole key if another key of the schema ends in the same part."""
    leaf = key.rpartition(".")[2]
    return leaf if _leaves(schema).count(leaf) < 2 else key


@cache
def _leaves(schema: type) -> list[str]:
    """Returns the last parts of all keys."""
    types = types_of(schema)
    return [leaf for name, kind in types.items() for leaf in (_leaves(kind) if is_dataclass(kind) else [name])]  # type: ignore[arg-type]


def shown(value: Any) -> str:
    """Returns the value as it is typed on the command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{shown(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(shown, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
