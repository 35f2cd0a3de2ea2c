"""Extracts from one rank's trace what a diagnosis needs: computation, collectives, launches, and waits of the host."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import Pass
from overlap_sweep.diagnosis.collectives import collective_of, group_of, sizes_of_host
from overlap_sweep.diagnosis.places import Places
from overlap_sweep.diagnosis.waits import Wait, waits_of
from overlap_sweep.trace.activity import (
    BWD,
    COMM,
    COMPUTE,
    FWD,
    GEMM,
    MEMORY,
    NO_ITERATION,
    RECOMPUTE,
    WAIT,
    Activity,
    activity_of,
    launches_of,
)
from overlap_sweep.trace.intervals import Intervals, places_by_value
from overlap_sweep.trace.kineto import NO_CORRELATION, Detail, Trace

NEVER = -1
"""Launch of an event whose launch the trace does not have."""

PASSES: dict[int, Pass] = {FWD: "fwd", BWD: "bwd", RECOMPUTE: "bwd"}

_C10D = re.compile(r"c10d::(?!barrier|monitored_barrier)|_c10d_functional::(?!wait_tensor|_wrap)")


@dataclass(frozen=True)
class Work:
    """Computation, sorted by start: kernels, or on a CPU outermost operators. Columns of equal length."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    launch_ns: NDArray[np.int64]
    """Start of the launch on the host; of an operator on the CPU its own start; NEVER if unknown."""
    lane: NDArray[np.int32]
    """Stream, or on a CPU thread."""
    is_gemm: NDArray[np.bool_]
    signature: NDArray[np.int32]
    """Equal for kernels of the same name, grid and block."""
    pass_: NDArray[np.int8]
    """FWD, BWD, RECOMPUTE or NEITHER of trace.activity."""
    step: NDArray[np.int64]
    """NO_ITERATION of trace.activity outside all steps."""

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def intervals(self) -> Intervals:
        return np.stack((self.start_ns, self.end_ns), axis=1)


@dataclass
class Call:
    """One collective, or one kernel that communicates or waits for another rank."""

    start_ns: int
    end_ns: int
    launch_ns: int
    """Start of the launch on the host; NEVER if unknown."""
    lane: int
    """Stream, or on a CPU thread."""
    step: int
    pass_: Pass
    """Pass of the launch."""
    collective: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv or send_recv; of kernels that are no
    collective of a process group their library."""
    group: str
    """Name of the process group; empty if unknown."""
    sent: int | None
    """Elements that this rank gives; None if unknown."""
    received: int | None
    dtype: str | None
    group_size: int | None
    where: str
    is_wait: bool = False
    """Whether it only waits for other ranks, or signals to them."""
    thread: int = NEVER
    """Thread of the launch."""
    library: str = ""
    """Whose kernel it is, such as nccl; on a CPU gloo, mpi or ucc."""
    in_function: bool = False
    """Whether a function of the forward computation launched it, rather than a hook or plain code."""
    computed_before: bool = False
    """Whether that function had launched computation before."""
    accumulates: bool = False
    """Whether it was launched where autograd accumulates gradients, or by a hook there."""


@dataclass(frozen=True)
class Step:
    number: int
    start_ns: int
    end_ns: int
    """Start of the next step; its last event's end if it is the last one, or if other work ran before the next one."""
    startup: bool = False


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    about: str
    """What the program calls it; empty if it does not say."""
    ranks: tuple[int, ...]
    """Empty if unknown."""
    size: int | None
    backend: str = ""

    @property
    def title(self) -> str:
        """Returns the name for people."""
        return f"{self.name} ({self.about})" if self.about else self.name


