"""How times moved in the course of a sweep."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NOTABLE = 0.05
"""From this change on the report speaks of drift."""


def later_change(times_us: Sequence[float]) -> float:
    """Median of the later half over the median of the earlier half, minus 1. Of at least two times."""
    half = len(times_us) // 2
    return statistics.median(times_us[-half:]) / statistics.median(times_us[:half]) - 1
