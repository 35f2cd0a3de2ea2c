"""Finds what the host did instead of launching, and when the device ran dry: waits for the device, pauses, and stalls.

A host that launches many small kernels starts one every some microseconds. One that starts none for a millisecond is
busy with something else: it loads data, writes, sleeps, or collects garbage. A device that ran nothing at all, though
the host had launched what ran next, stalls: what it waited for is unknown.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import LATENCY_NS, LOADING, NEVER, PAUSE_NS
from overlap_sweep.diagnosis.places import Nested, Places, is_no_place
from overlap_sweep.trace.activity import Activity, step_ranges
from overlap_sweep.trace.columns import Events, Trace, concatenated
from overlap_sweep.trace.intervals import Intervals, merge
from overlap_sweep.trace.kernel_classes import short_name
from overlap_sweep.trace.kineto import MODULE

BLOCKS_FROM_NS = 10_000
"""Shortest call that counts as a wait of the host; synchronising an idle device takes a few microseconds."""

COPY_BLOCKS_FROM_NS = 100_000
"""The same for asynchronous copies, which block only if the memory is not pinned."""

SYNC = re.compile(r"(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize|(cuda|hip)Memcpy$")
_WHOLE_DEVICE = re.compile(r"(cuda|hip)DeviceSynchronize|cuCtxSynchronize")
_COPY = re.compile(r"(cuda|hip)MemcpyAsync|hipMemcpyWithStream")


@dataclass(frozen=True)
class Wait:
    """A call in which the host waited for the device."""

    start_ns: int
    end_ns: int
    name: str
    """The call of the runtime."""
    operator: str
    """Operator that called it, such as aten::item; empty if none did."""
    where: str
    ends_step: bool = False
    """Whether it waits for the whole device at the end of a ProfilerStep, as programs do to take times."""


def waits_of(trace: Trace, places: Places, *, apart: bool) -> Iterator[Wait]:
    """Yields the waits that can delay a step.

    With ProfilerSteps only those inside of them. If the steps are `apart`, because something else runs between them, as
    in a benchmark, then what ends a step delays none.
    """
    launches = trace.launches
    if not len(trace.device):
        return
    on_device = np.isin(launches.correlation, trace.device.correlation)
    with_kernels = np.unique(launches.lane[on_device])
    sync, copy = (
        np.array([pattern.match(name) is not None for _, name in trace.labels], bool)[launches.label]
        for pattern in (SYNC, _COPY)
    )
    took = launches.end_ns - launches.start_ns
    blocked = (sync & (took >= BLOCKS_FROM_NS)) | (copy & (took >= COPY_BLOCKS_FROM_NS))
    chosen = np.flatnonzero(blocked & np.isin(launches.lane, with_kernels))
    ranges, launched = step_ranges(trace), np.sort(launches.start_ns[on_device])
    for i in chosen[np.argsort(launches.start_ns[chosen], kind="stable")].tolist():
        start_ns, end_ns, thread = int(launches.start_ns[i]), int(launches.end_ns[i]), int(launches.lane[i])
        name, operator = trace.labels[launches.label[i]][1], places.operator_at(thread, start_ns)
        step_end_ns = next((int(end) for start, end in ranges if start <= start_ns < end), None)
        if step_end_ns is None and len(ranges):
            continue
        ends_step = bool(
            step_end_ns is not None
            and np.searchsorted(launched, start_ns) == np.searchsorted(launched, step_end_ns)
            and _WHOLE_DEVICE.match(name)
            and not operator
        )
        if not (ends_step and apart):
            yield Wait(start_ns, end_ns, name, operator, places.at(thread, start_ns), ends_step)


COVERS = 0.8
"""Least share of a pause that a function or annotation covers for the pause to be in it."""

MAINLY = 0.5
"""Least share of a function that a pause takes for the function alone to tell where it is."""

_BUILT_IN = re.compile(r"<built-in (?:function|method) (\w+).*>")
_PYTHON = re.compile(r"(?P<file>[^<>]+)\(\d+\): ")
_COLLECTIVE = re.compile(r"c10d::|_c10d_functional::wait_tensor")
"""On a CPU they wait for other ranks, which is no pause of the host's own."""
_TORCHS = re.compile(r"(DistributedDataParallel|FullyShardedDataParallel)\.|FSDP::|Optimizer\.step#")
"""Torch's own annotations, in which all of a pass or an optimizer runs: they name nothing that the program does."""
_LIBRARIES = sys.stdlib_module_names | {"torch"}


