"""What a configuration's fields declare of their values: a range, or choices. `config.check` holds values to it."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def ranged(default: Any, low: float, high: float) -> Any:
    return field(default=default, metadata={"range": (low, high)})


def one_of(default: Any, *choices: str | None) -> Any:
    return field(default=default, metadata={"choices": choices})