@dataclass(frozen=True)
class RankFacts:
    """What one rank did. Times are nanoseconds on the trace's clock."""

    path: Path
    rank: int | None
    world_size: int | None
    on_device: bool
    """False if the trace has no device: times are those of operators on the CPU."""
    base_time_ns: int
    steps: list[Step]
    work: Work
    copies: Intervals
    """Copies and sets within the rank, [n, 2]."""
    calls: list[Call]
    """Sorted by start."""
    waits: list[Wait]
    """Sorted by start; only on threads that launch kernels."""
    groups: dict[str, Group] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    """Kernel or operator name, by signature."""
    lanes: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    libraries: frozenset[str] = frozenset()
    """What the names in the trace show to be in use, by the names of `LIBRARIES`: for advice alone."""


LIBRARIES = {
    "fsdp2": re.compile(r"FSDP::"),
    "fsdp1": re.compile(r"FullyShardedDataParallel\."),
    "ddp": re.compile(r"DistributedDataParallel\.|torch::distributed::reducer"),
    "transformer_engine": re.compile(r"transformer_engine|_LayerNormLinear|_LayerNormMLP|kuserbuffers|userbuffers_"),
    "deepspeed": re.compile(r"[Dd]eep[Ss]peed|^(PreBackwardFunctionForModule|PostBackwardFunctionModule)"),
    "dtensor": re.compile(r"_FromTorchTensor|_ToTorchTensor|Redistribute|_c10d_functional"),
    "symm_mem": re.compile(r"symm_mem::"),
    "deep_ep": re.compile(r"deep_ep"),
}


def facts_of(trace: Trace, path: Path, startup: list[int]) -> RankFacts:
    """Returns the facts of a trace. `startup`: numbers of the steps that contain the profiler's start."""
    activity = activity_of(trace)
    launch = launches_of(trace) if len(trace.device) else None
    if launch is not None and (launch >= 0).any():
        # Launched before the recording began: of a step that is not in the trace.
        activity.assignment.iteration[launch < 0] = NO_ITERATION
    computes = np.isin(activity.kind, (GEMM, COMPUTE))
    if launch is None:
        moments = activity.events[np.flatnonzero(computes)]
    else:
        moments = trace.launches[launch[computes & (launch >= 0)]]
    places = Places(trace, moments)
    steps = _steps(activity, startup)
    apart = any(first.end_ns < second.start_ns for first, second in pairwise(steps))
    calls = list(_calls(trace, activity, launch, places))
    calls.sort(key=lambda call: (call.start_ns, call.end_ns))
    names, work = _work(trace, activity, launch)
    copies = activity.events[np.flatnonzero(activity.kind == MEMORY)].intervals
    return RankFacts(
        path=path,
        rank=trace.rank,
        world_size=trace.world_size,
        on_device=launch is not None,
        base_time_ns=trace.base_time_ns,
        steps=steps,
        work=work,
        copies=copies,
        calls=calls,
        waits=list(waits_of(trace, places, apart=apart)),
        groups=_groups(trace, calls),
        names=names,
        lanes=trace.lanes,
        warnings=trace.warnings,
        libraries=frozenset(
            library for library, pattern in LIBRARIES.items() if any(pattern.search(name) for _, name in trace.labels)
        ),
    )


def _steps(activity: Activity, startup: list[int]) -> list[Step]:
    """Returns the steps that have work, from the first event of each to the first one of the next.

    If work of no step runs between two of them, such as a benchmark's own, the time between them belongs to neither.
    """
    runs, iteration = np.isin(activity.kind, (GEMM, COMM, COMPUTE)), activity.assignment.iteration
    chosen = np.flatnonzero((iteration != NO_ITERATION) & runs)
    numbers = iteration[chosen]
    found = []
    for number, places in places_by_value(numbers):
        own = activity.events[chosen[places]]
        found.append((int(own.start_ns.min()), int(own.end_ns.max()), number))
    found.sort()
    of_none = np.sort(activity.events.start_ns[(iteration == NO_ITERATION) & (runs | (activity.kind == WAIT))])
    steps = []
    for i, (start, end, number) in enumerate(found):
        following = found[i + 1][0] if i + 1 < len(found) else end
        between = np.searchsorted(of_none, following) > np.searchsorted(of_none, end)
        steps.append(Step(number, start, end if between else following, number in startup))
    return steps


