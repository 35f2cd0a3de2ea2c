"""What a configuration's fields declare of their values: a range, or choices. `check` holds a configuration to it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from overlap_sweep.errors import UserError


def ranged(default: Any, low: float, high: float) -> Any:
    return field(default=default, metadata={"range": (low, high)})


def one_of(default: Any, *choices: str | None) -> Any:
    return field(default=default, metadata={"choices": choices})


def any_of(default: Any, values: str) -> Any:
    """Of a field that takes values of several types, which `complete` of its workload checks."""
    return field(default=default, metadata={"values": values})


@cache
def types_of(schema: type) -> dict[str, Any]:
    """Returns each field's type, in order."""
    hints = get_type_hints(schema)
    return {declared.name: hints[declared.name] for declared in fields(schema)}


def check(config: Mapping[str, Any], schema: type, where: str = "") -> None:
    """Raises UserError for the first value outside the range or the choices that `schema` declares, or a field that is
    not there. Nested dataclasses are checked too. null passes."""
    # What has a value of its own first: others take theirs from it.
    for declared in sorted(fields(schema), key=lambda one: is_dataclass(types_of(schema)[one.name])):
        name = f"{where}{declared.name}"
        if declared.name not in config:
            raise UserError(f"{name} cannot be deleted; give it a value, or null, instead of ~{name}.")
        value, kind = config[declared.name], types_of(schema)[declared.name]
        if is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise UserError(f"{name}={value} has options of its own; give {name}.{fields(kind)[0].name}=... .")
            check(value, kind, f"{name}.")  # type: ignore[arg-type]
        elif value is None:
            continue
        elif "choices" in declared.metadata and value not in declared.metadata["choices"]:
            raise UserError(f"{name}={value} is not known; choose one of {', '.join(declared.metadata['choices'])}.")
        elif "range" in declared.metadata:
            low, high = declared.metadata["range"]
            if not low <= value <= high:
                raise UserError(f"{name}={value} is out of range; give a value from {low} to {high}.")


def unknown_key(config: Mapping[str, Any], schema: type) -> str | None:
    """Returns the first key, with dots, that the schema does not have: Hydra itself lets `+` add any, which nothing
    would read, and points that differ in it alone would be compared."""
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
    """Returns whether the schema has the key, with dots; what is below a field that is no dataclass is not checked."""
    name, _, below = key.partition(".")
    kind = types_of(schema).get(name)
    return kind is not None and (not below or not is_dataclass(kind) or has_key(kind, below))  # type: ignore[arg-type]


def short_key(key: str, schema: type) -> str:
    """Returns the last part of a key with dots, unless another key of the schema ends alike."""
    leaf = key.rpartition(".")[2]
    return leaf if _leaves(schema).count(leaf) < 2 else key


@cache
def _leaves(schema: type) -> list[str]:
    """Returns the last parts of all keys."""
    types = types_of(schema)
    return [leaf for name, kind in types.items() for leaf in (_leaves(kind) if is_dataclass(kind) else [name])]  # type: ignore[arg-type]


def no_such_key(key: str, schema: type, where: str = "") -> str:
    """Returns the error about a key, with dots, that the schema does not have, with its nearest one."""
    types = types_of(schema)
    name, _, below = key.partition(".")
    if below and name in types and is_dataclass(types[name]):
        return no_such_key(below, types[name], f"{where}{name}.")
    close = difflib.get_close_matches(name, types, n=1)
    mend = f"did you mean {where}{close[0]}?" if close else f"it has {', '.join(types)}."
    return f"{where.rstrip('.') or 'the configuration'} has no {name}; {mend}"


def shown(value: Any) -> str:
    """Returns the value as it would be typed."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{shown(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(shown, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
