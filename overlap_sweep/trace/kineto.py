"""Reads the traces that torch.profiler (Kineto) exports into numpy columns.

Only complete events (`ph` X) of devices, launches and CPU operators are kept. Times become integer nanoseconds at once:
Kineto writes microseconds with three decimals, and sums of floats would not be exact.
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from overlap_sweep.errors import UserError
from overlap_sweep.trace import MOST_RANKS
from overlap_sweep.trace.columns import (
    MOST_ELEMENTS,
    NO_CORRELATION,
    NO_DETAIL,
    Detail,
    Events,
    Numbering,
    Trace,
    check_number,
    concatenated,
)
from overlap_sweep.trace.disk import RECORD_AGAIN
from overlap_sweep.trace.events import Event, ExactUsualEvent, Number, UsualArgs, UsualEvent
from overlap_sweep.trace.nsight import read_nsight
from overlap_sweep.trace.nsight_files import file_of, is_recording
from overlap_sweep.trace.rocprofv3 import is_rocprofv3, read_rocprofv3
from overlap_sweep.trace.stream import Document, pieces

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
HOST_CATEGORIES = frozenset({"cpu_op", "user_annotation"})
MODULE_CATEGORY, MODULE = "python_function", "nn.Module: "
"""Category and beginning of the name of the calls of modules, in traces recorded with modules or stacks."""
LONG_FUNCTION_US = 1000
"""Shortest other function that is kept of a trace with stacks: it says where a host was that paused. Most of such a
file are shorter ones."""
LAUNCH_SUFFIXES = ("_runtime", "_driver")
"""cuda_runtime, cuda_driver, and the like of other devices. HIP's calls are in cuda_runtime."""
OLD_CATEGORIES = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
}
"""Names of the categories before PyTorch 1.12."""

_MOST_US = 2.0**51
"""71 years. Integer nanoseconds can hold a time of this size plus a duration, and differences of two."""

EXACT_UNTIL_US = 2.0**43
"""Up to here (100 days) a float holds microseconds with three decimals to the nanosecond."""

_WHOLE = ("external_id", "group_size", "sent", "received", "bytes", "source", "destination")
_TEXTS = ("collective", "group", "group_about", "group_ranks", "dtype", "grid", "block")

_ON_HOST = ("c10d::", "nccl:", "gloo:", "mpi:", "ucc:")
"""Beginnings of the names of operators, annotations and spans whose dimensions are kept."""

_Ints = NDArray[np.int64]
_Part = tuple[Events, NDArray[np.bool_]]
"""Events, and which of them autograd numbered as part of a forward computation."""

_NEITHER, _DEVICE, _LAUNCH, _HOST, _MODULE, _FUNCTION = range(6)


def _group(written: str | None) -> int:
    """Returns the group of columns that an event belongs to, by its category; functions are all _MODULE."""
    category = _category(written)
    if category in HOST_CATEGORIES:
        return _HOST
    if category in DEVICE_CATEGORIES:
        return _DEVICE
    if category == MODULE_CATEGORY:
        return _MODULE
    return _LAUNCH if category.endswith(LAUNCH_SUFFIXES) else _NEITHER


def _category(written: str | None) -> str:
    return OLD_CATEGORIES.get(written or "", written or "")


class _NeedExactTimes(Exception):
    """Raised where a float would round the times of this trace."""


def read_trace(path: Path | str) -> Trace:
    """Reads a trace of torch.profiler, `.json` or gzipped, of any size, or one of rocprofv3 or Nsight Systems.

    UserError when it is missing, is not a trace, or has no events. A damaged trace of torch.profiler is read up to the
    damage, with a warning.
    """
    path = Path(path)
    if is_recording(file_of(path)):
        return read_nsight(path)
    if is_rocprofv3(path):
        return read_rocprofv3(path)
    try:
        return _read(path, Document(kind=UsualEvent))
    except _NeedExactTimes:
        return _read(path, Document(kind=ExactUsualEvent))


