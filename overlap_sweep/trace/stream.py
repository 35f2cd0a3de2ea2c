"""Reads a trace's events a piece of the file at a time, decompressed: neither its text nor all events fit into memory.

A piece ends where one event ends and another one begins. That is guessed from the text, and right if the piece parses:
at a place that looks alike inside of an event or of a string, the piece's brackets or quotes could not close. Where the
guess is wrong, brackets are counted, which is slower.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.trace.disk import RECORD_AGAIN, blocks

_T = TypeVar("_T")

_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')

_BETWEEN_EVENTS = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp|cname)")')

_COMMA = re.compile(rb"\s*,\s*")

_BRACKET_OR_STRING = re.compile(rb'[{}\[\]]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

_MOST_LISTS = 8
"""More lists of that name than that are not looked at for the events."""

_TRIES = 8

_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_TAIL_BYTES = 1 << 13

MANY_ENTRIES = 10_000

LEAST_ENTRY_BYTES = 24
"""On average, in a piece that has so many. The shortest event that says what ran when, without any blank, has 60."""

_LEAST_BYTES = 1 << 16
"""Of text: each piece costs as much as its parsing, and blocks may be as short as a gzip member."""

_MOST_BYTES = 16 << 20
"""No piece may be longer. One that is, is no list of events any more."""

CUT_SHORT, NO_LIST = "is cut short", "is no list of events"
LIST_IS_OVER = "is no valid JSON (JSON is malformed: trailing characters)"

Number = int | float | str | None

MOST_RANKS = 1 << 20
"""More than any run has; a trace that says so is damaged."""

_raw_list = msgspec.json.Decoder(list[msgspec.Raw])


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
    malformed: int = 0
    """How many entries of the list are no events, and were left out."""
    first_malformed: str = ""
    """Why the first of them is none."""

    def leave_out(self, why: str) -> None:
        self.malformed += 1
        self.first_malformed = self.first_malformed or why


class _Document(msgspec.Struct, rename="camel"):
    trace_events: msgspec.Raw
    distributed_info: msgspec.Raw = msgspec.Raw(b"{}")
    base_time_nanoseconds: msgspec.Raw = msgspec.Raw(b"0")


def pieces(path: Path, document: Document) -> Iterator[list[Event]]:
    """Yields all events of a trace, and into `document` what else it says. UserError when it is no trace at all."""
    source = blocks(path, partial(setattr, document, "damage"))
    head, rest = _head(source, path, document)
    text, wanted = bytearray(b"[" + rest), 0
    for block in itertools.chain([b""], source):
        text += block
        if len(text) < wanted:
            continue
        length = len(text)
        events = _front(text, document)
        if events is not None:
            if len(events) > MANY_ENTRIES and length - len(text) < len(events) * LEAST_ENTRY_BYTES:
                # Another program's list: each entry takes as long as an event, and nothing is to be found in them.
                document.damage = f"holds entries of less than {LEAST_ENTRY_BYTES} bytes, too short for events"
                return
            yield events
            wanted = _LEAST_BYTES
            continue
        # Where no end could be found, twice as much text may hold one; so the work stays linear.
        wanted = 2 * len(text)
        if _damage_of(text) not in (CUT_SHORT, LIST_IS_OVER):
            break
        if wanted > _MOST_BYTES:
            document.damage = f"holds no end of an event within {_MOST_BYTES >> 20} MiB"
            break
    yield from _end(head, bytes(text[1:]), document)


def _head(source: Iterator[bytes], path: Path, document: Document) -> tuple[bytes, bytes]:
    """Returns what comes before the first event, with the list's bracket, and the text that was read beyond."""
    text, wanted = b"", 0
    for block in source:
        text += block
        if len(text) < wanted:
            continue
        if (found := _find_list(text, document)) is not None:
            return found
        wanted = 2 * len(text)
        if wanted > _MOST_BYTES:
            raise UserError(
                f"{path} holds no traceEvents in its first {len(text)} bytes; give one of torch.profiler's."
            )
    if (found := _find_list(text, document)) is not None:
        return found
    raise _refusal(text, path, document)


