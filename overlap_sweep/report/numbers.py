"""How numbers are written for people."""

from __future__ import annotations

import math


def as_us(time_us: float) -> str:
    return f"{time_us:,.1f}"


def as_ms(time_us: float) -> str:
    return f"{time_us / 1e3:,.3f}"


def as_percent(fraction: float) -> str:
    """`-` where the fraction is undefined."""
    return "-" if math.isnan(fraction) else f"{fraction:.0%}"
