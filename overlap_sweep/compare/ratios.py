"""Ratios of what may be unknown: then they are NaN."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable


def ratio(value: float | None, reference: float | None) -> float:
    return math.nan if value is None or not reference else value / reference


def geometric_mean(ratios: Iterable[float]) -> float:
    """NaN of none; what is NaN does not count."""
    known = [one for one in ratios if not math.isnan(one)]
    return statistics.geometric_mean(known) if known else math.nan
