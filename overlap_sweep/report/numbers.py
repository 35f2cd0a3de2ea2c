"""Formats numbers and words for people, and escapes them for programs."""

import json
import math
from collections.abc import Iterable

from overlap_sweep.diagnosis import as_rate as as_rate
from overlap_sweep.diagnosis import some_of as some_of

MANY_US = 10_000
"""From this time on, tenths of a microsecond are not shown."""

UNDEFINED = "-"
"""In cells of numbers that are undefined."""

PASS_WORDS = {"fwd": "forward", "bwd": "backward"}


def as_us(time_us: float) -> str:
    """Returns the time as `1,234.5`, from 10 ms on as `12,345`: all tables are in microseconds."""
    return f"{time_us:,.{1 if abs(time_us) < MANY_US else 0}f}"


def as_percent(fraction: float) -> str:
    """Returns the fraction in percent; `UNDEFINED` if it is NaN."""
    return UNDEFINED if math.isnan(fraction) else f"{fraction:.0%}"


def as_duration(seconds: float) -> str:
    """Returns `45 s`, `12 min 30 s`, `2 h 5 min`."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    if hours:
        return f"{hours} h {rest_min} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def as_sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: max(longest - 3, 0)]}..."


def visible(text: str) -> str:
    """Returns the text with invisible characters escaped, such as control characters, which a terminal would
    execute."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def comments(entries: Iterable[str]) -> str:
    """Returns comment lines for YAML and Python with any content: `splitlines` covers all line ends of both, and
    control characters are escaped."""
    lines = (line for entry in entries for line in entry.splitlines() or [""])
    return "".join(f"# {visible(line)}".rstrip() + "\n" for line in lines)


def visible_json(text: str) -> str:
    """Returns the same JSON, with JSON's escapes for invisible characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def as_loss(loss: float) -> str:
    """Returns the loss with four significant digits, because it may be close to 0."""
    return f"{loss:.4g}"


def as_count(number: int) -> str:
    """Returns the number as `12.3 M`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
