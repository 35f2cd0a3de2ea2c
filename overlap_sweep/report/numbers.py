"""How numbers and words are written for people, and where programs cannot take them as they are."""

from __future__ import annotations

import math
from typing import Any

PASS_WORDS = {"fwd": "forward", "bwd": "backward"}


def as_us(time_us: float) -> str:
    return f"{time_us:,.1f}"


def as_ms(time_us: float) -> str:
    return f"{time_us / 1e3:,.3f}"


def as_percent(fraction: float) -> str:
    """`-` where the fraction is undefined."""
    return "-" if math.isnan(fraction) else f"{fraction:.0%}"


def as_duration(seconds: float) -> str:
    """`45 s`, `12 min 30 s`, `2 h 5 min`."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    if hours:
        return f"{hours} h {rest_min} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def as_sentence(words: str) -> str:
    """With a capital."""
    return words[:1].upper() + words[1:]


def finite(value: Any) -> Any:
    """None for the numbers that JSON has not."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