def _work(trace: Trace, activity: Activity, launch: NDArray[np.intp] | None) -> tuple[list[str], Work]:
    events = activity.events
    chosen = np.flatnonzero(np.isin(activity.kind, (GEMM, COMPUTE)))
    chosen = chosen[np.argsort(events.start_ns[chosen], kind="stable")]
    own = events[chosen]
    pairs = own.label.astype(np.int64) << 32 | own.detail
    known, signature = np.unique(pairs, return_inverse=True)
    launched = own.start_ns if launch is None else _launch_times(trace, launch[chosen])
    return [activity.labels[pair >> 32][1] for pair in known.tolist()], Work(
        start_ns=own.start_ns,
        end_ns=own.end_ns,
        launch_ns=launched,
        lane=own.lane,
        is_gemm=activity.kind[chosen] == GEMM,
        signature=signature.astype(np.int32),
        pass_=activity.assignment.pass_[chosen],
        step=activity.assignment.iteration[chosen],
    )


def _launch_times(trace: Trace, launch: NDArray[np.intp]) -> NDArray[np.int64]:
    if not len(trace.launches):
        return np.full(len(launch), NEVER, np.int64)
    return np.where(launch >= 0, trace.launches.start_ns[np.maximum(launch, 0)], NEVER)


def _calls(trace: Trace, activity: Activity, launch: NDArray[np.intp] | None, places: Places) -> Iterator[Call]:
    events, kind = activity.events, activity.kind
    chosen = np.flatnonzero(np.isin(kind, (COMM, WAIT)))
    by_external = _details_by_operator(trace) if launch is not None else {}
    launched_by = _launched_by(trace, activity, chosen) if launch is None else {}
    for i in chosen.tolist():
        kernel_class = activity.classes[int(events.label[i])]
        if kernel_class.library == "aten":
            # torch.cuda._sleep waits for nobody.
            continue
        detail = trace.details[events.detail[i]]
        name, pass_ = activity.labels[events.label[i]][1], int(activity.assignment.pass_[i])
        if launch is None:
            at = launched_by.get(i, i)
            launch_ns, thread = int(_called_at(trace, activity, at, i)), _thread(trace, activity, at, i)
            if at == i:
                detail = sizes_of_host(name, detail)
            else:
                # gloo names some collectives after others, and its threads know no pass.
                detail, name = _host_detail(trace, at, detail), trace.labels[trace.host.label[at]][1]
                pass_ = BWD if places.is_backward(thread, launch_ns) else pass_
        else:
            place = int(launch[i])
            launch_ns = int(trace.launches.start_ns[place]) if place >= 0 else NEVER
            thread = int(trace.launches.lane[place]) if place >= 0 else NEVER
            if detail.collective is None:
                found = by_external.get(int(events.external[i]))
                detail = found._replace(bytes=detail.bytes) if found else detail
        yield Call(
            start_ns=int(events.start_ns[i]),
            end_ns=int(events.end_ns[i]),
            launch_ns=launch_ns,
            lane=int(events.lane[i]),
            step=int(activity.assignment.iteration[i]),
            pass_=PASSES.get(pass_, "other"),
            collective=collective_of(detail, name, kernel_class.library),
            group=detail.group or "",
            sent=detail.sent,
            received=detail.received,
            dtype=detail.dtype,
            group_size=detail.group_size,
            where=places.at(thread, launch_ns),
            is_wait=bool(kind[i] == WAIT),
            thread=thread,
            library=kernel_class.library,
            in_function=places.in_function(thread, launch_ns),
            computed_before=places.computed_before(thread, launch_ns),
            accumulates=places.accumulates(thread, launch_ns),
        )


