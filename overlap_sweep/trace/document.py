"""The JSON of a trace: what it is decoded to, and how text that is almost JSON is mended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache

import msgspec

Number = int | float | str | None

MOST_RANKS = 1 << 20
"""More than any run has; a trace that says so is damaged."""

_raw_list = msgspec.json.Decoder(list[msgspec.Raw])

_RIGHT_ESCAPE = (
    rb'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)

_HALF_A_PAIR = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"

_ESCAPE = re.compile(rb"(?P<right>%s)|(?P<half>%s)|\\" % (_RIGHT_ESCAPE, _HALF_A_PAIR))

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_ERROR_AT = re.compile(r" \(byte (\d+)\)")


class Args(msgspec.Struct, gc=False):
    correlation: Number = None
    sequence_number: Number = msgspec.field(name="Sequence number", default=None)
    forward_thread: Number = msgspec.field(name="Fwd thread id", default=None)


class Event(msgspec.Struct, gc=False):
    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    ts: Number = None
    dur: Number = 0
    pid: Number = None
    tid: Number = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    """With times as they are written, for those that a float would round. Several times slower to read."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = Decimal(0)  # type: ignore[assignment]


class DistributedInfo(msgspec.Struct):
    rank: int | str | None = None
    world_size: int | str | None = None


@dataclass
class Document:
    """What is learnt of a trace beside its events; complete when all of them have been read."""

    kind: type[Event] = Event
    """What to read events as."""
    distributed: DistributedInfo = field(default_factory=DistributedInfo)
    base_time_ns: int = 0
    """What all moments count from, in nanoseconds since 1970."""
    damage: str = ""
    """Such as `is cut short`: what follows the events that were read is lost. Empty of a whole file."""
    repaired: bool = False
    """Whether the text had to be mended before it was JSON."""
    malformed: int = 0
    """How many entries of the list are no events, and were left out."""
    first_malformed: str = ""
    """Why the first of them is none."""

    def leave_out(self, why: str) -> None:
        self.malformed += 1
        self.first_malformed = self.first_malformed or why


def decoded(listed: bytes | memoryview, document: Document) -> list[Event]:
    """Returns the events of a JSON list; entries that are none are left out and counted."""
    one, several = _decoders(document.kind)
    try:
        return several.decode(listed)
    except msgspec.ValidationError:
        events, left_out = [], []
        for entry in _raw_list.decode(listed):
            try:
                events.append(one.decode(entry))
            except msgspec.ValidationError as error:
                left_out.append(str(error))
        for why in left_out:
            document.leave_out(why)
        return events


@cache
def _decoders(kind: type[Event]) -> tuple[msgspec.json.Decoder[Event], msgspec.json.Decoder[list[Event]]]:
    return msgspec.json.Decoder(kind), msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]


def as_written_and_mended(text: bytes) -> Iterator[bytes]:
    yield text
    if (other := mended(text)) != text:
        yield other


def mended(text: bytes) -> bytes:
    """Returns the text without what is often found in traces and is no JSON: control characters, bytes that are no
    UTF-8 and backslashes that escape nothing in names, NaN and infinities, commas before a closing bracket."""
    text = text.translate(bytes.maketrans(bytes(range(32)), b" " * 32))
    text = text.decode(errors="replace").encode()
    if b"\\" in text:
        text = _ESCAPE.sub(_right_escape, text)
    text = re.sub(rb"([:\[,]\s*)[-+]?(?:nan|inf|infinity)(?=\s*[,}\]])", rb"\1null", text, flags=re.IGNORECASE)
    return re.sub(rb",\s*([}\]])", rb"\1", text)


def _right_escape(found: re.Match[bytes]) -> bytes:
    return found[0] if found["right"] else rb"\ufffd" if found["half"] else rb"\\"


def damage_of(text: bytes) -> str:
    """Returns what is wrong with a text that does not parse, whatever could be mended apart."""
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
    """Returns why it does not parse."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except NO_JSON as error:
        return error
    return None


def position_of(error: Exception, length: int) -> int:
    """Returns the byte at which a text of this length is wrong."""
    if isinstance(error, UnicodeDecodeError | RecursionError):
        return 0
    found = _ERROR_AT.search(str(error))
    return int(found[1]) if found else length


def is_over(error: Exception) -> bool:
    """Returns whether all that is wrong is that something follows the list."""
    return "trailing characters" in str(error)
