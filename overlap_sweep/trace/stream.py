"""Reads a trace's events piece by piece, because neither the decompressed text nor all events may fit into memory.

A piece ends between two events. That place is guessed from the text; the guess is right if the piece parses, because
inside an event or a string the piece's brackets or quotes would not close. If no guess is right, brackets are counted,
which is slower.
"""

import itertools
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from overlap_sweep.errors import UserError
from overlap_sweep.trace import MOST_RANKS
from overlap_sweep.trace.columns import ProcessGroup
from overlap_sweep.trace.disk import (
    NO_JSON,
    RECORD_AGAIN,
    as_written_and_mended,
    blocks,
    damage_of,
    error_of,
    is_over,
    mended,
    position_of,
)
from overlap_sweep.trace.events import Event, EventKind, OtherEvent, decoders

_T = TypeVar("_T")

_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')

_BETWEEN_EVENTS = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp|cname)")')

_COMMA = re.compile(rb"\s*,\s*")

_BRACKET_OR_STRING = re.compile(rb'[{}\[\]]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

_MOST_LISTS = 8
"""Number of lists of that name that are tried as the list of events."""

_TRIES = 8

_TAIL_BYTES = 1 << 13

MANY_ENTRIES = 10_000

LEAST_ENTRY_BYTES = 24
"""Smallest average size in a piece with many entries. The shortest useful event without blanks has 60 bytes."""

_MOST_BYTES = 16 << 20
"""Longest piece; a longer one is not a list of events."""

_raw_list = msgspec.json.Decoder(list[msgspec.Raw])


class DistributedInfo(msgspec.Struct):
    rank: int | str | None = None
    world_size: int | str | None = None
    config: msgspec.Raw = msgspec.field(name="pg_config", default=msgspec.Raw(b"[]"))
    nccl_version: str | None = None

    @property
    def groups(self) -> list[ProcessGroup]:
        """Returns the process groups that are written as they should be."""
        groups = [parsed(ProcessGroup, entry) for entry in parsed(list[msgspec.Raw], self.config) or ()]
        return [one for one in groups if one and all(0 <= n < MOST_RANKS for n in (one.size, *one.ranks))]


@dataclass
class Document:
    """What a trace holds besides its events; complete once all events have been read."""

    kind: EventKind = Event
    distributed: DistributedInfo = field(default_factory=DistributedInfo)
    base_time_ns: int = 0
    devices: list[str] = field(default_factory=list)
    """Kinds of GPU, such as NVIDIA H200, each once."""
    damage: str = ""
    """Such as `is cut short`: the events after it are lost. Empty for an undamaged file."""
    repaired: bool = False
    """Whether the text had to be mended to be valid JSON."""
    malformed: int = 0
    """Number of entries that are not events and were left out."""
    first_malformed: str = ""
    """Reason for the first of them."""

    def leave_out(self, why: str) -> None:
        self.malformed += 1
        self.first_malformed = self.first_malformed or why


class _Device(msgspec.Struct):
    name: str


class _Broken(Exception):
    """The text read so far is not JSON, whatever follows."""


class _Document(msgspec.Struct, rename="camel"):
    trace_events: msgspec.Raw
    distributed_info: msgspec.Raw = msgspec.Raw(b"{}")
    base_time_nanoseconds: msgspec.Raw = msgspec.Raw(b"0")
    device_properties: msgspec.Raw = msgspec.Raw(b"[]")


def pieces(path: Path, document: Document) -> Iterator[list[Any]]:
    """Yields all events of a trace, in the forms of `events`, and fills in `document`. UserError when it is not a
    trace."""
    source = blocks(path, partial(setattr, document, "damage"))
    head, rest = _head(source, path, document)
    text, wanted = bytearray(b"[" + rest), 0
    for block in itertools.chain([b""], source):
        text += block
        if len(text) < wanted:
            continue
        length = len(text)
        try:
            events = _front(text, document)
        except _Broken:
            break
        if events is not None:
            if len(events) > MANY_ENTRIES and length - len(text) < len(events) * LEAST_ENTRY_BYTES:
                # A list of another program: each entry takes as long to read as an event, and none is one.
                document.damage = f"has entries of less than {LEAST_ENTRY_BYTES} bytes, too short for events"
                return
            yield events
        # If no end was found, retry with twice the text, so that the work stays linear.
        wanted = 0 if events is not None else 2 * len(text)
        if wanted > _MOST_BYTES:
            document.damage = f"has no end of an event within {_MOST_BYTES >> 20} MiB"
            break
    yield from _end(head, bytes(text[1:]), document)


def _head(source: Iterator[bytes], path: Path, document: Document) -> tuple[bytes, bytes]:
    """Returns the text before the first event, with the list's bracket, and the text read after it."""
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
                f"{path} has no traceEvents in its first {len(text)} bytes; give a trace from torch.profiler."
            )
    if (found := _find_list(text, document)) is not None:
        return found
    raise _refusal(text, path, document)


def _find_list(text: bytes, document: Document) -> tuple[bytes, bytes] | None:
    text = text.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return text[:1], text[1:]
    for match in itertools.islice(_LIST.finditer(text), _MOST_LISTS):
        for head in as_written_and_mended(text[: match.end()]):
            if (found := parsed(_Document, head + b"]}")) is not None:
                _learn(found, document)
                return head, text[match.end() :]
    return None


