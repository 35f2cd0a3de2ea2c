"""Finds what ran on the host at a moment, what it did instead of launching, and when the device ran dry."""

import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import LATENCY_NS, LOADING, NEVER, PAUSE_NS
from overlap_sweep.trace.activity import Activity, steps_of
from overlap_sweep.trace.columns import Events, Trace, concatenated
from overlap_sweep.trace.intervals import Intervals, contains, length, merge, no_intervals, places_by_value, within
from overlap_sweep.trace.kernel_classes import short_name
from overlap_sweep.trace.kineto import MODULE

_BACKWARD = "autograd::engine::evaluate_function: "
_AUTOGRAD = re.compile(_BACKWARD)
_NO_PLACE = re.compile(r"ProfilerStep#|(nccl|gloo|mpi|ucc|rccl|xccl):|## |PyTorch Profiler|Optimizer\.zero_grad")
"""Annotations that say nothing of where the program is, such as a step's or a backend's."""
_NO_FUNCTION = re.compile(rf"aten::|c10d::|_c10d_functional::|record_param_comms|{_BACKWARD}")
_OPERATOR = re.compile(r"aten::|c10d::")
_C10D = re.compile(r"c10d::")
_COLLECTIVE = re.compile(r"c10d::|nccl:|record_param_comms")


class Nested:
    """Ranges of several threads; those of one thread contain each other or are apart."""

    def __init__(self, events: Events) -> None:
        self._by_lane: dict[int, tuple[list[int], list[int], list[int], list[int]]] = {}
        for lane, here in places_by_value(events.lane):
            own = events[here[np.lexsort((-events.end_ns[here], events.start_ns[here]))]]
            starts, ends = own.start_ns.tolist(), own.end_ns.tolist()
            self._by_lane[lane] = starts, ends, own.label.tolist(), _parents(starts, ends)

    def around(self, lane: int, moment_ns: int) -> Iterator[tuple[int, int, int]]:
        """Yields label, start and end of the ranges that contain the moment, from the innermost outwards."""
        starts, ends, labels, parents = self._by_lane.get(lane, ([], [], [], []))
        i = bisect_right(starts, moment_ns) - 1
        while i >= 0:
            if ends[i] > moment_ns:
                yield labels[i], starts[i], ends[i]
            i = parents[i]

    def innermost(self, lane: int, moment_ns: int) -> tuple[int, int, int] | None:
        return next(self.around(lane, moment_ns), None)

    def begun_before(self, lane: int, moment_ns: int) -> Iterator[int]:
        """Yields the labels, the last first."""
        starts, _, labels, _ = self._by_lane.get(lane, ([], [], [], []))
        return (labels[i] for i in range(bisect_right(starts, moment_ns) - 1, -1, -1))


def _parents(starts: list[int], ends: list[int]) -> list[int]:
    """Returns the index of the range around each range, or -1."""
    parents: list[int] = []
    # At -1, around all ranges, is one that never ends.
    ends, around = [*ends, sys.maxsize], -1
    for i, start in enumerate(starts):
        while ends[around] <= start:
            around = parents[around]
        parents.append(around)
        around = i
    return parents


