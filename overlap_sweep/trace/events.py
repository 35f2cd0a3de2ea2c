"""Events as they are decoded: in their usual form, which is quick to read, or in any form."""

from decimal import Decimal
from functools import cache, reduce
from operator import or_
from typing import Any, ClassVar

import msgspec

from overlap_sweep.trace.columns import NO_CORRELATION

Number = int | float | str | None


class UsualArgs(msgspec.Struct, gc=False, frozen=True):
    """Arguments as Kineto writes them, in its order, which is quicker to read."""

    external_id: int = msgspec.field(name="External id", default=NO_CORRELATION)
    sequence_number: int | None = msgspec.field(name="Sequence number", default=None)
    forward_thread: int | None = msgspec.field(name="Fwd thread id", default=None)
    correlation: int = NO_CORRELATION
    grid: tuple[int, int, int] | str | None = None
    block: tuple[int, int, int] | str | None = None
    bytes: int | None = None
    collective: str | None = msgspec.field(name="Collective name", default=None)
    received: int | None = msgspec.field(name="Out msg nelems", default=None)
    sent: int | None = msgspec.field(name="In msg nelems", default=None)
    group_size: int | None = msgspec.field(name="Group size", default=None)
    dtype: str | None = None
    group: str | None = msgspec.field(name="Process Group Name", default=None)
    group_about: str | None = msgspec.field(name="Process Group Description", default=None)
    group_ranks: str | None = msgspec.field(name="Process Group Ranks", default=None)
    source: int | None = msgspec.field(name="Src Rank", default=None)
    destination: int | None = msgspec.field(name="Dst Rank", default=None)
    input_dims: object = msgspec.field(name="Input Dims", default=None)
    input_type: object = msgspec.field(name="Input type", default=None)


NUMBERS = ("correlation", "sequence_number", "forward_thread")
"""Arguments that an event is malformed without, if they are neither numbers nor strings. The others describe it."""

Args = msgspec.defstruct(
    "Args",
    [
        (own.name, Number if own.name in NUMBERS else object, msgspec.field(name=own.encode_name, default=None))
        for own in msgspec.structs.fields(UsualArgs)
    ],
    gc=False,
)


class Event(msgspec.Struct, gc=False):
    """An event in any form."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    ts: Number = None
    dur: Number = 0
    pid: Number = None
    tid: Number = None
    args: Args | None = None  # type: ignore[valid-type]


class ExactEvent(Event, gc=False):
    """An event with decimal times, for times that a float would round. Several times slower to read."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = Decimal(0)  # type: ignore[assignment]


class UsualEvent(msgspec.Struct, gc=False, kw_only=True, tag_field="ph", tag="X"):
    """A complete event as Kineto writes it."""

    ph: ClassVar[str] = "X"
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | int
    dur: float | int = 0
    args: UsualArgs = UsualArgs()


class ExactUsualEvent(UsualEvent, gc=False, kw_only=True, tag_field="ph", tag="X"):
    ts: Decimal  # type: ignore[assignment]
    dur: Decimal = Decimal(0)  # type: ignore[assignment]


class OtherEvent(msgspec.Struct, gc=False):
    """An event that is not complete, of which nothing is read."""

    ph: ClassVar[str] = ""


_OTHER_PHASES = "BEbnestfiICPNODMVvRcSTpF(),"
"""All that the format of trace events has, but X."""

EventKind = type[Event] | type[UsualEvent]


@cache
def decoders(kind: EventKind) -> list[msgspec.json.Decoder[Any]]:
    """Returns the decoder of a list of events, and those of a single one in the order in which they are tried: what is
    not in the usual form becomes an Event."""
    if issubclass(kind, Event):
        return [msgspec.json.Decoder(form) for form in (list[kind], kind)]  # type: ignore[valid-type]
    others = [
        msgspec.defstruct(f"Other{number}", [], bases=(OtherEvent,), gc=False, tag_field="ph", tag=phase)
        for number, phase in enumerate(_OTHER_PHASES)
    ]
    usual: Any = reduce(or_, others, kind)
    any_form = ExactEvent if kind is ExactUsualEvent else Event
    return [msgspec.json.Decoder(form) for form in (list[usual], usual, any_form)]
