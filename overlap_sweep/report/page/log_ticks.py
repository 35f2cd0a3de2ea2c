"""Where the lines of a logarithmic axis are, so that each of them can carry its number."""

from __future__ import annotations

import math

LOGARITHMIC_FROM = 4.0
"""Ratio of the largest to the smallest time from which on an axis is logarithmic."""


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within `low` to `high`, both above 0; in a narrow range more of them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in (
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 6, 8),
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9),
    ):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) > 2:
            break
    return ticks