def _find_list(text: bytes, document: Document) -> tuple[bytes, bytes] | None:
    text = text.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return text[:1], text[1:]
    for match in itertools.islice(_LIST.finditer(text), _MOST_LISTS):
        head = text[: match.end()]
        if (found := _parsed(_Document, head + b"]}")) is not None:
            _learn(found, document)
            return head, text[match.end() :]
    return None


def _refusal(text: bytes, path: Path, document: Document) -> UserError:
    """Returns why the text is no trace: nothing in it is a list of events."""
    if not text.strip():
        return UserError(f"{path} {document.damage or 'is empty'}; {RECORD_AGAIN}.")
    damage = document.damage or _damage_of(text)
    if damage != NO_LIST:
        return UserError(f"{path} {damage}; {RECORD_AGAIN}.")
    return UserError(f"{path} is JSON but no profiler trace (no list traceEvents); give one of torch.profiler's.")


def _front(text: bytearray, document: Document) -> list[Event] | None:
    """Takes the events up to the last place that lies between two out of `text`, a list that has begun. None: no place
    does."""
    for places in (_guessed_places, _counted_places):
        for end, start in reversed(places(text)):
            # A bracket in the comma's place saves copying the text.
            written, text[end] = text[end], ord("]")
            with memoryview(text)[: end + 1] as listed:
                events = _attempted(listed, document)
            text[end] = written
            if events is not None:
                del text[1:start]
                return events
    return None


def _guessed_places(text: bytearray) -> list[tuple[int, int]]:
    """Returns where the last few events may end, and where the next ones begin."""
    found = deque(_BETWEEN_EVENTS.finditer(text, max(0, len(text) - _TAIL_BYTES)), _TRIES)
    return [(match.start() + 1, match.end()) for match in found]


def _counted_places(text: bytearray) -> list[tuple[int, int]]:
    """Returns where the last event but one ends, and where the last one begins."""
    for end in reversed(_ends_of_entries(text)):
        if comma := _COMMA.match(text, end):
            return [(end, comma.end())]
    return []


def _ends_of_entries(text: bytes | bytearray) -> list[int]:
    """Returns where the objects of a list that has begun end."""
    ends, depth = [], 0
    for token in _BRACKET_OR_STRING.finditer(text):
        written = text[token.start()]
        if written in b"[{":
            depth += 1
        elif written in b"]}":
            depth -= 1
            if depth < 1:
                break
            if depth == 1:
                ends.append(token.end())
    return ends


def _end(head: bytes, rest: bytes, document: Document) -> Iterator[list[Event]]:
    """Yields the last events, and what the document says after them; of a text that breaks off or breaks down those
    before."""
    listed = head + rest
    if head != b"[" and (found := _parsed(_Document, listed)):
        _learn(found, document)
        listed = bytes(found.trace_events)
    events = _attempted(listed, document)
    if events is None:
        document.damage = document.damage or _damage_of(listed)
        events = _saved(b"[" + rest, document)
    yield events


def _saved(text: bytes, document: Document) -> list[Event]:
    """Returns the objects that can be read of a list that has begun, from its start."""
    ends = _ends_of_entries(text)

    def listed(count: int) -> bytes:
        return (text[: ends[count - 1]] if count else b"[") + b"]"

    def is_too_much(count: int) -> bool:
        return _attempted(listed(count), Document(kind=document.kind)) is None

    return decoded(listed(bisect_left(range(1, len(ends) + 1), True, key=is_too_much)), document)


def _damage_of(text: bytes | bytearray) -> str:
    """Returns what is wrong with a text that is no whole trace."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except RecursionError:
        return "is nested too deeply"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        said = str(error)
        if "truncated" in said or said.endswith(f"(byte {len(text)})"):
            return CUT_SHORT
        return f"is no valid JSON ({said.partition(' (byte')[0]})"
    return NO_LIST


def _attempted(listed: bytes | memoryview, document: Document) -> list[Event] | None:
    try:
        return decoded(listed, document)
    except _NO_JSON:
        return None


def _parsed(kind: type[_T], text: bytes) -> _T | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except _NO_JSON:
        return None


def _learn(found: _Document, document: Document) -> None:
    document.distributed = _parsed(DistributedInfo, found.distributed_info) or document.distributed
    document.base_time_ns = _parsed(int, found.base_time_nanoseconds) or document.base_time_ns


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
