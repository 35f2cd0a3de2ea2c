"""Options as other tools spell them, and what they are here: spellings.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import yaml

from overlap_sweep.options import listed

SPELLINGS = Path(__file__).with_suffix(".yaml")


@cache
def by_tool() -> dict[str, dict[str, str]]:
    """Returns what each tool's spellings are here."""
    found: dict[str, dict[str, str]] = yaml.safe_load(SPELLINGS.read_text())
    return found


def hint(name: str, values: Sequence[str] = ()) -> str | None:
    """Returns what to do instead of giving another tool's flag or key, a sentence; None if no tool has it. Of a dotted
    key the last part is looked up."""
    found = [ours for ours in _ours().get(_plain(name).rpartition(".")[2], ()) if ours != f"{name}="]
    if not found:
        return None
    if found == [""]:
        return f"Leave out {name}: options are given as option=value."
    value = ",".join(values) or "..."
    return f"Did you mean {listed([f'{ours}{value}' if ours.endswith('=') else ours for ours in found])}?"


@cache
def _ours() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for spellings in by_tool().values():
        for theirs, ours in spellings.items():
            options = found.setdefault(_plain(theirs), [])
            options += [ours] if ours not in options else []
    return found


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
