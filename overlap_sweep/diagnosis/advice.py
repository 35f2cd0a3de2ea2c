"""Chooses the setting to try from `advice.yaml`: by cause, by what the calls carry, and by the libraries in the trace.

Causes are decided without names of libraries; only the words here depend on them. `docs/diagnosis.md` lists all options
by cause, those that are named here among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import msgspec

IF_CORES_ARE_FREE = " It gains time only if cores are free: gloo computes on those that GEMMs use."


class Advice(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `advice.yaml`, which explains the fields."""

    when: list[str] = []
    try_: str = msgspec.field(name="try", default="")
    overlap: str = ""

    @property
    def sentence(self) -> str:
        return self.try_ or self.overlap


@cache
def advice_by_cause() -> dict[str, list[Advice]]:
    """Returns the entries of `advice.yaml`, by cause."""
    text = resources.files(__package__).joinpath("advice.yaml").read_bytes()
    return msgspec.yaml.decode(text, type=dict[str, list[Advice]])


def advice_for(cause: str, conditions: Mapping[str, str]) -> str:
    """Returns the sentence with the setting to try. `conditions`: those that hold, each with its value if it has
    one."""
    advice = next(one for one in advice_by_cause()[cause] if all(_holds(name, conditions) for name in one.when))
    suffix = IF_CORES_ARE_FREE if advice.overlap and "cpu" in conditions else ""
    return advice.sentence.format_map(conditions) + suffix


def _holds(name: str, conditions: Mapping[str, str]) -> bool:
    return name[1:] not in conditions if name.startswith("!") else name in conditions
