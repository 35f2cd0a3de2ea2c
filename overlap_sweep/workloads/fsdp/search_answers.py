"""What searches over knobs came to: the settings that they chose, among the points that they measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.results.points import Point
from overlap_sweep.results.records import KnobRecord, KnobSearch
from overlap_sweep.workloads.fsdp.knobs import in_words

_PREFETCH = "fsdp.forward_prefetch"


def answering(points: Iterable[Point], records: Mapping[Path, KnobRecord]) -> Iterator[tuple[Point, KnobSearch]]:
    """The points that have the answer of a search beside which they lie."""
    searches = [
        (directory, search) for directory, record in records.items() for search in record.searches if search.answered
    ]
    for point in points:
        for directory, search in searches:
            if point.directory.is_relative_to(directory) and _has_answer(point.config, search):
                yield point, search


def _has_answer(config: Mapping[str, Any], search: KnobSearch) -> bool:
    baseline = {key: values[0] for key, values in search.knobs.items() if values}
    typed = dict(override.partition("=")[::2] for override in search.overrides)
    wanted = {**typed, **baseline, **search.best}
    return all(_in_config(config, key.lstrip("+"), value) for key, value in wanted.items())


def _in_config(config: Mapping[str, Any], key: str, value: str) -> bool:
    """Whether it is set there so; true of what is no part of a point."""
    first, *rest = key.split(".")
    if first not in config:
        return True
    found: Any = config[first]
    for name in rest:
        found = found.get(name) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        # A choice of a group, such as model=llama3_8b.
        found = found.get("name")
    return _alike(key, in_words(found)) == _alike(key, value)


def _alike(key: str, value: str) -> str:
    """Without quotes; a number as it is written shortest."""
    plain = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
    if key == _PREFETCH:
        plain = {"false": "0", "true": "1"}.get(plain.lower(), plain)
    return f"{float(plain):g}" if re.fullmatch(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", plain, re.IGNORECASE) else plain.lower()
