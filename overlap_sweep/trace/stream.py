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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from isal import isal_zlib

from overlap_sweep.errors import UserError
from overlap_sweep.trace.document import (
    NO_JSON,
    DistributedInfo,
    Document,
    Event,
    as_written_and_mended,
    damage_of,
    decoded,
    error_of,
    is_over,
    mended,
    position_of,
)

BLOCK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"

MANY_MEMBERS = 10_000
LEAST_MEMBER_BYTES = 1024
"""Of text, on average, where there are so many. bgzip, which makes the smallest that are in use, puts 64 KiB in each;
millions of empty ones would take minutes."""

RECORD_AGAIN = "copy it again or record the trace again"

Report = Callable[[str], None]
"""Called with what is wrong, such as `is cut short`."""

_T = TypeVar("_T")

_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')

_BETWEEN_EVENTS = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|s|bp|cname)")')

_COMMA = re.compile(rb"\s*,\s*")

_BRACKET_OR_STRING = re.compile(rb'[{}\[\]]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

_MOST_LISTS = 8
"""More lists of that name than that are not looked at for the events."""

_TRIES = 8

_TAIL_BYTES = 1 << 13

MANY_ENTRIES = 10_000

LEAST_ENTRY_BYTES = 24
"""On average, in a piece that has so many. The shortest event that says what ran when, without any blank, has 60."""

_MOST_BYTES = 16 << 20
"""No piece may be longer. One that is, is no list of events any more."""


def blocks(path: Path, report_damage: Report) -> Iterator[bytes]:
    """Yields blocks of at most BLOCK_BYTES or little more, none empty. UserError when the file cannot be read at all.

    What a damaged compressed file holds up to the damage is given; then the damage is reported and the blocks end.
    """
    try:
        with path.open("rb") as file:
            yield from (
                _gathered(_inflated(file, path, report_damage))
                if is_gzip(path)
                else iter(lambda: file.read(BLOCK_BYTES), b"")
            )
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a trace (.json or .json.gz) of torch.profiler.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); {RECORD_AGAIN}.") from None


def is_gzip(path: Path) -> bool:
    """Returns whether it is gzip by its content: files get renamed, and some tools gzip without saying so."""
    with path.open("rb") as file:
        return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC


def _inflated(file: BinaryIO, path: Path, report_damage: Report) -> Iterator[bytes]:
    """A gzip file may have several members; what follows the last one is no part of it."""
    pending, members, text_bytes = memoryview(b""), 0, 0
    while pending or (pending := memoryview(file.read(BLOCK_BYTES))):
        if bytes(pending[: len(GZIP_MAGIC)]) != GZIP_MAGIC[: len(pending)]:
            return
        members += 1
        if members > MANY_MEMBERS and text_bytes < members * LEAST_MEMBER_BYTES:
            said = f"more than {MANY_MEMBERS:,} gzip members of less than {LEAST_MEMBER_BYTES} bytes each"
            raise UserError(f"{path} is made of {said}; give what `gzip -dc` makes of it.")
        # 31: gzip's head and checksum around deflate.
        inflate = isal_zlib.decompressobj(wbits=31)
        # What follows a member is copied, so little is looked at before it is known to be a long one.
        window = LEAST_MEMBER_BYTES
        while not inflate.eof:
            pending = pending or memoryview(file.read(BLOCK_BYTES))
            if not pending:
                report_damage("is cut short")
                return
            given = pending[:window]
            try:
                block = inflate.decompress(given, BLOCK_BYTES)
            except isal_zlib.error as error:  # type: ignore[misc]
                report_damage(f"is damaged ({error})")
                return
            left = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            pending = pending[len(given) - len(left) :]
            window = min(2 * window, BLOCK_BYTES)
            text_bytes += len(block)
            if block:
                yield block


