"""Understands NVTX ranges: PyTorch's operators, steps, and what NCCL records of its calls.

PyTorch's `emit_nvtx` writes `aten::mm, seq = 12, op_id = 34`. NCCL has a range for each call of its API, with a binary
payload (NCCL's src/include/nvtx_payload_schemas.h), which Nsight Systems exports with the schemas of all payloads.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

from overlap_sweep.trace.columns import MOST_ELEMENTS, Detail

BYTES = "bytes"
"""In place of a type of elements, where only the size in bytes is known."""

BACKWARD = "autograd::engine::evaluate_function: "

_EMITTED = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = ")
_OPERATOR = re.compile(r"(?!FSDP::)\w+::\S|record_param_comms$")
_STEP = re.compile(
    r"(?:\[[^\]]*\])*((?:profiler|train(?:ing)?|global|run_training|cuda)?[ _-]?(?:step|iteration|iter|batch))"
    r"[ _:#=-]*(\d{0,18})$",
    re.IGNORECASE,
)
_NCCL_CALL = re.compile(r"nccl[A-Z]\w*$|nccl:")
_MOVING = frozenset(
    f"nccl{name}"
    for name in (
        *("AllGather", "AllReduce", "AlltoAll", "Bcast", "Broadcast", "Gather"),
        *("Recv", "Reduce", "ReduceScatter", "Scatter", "Send"),
    )
)
_TYPE_IN_KERNEL = re.compile(r"_(bf|f|i|u)(8|16|32|64)(?:e\dm\d)?_")
_TYPES = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint"}

_HEADER_BYTES = 32
_SCHEMA = struct.Struct("<8xI")
"""The schema's number is after the domain's, which the event has, too; then come sizes."""
_FORMATS = {5: "<i", 18: "<Q", 22: "<Q"}
"""By NVTX's types of entries that NCCL uses: int, uint64_t and size_t."""

_COMMUNICATOR, _SIZE, _RANKS, _RANK = "NCCL communicator ID", "Message size [bytes]", "No. of ranks", "Rank"

Schemas = Mapping[tuple[int, int], Mapping[str, tuple[int, str]]]
"""Offset and format of each entry by name, by domain and schema."""


class Named(NamedTuple):
    """What a range is, in Kineto's words."""

    category: str
    """cpu_op or user_annotation."""
    name: str
    is_numbered: bool
    """Whether autograd numbered it."""


class StepRange(NamedTuple):
    """A range that is called like a step."""

    thread: int
    start_ns: int
    end_ns: int
    word: str
    number: int | None


class Communicator(NamedTuple):
    rank: int
    ranks: int


class NcclRange(NamedTuple):
    """A call of NCCL, or PyTorch's range around calls, such as `nccl:all_reduce`."""

    thread: int
    start_ns: int
    end_ns: int
    name: str
    payload: dict[str, int]
    """By the names of the entries; empty if it was not exported."""


def named(text: str) -> Named:
    """Returns what a range's text says, without the numbers that emit_nvtx appends."""
    name = _EMITTED.split(text, maxsplit=1)[0]
    return _named(name, is_numbered=", seq = " in text[len(name) :])


@cache
def _named(name: str, *, is_numbered: bool) -> Named:
    is_operator = is_numbered or _OPERATOR.match(name) is not None
    return Named("cpu_op" if is_operator else "user_annotation", name, is_numbered)


@cache
def is_nccl(name: str) -> bool:
    """Returns whether the range is a call of NCCL, or PyTorch's around some."""
    return _NCCL_CALL.match(name) is not None


@cache
def step_of(name: str) -> tuple[str, int | None] | None:
    """Returns the word and number of a range that is called like a step, such as `iteration 12`; None for others."""
    found = _STEP.match(name)
    return (found[1].lower(), int(found[2]) if found[2] else None) if found else None


def step_numbers(steps: Mapping[int, StepRange]) -> dict[int, int]:
    """Returns the numbers of the program's steps, by their keys. They are PyTorch's own, else those of the word and
    thread that take most time, and are counted in their order unless each has a number of its own."""
    alike: dict[tuple[str, int], list[int]] = defaultdict(list)
    for key, step in steps.items():
        alike[step.word, step.thread].append(key)

    def worth(keys: list[int]) -> tuple[bool, int]:
        own = [steps[key] for key in keys]
        return own[0].word == "profilerstep", sum(step.end_ns - step.start_ns for step in own)

    if not alike:
        return {}
    most = max(alike.values(), key=worth)
    found = sorted(most, key=lambda key: steps[key].start_ns)
    numbers = [number for key in found if (number := steps[key].number) is not None]
    return dict(zip(found, numbers if len(set(numbers)) == len(found) else range(len(found)), strict=True))


def schemas_of(entries: Iterable[tuple[int, int, str, int, int]]) -> Schemas:
    """Returns the schemas. `entries`: domain, schema, name, type and offset of each entry."""
    found: dict[tuple[int, int], dict[str, tuple[int, str]]] = defaultdict(dict)
    for domain, schema, name, kind, offset in entries:
        if kind in _FORMATS:
            found[domain, schema][name] = offset, _FORMATS[kind]
    return found


