"""What the checks of all kinds of points are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.results.run_directory import Timing

MEASURE_AGAIN = "remove it and measure the point again"
UPDATE = "update overlap_sweep"

_LEAST_US = 1e-6
"""Rates and speedups are quotients by times, samples' too, and charts take logarithms of them."""
_MOST_US = 1e15
"""31 years, for one pass."""
_LONGEST_NAME = 100
_ROUNDING = 1e-6
"""Relative: quartiles of equal times may be a last digit apart."""

Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Word = str | int | float | bool | None


class Workload(msgspec.Struct):
    name: str
    tolerance: float | None = None


class SizedWorkload(Workload, kw_only=True):
    tokens: Count | None


def is_whole(timing: Timing) -> bool:
    """Whether all of its times can be, and it has samples."""
    times_us = (timing.median_us, timing.q1_us, timing.q3_us, *timing.samples_us)
    return len(timing.samples_us) > 1 and all(_LEAST_US <= time_us < _MOST_US for time_us in times_us)


def contradiction(timing: Timing) -> str | None:
    """Returns what in it cannot be true of any measurement, in words, or None."""
    if not is_sorted(timing.q1_us, timing.median_us, timing.q3_us):
        return f"a median of {timing.median_us:g} us outside of its quartiles"
    if not is_sorted(min(timing.samples_us), timing.median_us, max(timing.samples_us)):
        return f"a median of {timing.median_us:g} us outside of its samples"
    return None


def is_sorted(low_us: float, middle_us: float, high_us: float) -> bool:
    return low_us <= middle_us * (1 + _ROUNDING) and middle_us <= high_us * (1 + _ROUNDING)


def check_name(name: str, path: Path) -> None:
    """Of a kernel's backend, operator or implementation, of a variant, a knob or its value; those from elsewhere may be
    any word. UserError where it is none."""
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise UserError(f"{path} has the name {name[:_LONGEST_NAME]!r}, too long or not printable; {MEASURE_AGAIN}.")