def _gathered(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields small ones together: each that is yielded costs its reader as much as its parsing."""
    held = bytearray()
    for block in blocks:
        if not held and len(block) > BLOCK_BYTES // 2:
            yield block
            continue
        held += block
        if len(held) > BLOCK_BYTES // 2:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


class _Broken(Exception):
    """The text that was read so far is no JSON, whatever may follow."""


class _Document(msgspec.Struct, rename="camel"):
    trace_events: msgspec.Raw
    distributed_info: msgspec.Raw = msgspec.Raw(b"{}")
    base_time_nanoseconds: msgspec.Raw = msgspec.Raw(b"0")


def pieces(path: Path, document: Document) -> Iterator[list[Event]]:
    """Yields all events of a trace, and into `document` what else it says. UserError when it is no trace at all."""

    def report_damage(damage: str) -> None:
        document.damage = damage

    source = blocks(path, report_damage)
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
                # Another program's list: each entry takes as long as an event, and nothing is to be found in them.
                document.damage = f"holds entries of less than {LEAST_ENTRY_BYTES} bytes, too short for events"
                return
            yield events
        # Where no end could be found, twice as much text may hold one; so the work stays linear.
        wanted = 0 if events is not None else 2 * len(text)
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
        for head in as_written_and_mended(text[: match.end()]):
            if (found := _parsed(_Document, head + b"]}")) is not None:
                _learn(found, document)
                return head, text[match.end() :]
    return None


def _refusal(text: bytes, path: Path, document: Document) -> UserError:
    """Returns why the text is no trace: nothing in it is a list of events."""
    if not text.strip():
        return UserError(f"{path} {document.damage or 'is empty'}; {RECORD_AGAIN}.")
    try:
        msgspec.json.decode(text, type=_Document)
    except msgspec.ValidationError as error:
        return UserError(f"{path} is JSON but no profiler trace ({error}); give one of torch.profiler's.")
    except NO_JSON:
        return UserError(f"{path} {document.damage or damage_of(text)}; {RECORD_AGAIN}.")
    return UserError(f"{path} is JSON but no profiler trace (traceEvents is no list); give one of torch.profiler's.")


def _front(text: bytearray, document: Document) -> list[Event] | None:
    """Takes the events up to the last place that lies between two out of `text`, a list that has begun. None: no place
    does. _Broken: nor will one when there is more text."""
    for places in (_guessed_places, _counted_places):
        between = places(text)
        if between and (found := _before(text, [end for end, _ in between], document)):
            number, events = found
            del text[1 : between[number][1]]
            return events
    if _is_hopeless(text):
        raise _Broken
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


def _before(text: bytearray, ends: list[int], document: Document) -> tuple[int, list[Event]] | None:
    """Returns the last one of the ends at which the list can end, and the events before it."""
    for number in reversed(range(len(ends))):
        # A bracket in the comma's place saves copying the text.
        written, text[ends[number]] = text[ends[number]], ord("]")
        try:
            with memoryview(text)[: ends[number] + 1] as listed:
                return number, decoded(listed, document)
        except NO_JSON as error:
            wrong_before, over = position_of(error, len(text)) < ends[0], is_over(error)
        finally:
            text[ends[number]] = written
        if over:
            return None
        if wrong_before:
            return _before_mended(text, ends, document)
    return None


def _before_mended(text: bytearray, ends: list[int], document: Document) -> tuple[int, list[Event]] | None:
    parts = [mended(bytes(text[start:end])) for start, end in itertools.pairwise([0, *ends])]
    for number in reversed(range(len(parts))):
        listed = b"".join(parts[: number + 1]) + b"]"
        try:
            events = decoded(listed, document)
        except NO_JSON as error:
            if is_over(error):
                return None
            if position_of(error, len(listed)) < len(parts[0]):
                raise _Broken from None
        else:
            document.repaired = True
            return number, events
    return None


def _is_hopeless(text: bytearray) -> bool:
    """Returns whether no text that begins like this one can be a list."""
    for listed in as_written_and_mended(bytes(text)):
        error = error_of(listed)
        if error is None or is_over(error) or position_of(error, len(listed)) >= len(listed):
            return False
    return True


def _end(head: bytes, rest: bytes, document: Document) -> Iterator[list[Event]]:
    """Yields the last events, and what the document says after them."""
    for number, text in enumerate(as_written_and_mended(head + rest)):
        if head == b"[":
            listed = text
        else:
            found = _parsed(_Document, text)
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


def _saved(rest: bytes, document: Document) -> Iterator[list[Event]]:
    """Yields what can still be read of a text that breaks off or breaks down somewhere."""
    readable = [_readable(text, document.kind) for text in as_written_and_mended(b"[" + rest)]
    count, listed = max(readable, key=lambda found: found[0])
    document.repaired |= count > readable[0][0]
    yield decoded(listed, document)


def _readable(text: bytes, kind: type[Event]) -> tuple[int, bytes]:
    """Returns how many of the objects of a list that has begun can be read from its start, and they alone as a list."""
    ends = _ends_of_entries(text)

    def listed(count: int) -> bytes:
        return (text[: ends[count - 1]] if count else b"[") + b"]"

    def is_too_much(count: int) -> bool:
        return _attempted(listed(count), Document(kind=kind)) is None

    count = bisect_left(range(1, len(ends) + 1), True, key=is_too_much)
    return count, listed(count)


def _attempted(listed: bytes, document: Document) -> list[Event] | None:
    try:
        return decoded(listed, document)
    except NO_JSON:
        return None


def _parsed(kind: type[_T], text: bytes) -> _T | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except NO_JSON:
        return None


def _learn(found: _Document, document: Document) -> None:
    document.distributed = _parsed(DistributedInfo, found.distributed_info) or document.distributed
    document.base_time_ns = _parsed(int, found.base_time_nanoseconds) or document.base_time_ns