def _read(path: Path, document: Document) -> Trace:
    group_of, details = cache(_group), _Details()
    labels, lanes = Numbering[tuple[str | None, str | None]](), Numbering[tuple[Number, Number]]()
    # Of each different pair of label and lane, because looking up both at once is faster.
    pairs = Numbering[tuple[str | None, str | None, Number, Number]]()
    label_of, lane_of, group_of_pair = array("i"), array("i"), array("b")
    parts: dict[int, list[_Part]] = {group: [] for group in (_DEVICE, _LAUNCH, _HOST, _MODULE, _FUNCTION)}
    for events in pieces(path, document):
        # Traces with stacks have more names of functions than any other names.
        kept = [
            event
            for event in events
            if event.ph == "X"
            and (kind := group_of(event.cat))
            and (kind != _MODULE or (event.name or "").startswith(MODULE) or _is_long(event))
        ]
        if {*map(type, kept)} - {document.kind}:
            kept = [_as_usual(event) if isinstance(event, Event) else event for event in kept]
        try:
            numbers = _numbers(kept, document)
        except (TypeError, ValueError, ArithmeticError):
            kept = [event for event in kept if _has_numbers(event, document)]
            numbers = _numbers(kept, document)
        detail = np.zeros(len(kept), np.int32)
        # Most events say none of these: to look here is quicker than to call a function for each.
        described = [
            place
            for place, event in enumerate(kept)
            if (args := event.args).grid is not None
            or args.bytes is not None
            or args.collective is not None
            or args.input_dims is not None
        ]
        detail[described] = [details[_said(kept[place])] for place in described]
        pair = np.fromiter([pairs[event.cat, event.name, event.pid, event.tid] for event in kept], np.int32, len(kept))
        for category, name, process, thread in itertools.islice(pairs, len(label_of), None):
            label_of.append(labels[category, name])
            lane_of.append(lanes[process, thread])
            kind = group_of(category)
            group_of_pair.append(_FUNCTION if kind == _MODULE and not (name or "").startswith(MODULE) else kind)
        check_number(path, labels, "names of events", "fewer steps, or annotations whose names do not change")
        check_number(path, lanes, "threads and streams", "fewer steps")
        check_number(path, details.numbers, "sizes of kernels and copies", "fewer steps")
        label, lane, group = (np.array(column)[pair] for column in (label_of, lane_of, group_of_pair))
        start_ns, end_ns, correlation, external, forward = numbers
        columns = Events(label, lane, start_ns, end_ns, correlation, external, detail)
        for number, own in parts.items():
            chosen = np.flatnonzero(group == number)
            own.append((columns[chosen], forward[chosen]))
    if not any(len(columns) for number in (_DEVICE, _HOST) for columns, _ in parts[number]):
        raise _nothing_in(path, document)
    # The same process and thread may be written as numbers and as strings.
    spelled = Numbering[tuple[str, str]]()
    same = np.array([spelled[str(process), str(thread)] for process, thread in lanes], np.int32)
    events_by_group = {group: _joined(parts.pop(group), same) for group in [*parts]}
    info = document.distributed
    return Trace(
        rank=_number(info.rank),
        world_size=_number(info.world_size),
        base_time_ns=document.base_time_ns,
        labels=[(_category(category), name or "") for category, name in labels],
        lanes=list(spelled),
        details=list(details.numbers),
        groups={group.name: group for group in info.groups},
        device=events_by_group[_DEVICE][0],
        launches=events_by_group[_LAUNCH][0],
        host=events_by_group[_HOST][0],
        forward=events_by_group[_HOST][1],
        modules=events_by_group[_MODULE][0],
        functions=events_by_group[_FUNCTION][0],
        warnings=_warnings(path, document),
        device_name=document.devices[0] if len(document.devices) == 1 else "",
        nccl_version=info.nccl_version or "",
    )


def _is_long(event: Event | UsualEvent) -> bool:
    return isinstance(event.dur, int | float | Decimal) and event.dur >= LONG_FUNCTION_US


def _as_usual(event: Event) -> UsualEvent:
    """Returns the event in the usual form, its times and correlation as they are written; other values that are not
    what they should be are left out."""
    said = {name: getattr(event.args, name, None) for name in UsualArgs.__struct_fields__}
    said |= {name: _text(said[name]) for name in _TEXTS} | {name: _whole(said[name]) for name in _WHOLE}
    joins = {name: NO_CORRELATION if said[name] is None else said[name] for name in ("correlation", "external_id")}
    own = {name: getattr(event, name) for name in UsualEvent.__struct_fields__}
    return UsualEvent(**own | {"args": UsualArgs(**said | joins)})


def _numbers(events: Sequence[UsualEvent], document: Document) -> tuple[_Ints, _Ints, _Ints, _Ints, NDArray[np.bool_]]:
    """Returns start, end, correlation, external id, and whether autograd numbered the operator as part of a forward
    computation.

    ValueError, TypeError or ArithmeticError if an event has values that are not numbers.
    """
    count = len(events)
    if document.kind is ExactUsualEvent:
        start_ns, duration_ns = (
            np.fromiter((_exact_ns(time) for time in times), np.int64, count)
            for times in ([event.ts for event in events], [event.dur for event in events])
        )
    else:
        start_us = np.fromiter([event.ts for event in events], np.float64, count)
        beyond = count > 0 and np.abs(start_us).max() >= EXACT_UNTIL_US
        if beyond and not all(isinstance(event.ts, int) for event in events):
            raise _NeedExactTimes
        start_ns = _nanoseconds(start_us)
        duration_ns = _nanoseconds(np.fromiter([event.dur for event in events], np.float64, count))
    args = [event.args for event in events]
    # autograd numbers operators of the forward; operators that run backward also record the forward's thread.
    forward = [own.forward_thread == 0 and own.sequence_number is not None for own in args]
    return (
        start_ns,
        # A damaged file may have negative durations.
        start_ns + np.maximum(duration_ns, 0),
        np.fromiter([own.correlation for own in args], np.int64, count),
        np.fromiter([own.external_id for own in args], np.int64, count),
        np.fromiter(forward, np.bool_, count),
    )