class Places:
    """The modules, annotations and operators that were running on a thread at a moment."""

    def __init__(self, trace: Trace, launches: Events) -> None:
        """`launches`: of computation."""
        host = trace.host
        is_annotation = np.array([category == "user_annotation" for category, _ in trace.labels], bool)
        annotations = host[is_annotation[host.label] & ~trace.is_named(host, _NO_PLACE)]
        is_backward, is_call = (trace.is_named(host, pattern) for pattern in (_AUTOGRAD, _C10D))
        is_function = trace.forward & ~trace.is_named(host, _NO_FUNCTION)
        backward = host[is_backward]
        self._names = [name for _, name in trace.labels]
        self._named = Nested(concatenated(annotations, trace.modules))
        self._functions = Nested(host[is_backward | is_function])
        self._numbered = Nested(host[is_function])
        self._nodes = Nested(backward)
        self._backward = backward[np.argsort(backward.start_ns, kind="stable")]
        begun_ns = np.sort(host.start_ns[trace.forward & ~is_call])
        # Not what checkpoints compute again.
        self._forward_ns = begun_ns[~contains(merge(backward.intervals), begun_ns)]
        self._begun_before = np.searchsorted(self._forward_ns, self._backward.start_ns)
        self._launches = {lane: np.sort(launches.start_ns[here]) for lane, here in places_by_value(launches.lane)}
        self._operators = Nested(host[trace.is_named(host, _OPERATOR)])
        collectives = np.flatnonzero(trace.is_named(host, _COLLECTIVE))
        self.collectives = Nested(replace(host[collectives], label=collectives.astype(np.int32)))
        """Operators and annotations of collectives; in place of labels, their indices in `trace.host`."""

    def at(self, thread: int, moment_ns: int) -> str:
        """Returns the innermost module, annotation or function of autograd; of a function in a module both, such as
        `Attention_0: RowParallel`; empty if there is none."""
        inside, function = (ranges.innermost(thread, moment_ns) for ranges in (self._named, self._functions))
        name, called = (self._names[found[0]] if found else "" for found in (inside, function))
        called = called.removeprefix(_BACKWARD).removeprefix("torch::autograd::")
        if inside is None or function is None or inside[1] >= function[1]:
            return name.removeprefix(MODULE) or called
        return f"{name.removeprefix(MODULE)}: {called}" if name.startswith(MODULE) else called

    def operator_at(self, thread: int, moment_ns: int) -> str:
        """Returns the outermost operator of PyTorch; empty if there is none."""
        around = list(self._operators.around(thread, moment_ns))
        return self._names[around[-1][0]] if around else ""

    def in_function(self, thread: int, moment_ns: int) -> bool:
        """Returns whether a function that autograd numbered as part of a forward computation runs at the moment."""
        return self._numbered.innermost(thread, moment_ns) is not None

    def computed_before(self, thread: int, moment_ns: int) -> bool:
        """Returns whether the function of a forward computation that runs at the moment has launched computation."""
        function, launches = self._numbered.innermost(thread, moment_ns), self._launches.get(thread)
        if function is None or launches is None:
            return False
        return bool(np.searchsorted(launches, function[1]) < np.searchsorted(launches, moment_ns))

    def is_backward(self, thread: int, moment_ns: int) -> bool:
        return self._nodes.innermost(thread, moment_ns) is not None

    def accumulates(self, thread: int, moment_ns: int) -> bool:
        """Returns whether autograd accumulates gradients at the moment, or runs the hooks there."""
        node = self._nodes.innermost(thread, moment_ns)
        return node is not None and "AccumulateGrad" in self._names[node[0]]

    def follows_backward(self, moment_ns: int) -> bool:
        """Returns whether a backward pass has begun and no forward computation since, on any thread."""
        begun = int(np.searchsorted(self._backward.start_ns, moment_ns, side="right")) - 1
        return begun >= 0 and bool(self._begun_before[begun] == np.searchsorted(self._forward_ns, moment_ns))

    def backward_passes(self) -> Intervals:
        """Returns when the backward passes ran, each after the forward computation of a microbatch."""
        if not len(self._backward):
            return no_intervals()
        first = np.unique(self._begun_before, return_index=True)[1]
        return np.stack((self._backward.start_ns[first], np.maximum.reduceat(self._backward.end_ns, first)), axis=1)


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
    operator: str
    """What called it, such as aten::item; empty if none did."""
    where: str
    ends_step: bool = False
    """Whether it waits for the whole device at the end of a ProfilerStep, as programs do to take times."""


def waits_of(trace: Trace, places: Places, *, apart: bool) -> Iterator[Wait]:
    """Yields the waits that can delay a step: those inside of ProfilerSteps, if there are any; without what ends a step
    if the steps are `apart`, because something else runs between them."""
    launches = trace.launches
    if not len(trace.device):
        return
    on_device = np.isin(launches.correlation, trace.device.correlation)
    with_kernels = np.unique(launches.lane[on_device])
    sync, copy = (trace.is_named(launches, pattern) for pattern in (SYNC, _COPY))
    took = launches.end_ns - launches.start_ns
    blocked = (sync & (took >= BLOCKS_FROM_NS)) | (copy & (took >= COPY_BLOCKS_FROM_NS))
    chosen = np.flatnonzero(blocked & np.isin(launches.lane, with_kernels))
    steps, launched = steps_of(trace), np.sort(launches.start_ns[on_device])
    step = np.searchsorted(steps.start_ns, launches.start_ns, side="right") - 1
    for i in chosen[np.argsort(launches.start_ns[chosen], kind="stable")].tolist():
        start_ns, end_ns, thread = int(launches.start_ns[i]), int(launches.end_ns[i]), int(launches.lane[i])
        name, operator = trace.name(launches, i), places.operator_at(thread, start_ns)
        step_end_ns = int(steps.end_ns[step[i]]) if len(steps) else None
        if step_end_ns is not None and (step[i] < 0 or step_end_ns <= start_ns):
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

_BUILT_IN = re.compile(r"<built-in (?:function|method) (\w+).*>")
_PYTHON = re.compile(r"(?P<file>[^<>]+)\(\d+\): ")
_WAITS = re.compile(r"c10d::|_c10d_functional::wait_tensor")
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
    every = concatenated(trace.host, trace.launches, trace.modules, trace.functions)
    is_place = ~(trace.is_named(every, _NO_PLACE) | trace.is_named(every, _TORCHS))
    is_long = every.end_ns - every.start_ns >= COVERS * PAUSE_NS
    scopes = Nested(every[is_long & is_place & np.isin(every.lane, threads)])
    for place in np.flatnonzero(np.diff(moments[order]) >= PAUSE_NS).tolist():
        before, after = (int(order[at]) for at in (place, place + 1))
        name_before, name_after = (trace.name(own, at % len(own)) for at in (before, after))
        span = int(moments[before]), int(moments[after])
        if pause := _pause(trace, scopes, span, int(own.lane[after % len(own)]), name_before, name_after):
            yield pause