def _refusal(text: bytes, path: Path, document: Document) -> UserError:
    if not text.strip():
        return UserError(f"{path} {document.damage or 'is empty'}; {RECORD_AGAIN}.")
    try:
        msgspec.json.decode(text, type=_Document)
    except msgspec.ValidationError as error:
        return UserError(f"{path} is JSON but not a profiler trace ({error}); give a trace from torch.profiler.")
    except NO_JSON:
        return UserError(f"{path} {document.damage or damage_of(text)}; {RECORD_AGAIN}.")
    return UserError(
        f"{path} is JSON but not a profiler trace (traceEvents is not a list); give a trace from torch.profiler."
    )


def _front(text: bytearray, document: Document) -> list[Any] | None:
    """Returns the events before the last place between two events in `text`, a list that has begun, and removes them.
    None: there is no such place yet. Raises _Broken if more text cannot help."""
    for ends_of in (_guessed_ends, _counted_ends):
        if (ends := ends_of(text)) and (found := _before(text, ends, document)):
            end, events = found
            comma = _COMMA.match(text, end)
            assert comma
            del text[1 : comma.end()]
            return events
    for listed in as_written_and_mended(bytes(text)):
        error = error_of(listed)
        if error is None or is_over(error) or position_of(error, len(listed)) >= len(listed):
            return None
    raise _Broken


def _guessed_ends(text: bytearray) -> list[int]:
    found = deque(_BETWEEN_EVENTS.finditer(text, max(0, len(text) - _TAIL_BYTES)), _TRIES)
    return [match.start() + 1 for match in found]


def _counted_ends(text: bytearray) -> list[int]:
    return [end for end in _ends_of_entries(text) if _COMMA.match(text, end)][-1:]


def _ends_of_entries(text: bytes | bytearray) -> list[int]:
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


def _before(
    text: bytearray, ends: list[int], document: Document, is_mended: bool = False
) -> tuple[int, list[Any]] | None:
    """Returns the last of the ends at which the list parses, mended if need be, and the events before it."""
    for end in reversed(ends):
        # Writing a bracket over the comma saves copying the text.
        written, text[end] = text[end], ord("]")
        try:
            with memoryview(text)[: end + 1] as listed:
                return end, decoded(listed, document)
        except NO_JSON as error:
            wrong_before, over = position_of(error, len(text)) < ends[0], is_over(error)
        finally:
            text[end] = written
        if over:
            return None
        if wrong_before and is_mended:
            raise _Broken
        if wrong_before:
            parts = [mended(bytes(text[start:end])) for start, end in itertools.pairwise([0, *ends])]
            whole = bytearray().join([*parts, text[ends[-1] :]])
            found = _before(whole, list(itertools.accumulate(map(len, parts))), document, is_mended=True)
            if found:
                text[:], document.repaired = whole, True
            return found
    return None


def _end(head: bytes, rest: bytes, document: Document) -> Iterator[list[Any]]:
    """Yields the last events, and fills in `document` from the text after them."""
    for number, text in enumerate(as_written_and_mended(head + rest)):
        if head == b"[":
            listed = text
        else:
            found = parsed(_Document, text)
            if found is None:
                continue
            _learn(found, document)
            listed = bytes(found.trace_events)
        if (events := _attempted(listed, document)) is not None:
            document.repaired |= number > 0
            yield events
            return
    document.damage = document.damage or damage_of(head + rest)
    yield from _saved(rest, document)


def _saved(rest: bytes, document: Document) -> Iterator[list[Any]]:
    readable = [_readable(text, document.kind) for text in as_written_and_mended(b"[" + rest)]
    count, listed = max(readable, key=lambda found: found[0])
    document.repaired |= count > readable[0][0]
    yield decoded(listed, document)


def _readable(text: bytes, kind: EventKind) -> tuple[int, bytes]:
    """Returns the number of readable objects from the start of a list, and the list of these alone."""
    ends = _ends_of_entries(text)

    def listed(count: int) -> bytes:
        return (text[: ends[count - 1]] if count else b"[") + b"]"

    def is_too_much(count: int) -> bool:
        return _attempted(listed(count), Document(kind=kind)) is None

    count = bisect_left(range(1, len(ends) + 1), True, key=is_too_much)
    return count, listed(count)


def _attempted(listed: bytes, document: Document) -> list[Any] | None:
    try:
        return decoded(listed, document)
    except NO_JSON:
        return None


def _learn(found: _Document, document: Document) -> None:
    document.distributed = parsed(DistributedInfo, found.distributed_info) or document.distributed
    document.base_time_ns = parsed(int, found.base_time_nanoseconds) or document.base_time_ns
    devices = parsed(list[_Device], found.device_properties) or ()
    document.devices = list(dict.fromkeys(device.name for device in devices)) or document.devices


def decoded(listed: bytes | memoryview, document: Document) -> list[Any]:
    """Returns the events of a JSON list; other entries are left out and counted."""
    several, *single = decoders(document.kind)
    with suppress(msgspec.ValidationError):
        return several.decode(listed)
    events: list[Any] = []
    left_out: list[str] = []
    for entry in _raw_list.decode(listed):
        for one in single:
            try:
                # Of others too it is said how many are malformed.
                if not isinstance(found := one.decode(entry), OtherEvent):
                    events.append(found)
                    break
            except msgspec.ValidationError as error:
                why = str(error)
        else:
            left_out.append(why)
    for why in left_out:
        document.leave_out(why)
    return events


def parsed(kind: type[_T], text: bytes) -> _T | None:
    """Returns the decoded text; None if it is not what it should be."""
    try:
        return msgspec.json.decode(text, type=kind)
    except NO_JSON:
        return None
