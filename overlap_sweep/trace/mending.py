"""Text that is almost JSON, made JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator

_RIGHT_ESCAPE = (
    rb'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)
_HALF_A_PAIR = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb"(?P<right>%s)|(?P<half>%s)|\\" % (_RIGHT_ESCAPE, _HALF_A_PAIR))


def as_written_and_mended(text: bytes) -> Iterator[bytes]:
    yield text
    if (other := mended(text)) != text:
        yield other


def mended(text: bytes) -> bytes:
    """Without what is often found in traces and is no JSON: control characters, bytes that are no UTF-8 and backslashes
    that escape nothing in names, NaN and infinities, commas before a closing bracket."""
    text = text.translate(bytes.maketrans(bytes(range(32)), b" " * 32))
    text = text.decode(errors="replace").encode()
    if b"\\" in text:
        text = _ESCAPE.sub(_right_escape, text)
    text = re.sub(rb"([:\[,]\s*)[-+]?(?:nan|inf|infinity)(?=\s*[,}\]])", rb"\1null", text, flags=re.IGNORECASE)
    return re.sub(rb",\s*([}\]])", rb"\1", text)


def _right_escape(found: re.Match[bytes]) -> bytes:
    return found[0] if found["right"] else rb"\ufffd" if found["half"] else rb"\\"
