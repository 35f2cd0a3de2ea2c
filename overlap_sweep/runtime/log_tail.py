"""The end of a log, which may be of any size."""

from __future__ import annotations

from pathlib import Path

MOST_BYTES = 2**16


def tail(log: Path, lines: int, start: int = 0) -> str:
    """The last lines of what the file has from byte `start` on, empty if there is no file."""
    if not log.exists():
        return ""
    with log.open("rb") as content:
        content.seek(max(start, log.stat().st_size - MOST_BYTES))
        text = content.read(MOST_BYTES).decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
