"""What a configuration's fields declare of their values: a range, or choices. `check` holds a configuration to it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import field, fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig

from overlap_sweep.errors import UserError


def ranged(default: Any, low: float, high: float) -> Any:
    return field(default=default, metadata={"range": (low, high)})


def one_of(default: Any, *choices: str | None) -> Any:
    return field(default=default, metadata={"choices": choices})


def check(config: Any, schema: type, where: str = "") -> None:
    """Raise UserError for the first key that `schema` does not have, or value outside the range or the choices that it
    declares.

    `config` is a DictConfig or an instance of `schema`; nested dataclasses are checked too. null passes. Hydra itself
    lets `+` add any key: nothing would read it, and points that differ in it alone would be compared.
    """
    types = get_type_hints(schema)
    if isinstance(config, DictConfig) and (unknown := set(map(str, config)) - types.keys()):
        raise UserError(_unknown(min(unknown), types, where))
    for declared in fields(schema):
        name = f"{where}{declared.name}"
        value = config[declared.name] if isinstance(config, DictConfig) else getattr(config, declared.name)
        if is_dataclass(types[declared.name]):
            check(value, types[declared.name], f"{name}.")
        elif value is None:
            continue
        elif "choices" in declared.metadata and value not in declared.metadata["choices"]:
            raise UserError(f"{name}={value} is not known; choose one of {', '.join(declared.metadata['choices'])}.")
        elif "range" in declared.metadata:
            low, high = declared.metadata["range"]
            if not low <= value <= high:
                raise UserError(f"{name}={value} is out of range; give a value from {low} to {high}.")


def _unknown(name: str, known: Iterable[str], where: str) -> str:
    """Returns the error about a key that nothing reads, with the nearest that is read."""
    close = difflib.get_close_matches(name, known, n=1)
    mend = f"did you mean {where}{close[0]}?" if close else f"it has {', '.join(known)}."
    return f"{where.rstrip('.') or 'the configuration'} has no {name}; {mend}"