def paused_ns(pauses: list[Pause], spans: Intervals) -> Counter[str]:
    """Returns how long the host paused within the spans (a union), by place. The longest is `most_common(1)`."""
    found: Counter[str] = Counter()
    for pause in pauses:
        if common := length(within(spans, pause.start_ns, pause.end_ns)):
            found[pause.place] += common
    return found


def _pause(trace: Trace, scopes: Nested, span: tuple[int, int], thread: int, before: str, after: str) -> Pause | None:
    """Returns the pause between what ended or started `before` and `after`, on the `thread` of the latter; None if the
    host waited for the device. `scopes`: what ran on the host for long, by its labels."""
    start_ns, end_ns = span
    # What covers most of the pause contains its middle.
    around = [
        (*trace.labels[label], end - start)
        for label, start, end in scopes.around(thread, (start_ns + end_ns) // 2)
        if min(end, end_ns) - max(start, start_ns) >= COVERS * (end_ns - start_ns)
    ]
    names = [name for _, name, _ in around]
    between = f"between {f'{_short(before)} and' if before != after else 'two'} {_short(after)}"
    place = between
    if around:
        category, innermost, took = around[0]
        if SYNC.match(innermost) or _WAITS.match(innermost):
            return None
        runs = "in" if category in ("user_annotation", "python_function") else "inside"
        place = f"{runs} {_short(innermost)}{_caller(names)}"
        if end_ns - start_ns < 0.5 * took and not LOADING.match(innermost):
            place = f"{place}, {between}"
    return Pause(start_ns, end_ns, place, any(LOADING.match(name) for name in names))


def _caller(names: list[str]) -> str:
    """Returns who called the innermost function, if it is built in or of a library: the program's own function nearest
    to it. `names`: from the innermost outwards."""
    own = next((i for i, name in enumerate(names) if _is_own(name)), 0)
    return f", called by {names[own]}" if own else ""


def _is_own(name: str) -> bool:
    python = _PYTHON.match(name)
    return python is not None and re.split(r"[/\\.]", python["file"].lstrip("./"))[0] not in _LIBRARIES


def _short(name: str) -> str:
    if built_in := _BUILT_IN.match(name):
        return f"{built_in[1]}()"
    return name.removeprefix(_BACKWARD).removeprefix(MODULE)


_HOLDS_BACK = re.compile(
    r"(cuda|hip)(LaunchHostFunc|StreamAddCallback)|(cuda|hip)StreamWaitEvent|(cu|cuda|hip)StreamWaitValue"
)


@dataclass(frozen=True)
class Stall:
    """Time in which the device ran nothing, after what ended it had been launched."""

    start_ns: int
    end_ns: int
    launch_ns: int
    """Launch of what ended it; NEVER if unknown."""
    before: str
    """What had run before."""
    after: str
    """What ended it, on `stream`."""
    stream: str
    holds_back: str
    """Call of the runtime that makes a stream wait, between the launches of what ran before on this stream and of what
    ended the stall; empty if there is none."""


def launched_ns(trace: Trace, launch: NDArray[np.intp], start_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns when the host had launched events of the device: when the call began, or returned if the host was held up
    in it; NEVER where it is unknown. `launch`: index of the events' launches, or -1."""
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
    holding = trace.launches[trace.is_named(trace.launches, _HOLDS_BACK)]
    for i in np.flatnonzero(ends - since >= LATENCY_NS).tolist():
        after = int(order[places[i]])
        earlier = order[max(0, places[i] - 256) : places[i]]
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
    return trace.name(holding, found[-1]) if len(found) else ""


_RECORD, _STREAM_WAIT = re.compile(r"(cuda|hip)EventRecord"), re.compile(r"(cuda|hip)StreamWaitEvent")
_OWN_RECORD = re.compile(r"(cuda|hip)EventRecord$")


class StreamEvent(NamedTuple):
    """A call that records an event on a stream, or makes a stream wait for one; the trace says for none which."""

    host_ns: int
    is_wait: bool


def stream_events_of(trace: Trace) -> Iterator[StreamEvent]:
    """Yields the program's own calls, by time. PyTorch records by cudaEventRecordWithFlags, NCCL within its launches by
    cudaEventRecord, each with the wait right after it."""
    launches = trace.launches
    is_record, is_wait = (trace.is_named(launches, pattern) for pattern in (_RECORD, _STREAM_WAIT))
    is_own = trace.is_named(launches, _OWN_RECORD) & bool((is_record & ~trace.is_named(launches, _OWN_RECORD)).any())
    order = np.argsort(launches.start_ns, kind="stable")
    before = False
    for i in order.tolist():
        if (is_record[i] and not is_own[i]) or (is_wait[i] and not before):
            yield StreamEvent(int(launches.start_ns[i]), bool(is_wait[i]))
        before = bool(is_own[i])
