"""Looks up what versions of Transformer Engine are known to compute wrongly. The list is data: wrong_numbers.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml
from packaging.specifiers import SpecifierSet


@cache
def _entries() -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath("wrong_numbers.yaml").read_text()
    entries: list[dict[str, Any]] = yaml.safe_load(text)
    return entries


def listed(
    point: Mapping[str, Any], slot: str, setting: Mapping[str, Any], environment: Mapping[str, Any]
) -> str | None:
    """Returns why a slot's setting computes wrong numbers on a machine with this recorded environment, or None."""
    for entry in _entries():
        installed = environment.get("packages", {}).get(entry["package"])
        # cuBLASMp is another implementation of the same methods.
        if (
            installed
            and not point.get("with_cublasmp")
            and SpecifierSet(entry["versions"]).contains(installed, prereleases=True)
            and entry.get("multicast", point["runtime"]["multicast"]) == point["runtime"]["multicast"]
            and point["precision"] in entry.get("precisions", [point["precision"]])
            and slot.partition("_")[2] in entry.get("phases", [slot.partition("_")[2]])
            and entry["setting"].items() <= setting.items()
        ):
            return f"wrong numbers with {entry['package']} {installed}: {entry['reason']}"
    return None