@dataclass(frozen=True)
class Pause:
    """Time in which no thread that launches or computes started or ended anything. Nanoseconds."""

    start_ns: int
    end_ns: int
    place: str
    """Such as `in sleep(), called by train.py(12): load`, `inside aten::mm`, or `between aten::mul and aten::add`."""
    loads: bool = False
    """Whether a DataLoader makes the next batch in it."""


def pauses_of(trace: Trace, threads: NDArray[np.int32]) -> Iterator[Pause]:
    """Yields the host's pauses, by start. `threads`: those that launch or compute."""
    is_operator = np.array([category == "cpu_op" for category, _ in trace.labels], bool)
    own = concatenated(trace.host[is_operator[trace.host.label]], trace.launches)
    own = own[np.isin(own.lane, threads)]
    moments = np.concatenate((own.start_ns, own.end_ns))
    order = np.argsort(moments, kind="stable")
    scopes = _Scopes(trace, threads)
    for place in np.flatnonzero(np.diff(moments[order]) >= PAUSE_NS).tolist():
        before, after = (int(order[at]) for at in (place, place + 1))
        name_before, name_after = (trace.labels[own.label[at % len(own)]][1] for at in (before, after))
        span = int(moments[before]), int(moments[after])
        if pause := scopes.pause(span, int(own.lane[after % len(own)]), name_before, name_after):
            yield pause


def paused_ns(pauses: list[Pause], spans: Intervals) -> Counter[str]:
    """Returns how long the host paused within the spans (a union), by place. The longest is `most_common(1)`."""
    found: Counter[str] = Counter()
    for pause in pauses:
        first, beyond = np.searchsorted(spans[:, 1], pause.start_ns), np.searchsorted(spans[:, 0], pause.end_ns)
        here = np.clip(spans[first:beyond], pause.start_ns, pause.end_ns)
        if common := int((here[:, 1] - here[:, 0]).sum()):
            found[pause.place] += common
    return found


