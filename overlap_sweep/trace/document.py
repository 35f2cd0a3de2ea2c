"""What is read of a trace's JSON: the fields of events, and what it holds besides them."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeVar

import msgspec

from overlap_sweep.trace.disk import NO_JSON

_T = TypeVar("_T")

Number = int | float | str | None

MOST_RANKS = 1 << 20
"""More than any run has; a trace with a higher rank is damaged."""


class Args(msgspec.Struct, gc=False):
    """object: fields that only describe an event, which a damaged one must not lose it for."""

    correlation: Number = None
    sequence_number: Number = msgspec.field(name="Sequence number", default=None)
    forward_thread: Number = msgspec.field(name="Fwd thread id", default=None)
    external_id: object = msgspec.field(name="External id", default=None)
    collective: object = msgspec.field(name="Collective name", default=None)
    group: object = msgspec.field(name="Process Group Name", default=None)
    group_about: object = msgspec.field(name="Process Group Description", default=None)
    group_ranks: object = msgspec.field(name="Process Group Ranks", default=None)
    group_size: object = msgspec.field(name="Group size", default=None)
    sent: object = msgspec.field(name="In msg nelems", default=None)
    received: object = msgspec.field(name="Out msg nelems", default=None)
    dtype: object = None
    destination: object = msgspec.field(name="Dst Rank", default=None)
    source: object = msgspec.field(name="Src Rank", default=None)
    grid: object = None
    block: object = None
    bytes: object = None
    input_dims: object = msgspec.field(name="Input Dims", default=None)
    input_type: object = msgspec.field(name="Input type", default=None)


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
    """An event with decimal times, for times that a float would round. Several times slower to read."""

    ts: Decimal | None = None  # type: ignore[assignment]
    dur: Decimal | None = Decimal(0)  # type: ignore[assignment]


class ProcessGroup(msgspec.Struct, frozen=True):
    name: str = msgspec.field(name="pg_name", default="")
    about: str = msgspec.field(name="pg_desc", default="")
    """What the program calls the group; `undefined` if it does not say."""
    backend: str = msgspec.field(name="backend_config", default="")
    size: int = msgspec.field(name="pg_size", default=0)
    ranks: tuple[int, ...] = ()


class DistributedInfo(msgspec.Struct):
    rank: int | str | None = None
    world_size: int | str | None = None
    config: msgspec.Raw = msgspec.field(name="pg_config", default=msgspec.Raw(b"[]"))

    @property
    def groups(self) -> list[ProcessGroup]:
        """Returns the process groups; those that are not written as they should be are left out."""
        groups = [parsed(ProcessGroup, entry) for entry in parsed(list[msgspec.Raw], self.config) or ()]
        return [
            group
            for group in groups
            if group and all(0 <= number < MOST_RANKS for number in (group.size, *group.ranks))
        ]


@dataclass
class Document:
    """What a trace holds besides its events; complete once all events have been read."""

    kind: type[Event] = Event
    """The type that events are decoded to."""
    distributed: DistributedInfo = field(default_factory=DistributedInfo)
    base_time_ns: int = 0
    """Origin of all times, in nanoseconds since 1970."""
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


def parsed(kind: type[_T], text: bytes) -> _T | None:
    """Returns the decoded text; None if it is not what it should be."""
    try:
        return msgspec.json.decode(text, type=kind)
    except NO_JSON:
        return None