class _Details(dict[tuple[Any, ...], int]):
    """Numbers of details, by what `_said` returns."""

    def __init__(self) -> None:
        self.numbers = Numbering[Detail]()
        self[()] = self.numbers[NO_DETAIL]

    def __missing__(self, said: tuple[Any, ...]) -> int:
        written = Detail(*said)
        self[said] = number = self.numbers[
            written._replace(
                group_size=_below(written.group_size, MOST_RANKS),
                sent=_below(written.sent, MOST_ELEMENTS),
                received=_below(written.received, MOST_ELEMENTS),
                shape=" ".join(str(_text(part)) for part in written.shape) if written.shape else None,
                bytes=_below(written.bytes, MOST_ELEMENTS),
                peer=_below(written.peer, MOST_RANKS),
            )
        ]
        return number


def _said(event: UsualEvent) -> tuple[Any, ...]:
    """Returns what the event's arguments say, in the order of Detail and as it is written; empty if it is no detail."""
    args, shape = event.args, None
    if args.grid is not None:
        shape = args.grid, args.block
    elif args.input_dims is not None and (event.name or "").startswith(_ON_HOST):
        shape = str(args.input_dims), str(args.input_type)
    elif args.collective is None and args.bytes is None:
        return ()
    group = args.group, args.group_about, args.group_ranks, args.group_size
    peer = args.source if args.destination is None else args.destination
    return args.collective, *group, args.sent, args.received, args.dtype, shape, args.bytes, peer


def _text(written: object) -> str | None:
    if written is None:
        return None
    return str(list(written) if isinstance(written, tuple) else written)


def _whole(written: object) -> int | None:
    return written if type(written) is int else None


def _below(number: int | None, beyond: int) -> int | None:
    return number if number is not None and 0 <= number < beyond else None


def _has_numbers(event: UsualEvent, document: Document) -> bool:
    """Returns whether the event has numbers, converted from strings if need be. Unusable events are counted."""
    try:
        event.dur = event.dur or 0
        if document.kind is UsualEvent:
            event.ts, event.dur = float(event.ts if event.ts is not None else "no time"), float(event.dur)
        event.args = msgspec.structs.replace(event.args, correlation=int(event.args.correlation))
        _numbers([event], document)
    except (TypeError, ValueError, ArithmeticError) as error:
        document.leave_out(f"malformed number ({error})")
        return False
    return True


def _nanoseconds(microseconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns integer nanoseconds; exact for three decimals up to EXACT_UNTIL_US and for whole numbers at any time."""
    if not np.all(np.abs(microseconds) < _MOST_US):
        raise ValueError("a time beyond 71 years")
    whole = np.floor(microseconds)
    # Multiplying as floats would lose digits of times that count from 1970.
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000).astype(np.int64)


def _exact_ns(microseconds: Any) -> int:
    if microseconds is None or not abs(microseconds) < _MOST_US:
        raise ValueError("no time within 71 years")
    return round(microseconds * 1000)


def _joined(parts: list[_Part], lane_of: NDArray[np.int32]) -> _Part:
    columns = concatenated(*(part for part, _ in parts))
    return replace(columns, lane=lane_of[columns.lane]), np.concatenate([forward for _, forward in parts])


def _number(written: int | str | None) -> int | None:
    try:
        number = int(written or 0)
    except ValueError:
        return None
    return None if written is None or not 0 <= number < MOST_RANKS else number


def _nothing_in(path: Path, document: Document) -> UserError:
    if document.damage:
        return UserError(f"{path} {document.damage}; {RECORD_AGAIN}.")
    if document.malformed:
        return UserError(f"{path} is JSON but not a profiler trace ({document.first_malformed}); {RECORD_AGAIN}.")
    return UserError(
        f"{path} has neither GPU kernels nor CPU operators; record the trace with the activities CPU and CUDA."
    )


def _warnings(path: Path, document: Document) -> list[str]:
    found = []
    if document.damage:
        found.append(f"{path} {document.damage}: only the events before that were read; {RECORD_AGAIN}.")
    if document.repaired:
        found.append(f"{path} is not valid JSON: NaN, stray characters, commas or backslashes were repaired.")
    if document.malformed:
        found.append(f"{path}: {document.malformed} malformed events were left out ({document.first_malformed}).")
    return found
