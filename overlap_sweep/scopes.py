"""Values that process groups have each for themselves, as levers and predictions take them.

`8` is for all groups, `dp:8` for those with the word `dp` in their description, `0-3:8` for those of the ranks 0 to 3,
`0-6/2:8` of the ranks 0, 2, 4 and 6. Several are joined by `+`, such as `dp:8+tp:16`; the first that is meant counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

_RANKS = re.compile(r"(\d+)-(\d+)(?:/(\d+))?")


def parts_of(text: str) -> list[tuple[str, str]]:
    """Returns which groups each part is for, empty for all of them, and its value."""
    return [(scope, value) for scope, _, value in (part.rpartition(":") for part in text.split("+"))]


def part_for(text: str, description: str, ranks: Sequence[int]) -> tuple[str, str] | None:
    """Returns the part that is for a process group, as `parts_of`; None if there is none."""
    return next((part for part in parts_of(text) if not part[0] or is_meant(part[0], description, ranks)), None)


def value_for(text: str, description: str, ranks: Sequence[int]) -> str | None:
    """Returns the value for a process group; None if there is none."""
    part = part_for(text, description, ranks)
    return part[1] if part else None


def is_meant(scope: str, description: str, ranks: Sequence[int]) -> bool:
    """Returns whether a process group is what the part of a value before its colon says."""
    if span := _RANKS.fullmatch(scope):
        first, last, stride = (int(number or 1) for number in span.groups())
        return sorted(ranks) == [*range(first, last + 1, stride)]
    return bool(re.search(rf"(?<![a-z0-9]){re.escape(scope)}(?![a-z0-9])", description, re.IGNORECASE))


def scope_of(description: str, ranks: Sequence[int], others: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Returns what stands for a process group and for none of the others; empty if nothing does. `others`:
    descriptions and ranks. Groups of one description are one, as each rank has its own of them."""
    ordered, others = sorted(ranks), list(others)
    is_word = re.fullmatch(r"[\w.-]*[^\W\d][\w.-]*", description)
    if is_word and not any(is_meant(description, about, theirs) for about, theirs in others if about != description):
        return description
    strides = {after - before for before, after in pairwise(ordered)}
    if len(strides) != 1:
        return ""
    (stride,) = strides
    scope = f"{ordered[0]}-{ordered[-1]}" + (f"/{stride}" if stride > 1 else "")
    same = (theirs for about, theirs in others if (about, sorted(theirs)) != (description, ordered))
    return "" if any(is_meant(scope, "", theirs) for theirs in same) else scope
