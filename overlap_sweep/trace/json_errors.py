"""What is wrong with a text that is no JSON, and where."""

from __future__ import annotations

import re

import msgspec

from overlap_sweep.trace.mending import as_written_and_mended

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ERROR_AT = re.compile(r" \(byte (\d+)\)")


def damage_of(text: bytes) -> str:
    """What is wrong with a text that does not parse, whatever could be mended apart."""
    for number, candidate in enumerate(as_written_and_mended(text)):
        error = error_of(candidate)
        if error is None:
            return "is no list of events" if number == 0 else "is no valid JSON"
        if not isinstance(error, RecursionError) and position_of(error, len(candidate)) >= len(candidate):
            return "is cut short"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return f"is no valid JSON ({_ERROR_AT.sub('', str(error))})"


def error_of(text: bytes) -> Exception | None:
    """Why it does not parse."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except NO_JSON as error:
        return error
    return None


def position_of(error: Exception, length: int) -> int:
    """The byte at which a text of this length is wrong."""
    if isinstance(error, UnicodeDecodeError | RecursionError):
        return 0
    found = _ERROR_AT.search(str(error))
    return int(found[1]) if found else length


def is_over(error: Exception) -> bool:
    """Whether all that is wrong is that something follows the list."""
    return "trailing characters" in str(error)