class _Scopes:
    """What ran on the host for long: functions, modules, annotations, operators, and calls of the runtime."""

    def __init__(self, trace: Trace, threads: NDArray[np.int32]) -> None:
        every = concatenated(trace.host, trace.launches, trace.modules, trace.functions)
        is_place = np.array([not (is_no_place(name) or _TORCHS.match(name)) for _, name in trace.labels], bool)
        long = every.end_ns - every.start_ns >= COVERS * PAUSE_NS
        self._scopes = Nested(every[long & is_place[every.label] & np.isin(every.lane, threads)])
        self._names = [name for _, name in trace.labels]
        self._is_operator = [category not in ("user_annotation", "python_function") for category, _ in trace.labels]

    def pause(self, span: tuple[int, int], thread: int, before: str, after: str) -> Pause | None:
        """Returns the pause between what ended or started `before` and `after`, on the `thread` of the latter; None if
        the host waited for the device."""
        start_ns, end_ns = span
        # What covers most of the pause contains its middle.
        around = [
            (label, end - start)
            for label, start, end in self._scopes.around(thread, (start_ns + end_ns) // 2)
            if min(end, end_ns) - max(start, start_ns) >= COVERS * (end_ns - start_ns)
        ]
        names = [self._names[label] for label, _ in around]
        between = f"between {f'{_short(before)} and' if before != after else 'two'} {_short(after)}"
        place = between
        if names:
            if SYNC.match(names[0]) or _COLLECTIVE.match(names[0]):
                return None
            innermost, took = around[0]
            place = f"{'inside' if self._is_operator[innermost] else 'in'} {_short(names[0])}{_caller(names)}"
            if end_ns - start_ns < MAINLY * took and not LOADING.match(names[0]):
                place = f"{place}, {between}"
        return Pause(start_ns, end_ns, place, any(LOADING.match(name) for name in names))


def _caller(names: list[str]) -> str:
    """Returns who called the innermost function, as far as it is built in or of a library: the program's own function
    nearest to it. `names`: from the innermost outwards."""
    if _is_own(names[0]):
        return ""
    caller = next((name for name in names[1:] if _is_own(name)), "")
    return f", called by {caller}" if caller else ""


def _is_own(name: str) -> bool:
    python = _PYTHON.match(name)
    return python is not None and re.split(r"[/\\.]", python["file"].lstrip("./"))[0] not in _LIBRARIES


def _short(name: str) -> str:
    built_in = _BUILT_IN.match(name)
    if built_in:
        return f"{built_in[1]}()"
    return name.removeprefix("autograd::engine::evaluate_function: ").removeprefix(MODULE)


LOOKED_AT = 256
"""Events that are looked at for the one before on the same stream."""

_HOLDS_BACK = re.compile(
    r"(cuda|hip)(LaunchHostFunc|StreamAddCallback)|(cuda|hip)StreamWaitEvent|(cu|cuda|hip)StreamWaitValue"
)


@dataclass(frozen=True)
class Stall:
    """Time in which the device ran nothing, after what ended it had been launched."""

    start_ns: int
    end_ns: int
    launch_ns: int
    """Of what ended it; NEVER if unknown."""
    before: str
    """What had run before."""
    after: str
    """What ended it."""
    stream: str
    """Of what ended it."""
    holds_back: str
    """Call of the runtime that makes a stream wait, between the launches of what ran before on this stream and of what
    ended the stall; empty if there is none."""


def launched_ns(trace: Trace, launch: NDArray[np.intp], start_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns when the host had launched events of the device; NEVER where it is unknown.

    That is the start of the call, unless the host was held up in it: it took long, and the event started right after
    it. `launch`: index of the events' launches, or -1; `start_ns`: of the events.
    """
    if not len(trace.launches):
        return np.full(len(launch), NEVER, np.int64)
    called, returned = trace.launches.start_ns[launch], np.minimum(trace.launches.end_ns[launch], start_ns)
    held_up = (returned - called > LATENCY_NS) & (start_ns - returned <= LATENCY_NS)
    return np.where(launch < 0, NEVER, np.where(held_up, returned, called))


def stalls_of(trace: Trace, activity: Activity, launch: NDArray[np.intp]) -> Iterator[Stall]:
    """Yields the stalls of the device. `launch`: index of each event's launch, or -1."""
    events = activity.events
    busy = merge(events.intervals)
    starts, ends = busy[:-1, 1], busy[1:, 0]
    order = np.argsort(events.start_ns, kind="stable")
    places = np.searchsorted(events.start_ns, ends, sorter=order)
    launched = launch[order[places]]
    launch_ns = launched_ns(trace, launched, ends)
    since = np.maximum(starts, launch_ns)
    by_end = np.argsort(events.end_ns, kind="stable")
    holds = np.array([_HOLDS_BACK.match(name) is not None for _, name in trace.labels], bool)
    holding = trace.launches[holds[trace.launches.label]]
    for i in np.flatnonzero(ends - since >= LATENCY_NS).tolist():
        after = int(order[places[i]])
        earlier = order[max(0, places[i] - LOOKED_AT) : places[i]]
        on_stream = earlier[events.lane[earlier] == events.lane[after]]
        yield Stall(
            start_ns=int(since[i]),
            end_ns=int(ends[i]),
            launch_ns=int(launch_ns[i]),
            before=_name(activity, int(by_end[np.searchsorted(events.end_ns, starts[i], sorter=by_end)])),
            after=_name(activity, after),
            stream=trace.lanes[int(events.lane[after])][1],
            holds_back=_holding(trace, holding, launch[on_stream[-1:]], launch[after]),
        )


def _name(activity: Activity, event: int) -> str:
    return short_name(activity.labels[activity.events.label[event]][1])


def _holding(trace: Trace, holding: Events, before: NDArray[np.intp], launch: np.intp) -> str:
    """Returns the last of the `holding` calls between two launches of a thread."""
    if launch < 0:
        return ""
    since = int(trace.launches.start_ns[before[0]]) if len(before) and before[0] >= 0 else NEVER
    lane, until = trace.launches.lane[launch], trace.launches.start_ns[launch]
    found = np.flatnonzero((holding.lane == lane) & (holding.start_ns > since) & (holding.start_ns < until))
    return trace.labels[holding.label[found[-1]]][1] if len(found) else ""