def payload_of(blob: bytes | None, domain: int, schemas: Schemas) -> dict[str, int]:
    """Returns the numbers of an event's payload by the names of their entries; empty if there is none or it is cut."""
    if blob is None or len(blob) < _HEADER_BYTES:
        return {}
    entries = schemas.get((domain, *_SCHEMA.unpack_from(blob)), {})
    try:
        return {name: struct.unpack_from(kind, blob, _HEADER_BYTES + at)[0] for name, (at, kind) in entries.items()}
    except struct.error:
        return {}


def communicators_of(ranges: Iterable[NcclRange]) -> dict[str, Communicator]:
    """Returns the communicators that were made, split or ended while recording, by name."""
    return {
        group_name(one.payload): Communicator(one.payload[_RANK], one.payload[_RANKS])
        for one in ranges
        if {_COMMUNICATOR, _RANKS, _RANK} <= one.payload.keys()
    }


def group_name(payload: Mapping[str, int]) -> str:
    """Returns a name of the communicator that is the same on all of its ranks."""
    return f"{payload[_COMMUNICATOR]:016x}"


def collectives_of(
    ranges: Sequence[NcclRange], communicators: Mapping[str, Communicator]
) -> dict[int, list[tuple[int, int, Detail]]]:
    """Returns start, end and detail of the ranges in which NCCL launches kernels, by thread and time. Calls of a group
    are launched together when it ends. Where PyTorch called NCCL, the collective is the one that it was asked for."""
    found: dict[int, list[tuple[int, int, Detail]]] = {}
    ordered = sorted(ranges, key=lambda one: (one.thread, one.start_ns, -one.end_ns))
    for thread, own in groupby(ordered, key=lambda one: one.thread):
        found[thread] = list(_of_thread(own, communicators))
    return found


def _of_thread(
    ranges: Iterable[NcclRange], communicators: Mapping[str, Communicator]
) -> Iterator[tuple[int, int, Detail]]:
    asked, asked_until_ns, depth = "", 0, 0
    grouped: list[Detail] = []
    for one in ranges:
        if one.name.startswith("nccl:"):
            asked, asked_until_ns = one.name.removeprefix("nccl:"), one.end_ns
            continue
        if one.name == "ncclGroupStart":
            grouped = grouped if depth else []
            depth += 1
            continue
        if one.name == "ncclGroupEnd":
            depth = max(depth - 1, 0)
            detail = _together(grouped) if not depth else None
        else:
            detail = _detail(one, communicators)
            if detail and depth:
                grouped.append(detail)
                continue
        if detail:
            is_asked = one.start_ns < asked_until_ns and asked != "coalesced"
            yield one.start_ns, one.end_ns, detail._replace(collective=asked) if is_asked else detail


def _detail(one: NcclRange, communicators: Mapping[str, Communicator]) -> Detail | None:
    """Returns what a call moves, None for one that moves nothing. NCCL records the size of one rank's part."""
    if one.name not in _MOVING:
        return None
    size, name = one.payload.get(_SIZE), one.name.removeprefix("nccl")
    if size is None or not 0 <= size < MOST_ELEMENTS or _COMMUNICATOR not in one.payload:
        return Detail(collective=name)
    group = group_name(one.payload)
    communicator = communicators.get(group)
    whole = None if communicator is None else size * communicator.ranks
    sent, received = {
        "AllGather": (size, whole),
        "Gather": (size, None),
        "ReduceScatter": (whole, size),
        "Scatter": (None, size),
        "AlltoAll": (whole, whole),
        "Send": (size, None),
        "Recv": (None, size),
    }.get(name, (size, size))
    ranks = communicator.ranks if communicator else None
    return Detail(collective=name, group=group, group_size=ranks, sent=sent, received=received, dtype=BYTES)


def _together(grouped: Sequence[Detail]) -> Detail | None:
    """Returns what the calls of a group move together; None if it has none."""
    kinds = {one.collective for one in grouped}
    if not kinds:
        return None
    sent, received = (
        [size for one in grouped if (size := getattr(one, end)) is not None] for end in ("sent", "received")
    )
    return grouped[0]._replace(
        collective=kinds.pop() if len(kinds) == 1 else "send_recv",
        group=grouped[0].group if len({one.group for one in grouped}) == 1 else None,
        sent=sum(sent) if sent else None,
        received=sum(received) if received else None,
    )


def with_type(detail: Detail, kernel: str) -> Detail:
    """Returns the detail in elements of the type that the kernel's name has, which is that of reductions."""
    found = _TYPE_IN_KERNEL.search(kernel)
    if not found or detail.dtype != BYTES:
        return detail
    size = int(found[2]) // 8
    sent, received = (None if count is None else count // size for count in (detail.sent, detail.received))
    return detail._replace(dtype=f"{_TYPES[found[1]]}{found[2]}", sent=sent, received=received)
