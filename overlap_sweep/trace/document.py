"""What a trace's JSON is read as."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache

import msgspec

Number = int | float | str | None


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


_raw_list = msgspec.json.Decoder(list[msgspec.Raw])


def decoded(listed: bytes | memoryview, document: Document) -> list[Event]:
    """The events of a JSON list; entries that are none are left out and counted."""
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