def _called_at(trace: Trace, activity: Activity, operator: int, event: int) -> int:
    """Returns when the collective was called: the operator's start, or the event's own if it has none."""
    return int(trace.host.start_ns[operator] if operator != event else activity.events.start_ns[event])


def _thread(trace: Trace, activity: Activity, operator: int, event: int) -> int:
    return int(trace.host.lane[operator] if operator != event else activity.events.lane[event])


def _details_by_operator(trace: Trace) -> dict[int, Detail]:
    """Returns what operators on the host say about the collectives that they launched, by External id."""
    has = np.flatnonzero((trace.host.external != NO_CORRELATION) & (trace.host.detail > 0))
    details = ((int(trace.host.external[i]), trace.details[trace.host.detail[i]]) for i in has)
    return {external: detail for external, detail in details if detail.collective}


def _launched_by(trace: Trace, activity: Activity, chosen: NDArray[np.intp]) -> dict[int, int]:
    """Returns for communication on a CPU, indices of `activity.events`, the operator that launched it, an index of
    `trace.host`.

    gloo's spans run on its own threads in the order of the calls, so each belongs to the first call of its kind that
    has none yet. A span on the calling thread is inside its operator.
    """
    host = trace.host
    is_call = np.array([_C10D.match(name) is not None for _, name in trace.labels], bool)[host.label]
    operators = np.flatnonzero(is_call)
    operators = operators[np.lexsort((-host.end_ns[operators], host.start_ns[operators]))]
    outermost: list[int] = []
    reach: dict[int, int] = defaultdict(lambda: -1)
    for i in operators.tolist():
        if host.start_ns[i] >= reach[int(host.lane[i])]:
            outermost.append(i)
            reach[int(host.lane[i])] = int(host.end_ns[i])
    waiting: deque[int] = deque(outermost)
    found: dict[int, int] = {}
    for event in chosen[np.argsort(activity.events.start_ns[chosen], kind="stable")].tolist():
        start_ns = int(activity.events.start_ns[event])
        name = activity.labels[activity.events.label[event]][1]
        candidates = [i for i in waiting if host.start_ns[i] <= start_ns]
        own = next((i for i in candidates if _same_kind(trace, i, name)), None)
        if own is not None:
            waiting.remove(own)
            found[event] = own
    return found


_GLOO_KINDS = {
    "all_reduce": ("all_reduce", "reduce_scatter"),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("all_to_all",),
}


def _same_kind(trace: Trace, operator: int, span: str) -> bool:
    """Returns whether gloo runs the operator's collective under the span's name: it reduces and scatters by an
    all-reduce."""
    kind = collective_of(Detail(), span, "gloo")
    called = collective_of(Detail(), trace.labels[trace.host.label[operator]][1], "gloo")
    return called in _GLOO_KINDS.get(kind, (kind,))


def _host_detail(trace: Trace, operator: int, span: Detail) -> Detail:
    """Returns what is known of a collective that ran on the CPU, from its operator, one inside of it, and its span."""
    host = trace.host
    inside = np.flatnonzero(
        (host.lane == host.lane[operator])
        & (host.start_ns >= host.start_ns[operator])
        & (host.end_ns <= host.end_ns[operator])
        & (host.detail > 0)
    ).tolist()
    said = next((detail for i in inside if (detail := trace.details[host.detail[i]]).collective), None)
    if said:
        return said
    names = {i: trace.labels[host.label[i]][1] for i in (operator, *inside)}
    own = next((i for i, name in names.items() if name.startswith("c10d::")), operator)
    return sizes_of_host(names[own], trace.details[host.detail[own]], span)


def _groups(trace: Trace, calls: list[Call]) -> dict[str, Group]:
    """Returns the process groups that communicated."""
    details = {detail.group: detail for detail in trace.details if detail.group is not None}
    return {
        name: group_of(name, details.get(name), trace.groups.get(name)) for name in {c.group for c in calls} if name
    }
