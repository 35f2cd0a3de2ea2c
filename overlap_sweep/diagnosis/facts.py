"""Extracts from one rank's trace what a diagnosis needs: computation, collectives, launches, and waits of the host."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import LOADING
from overlap_sweep.diagnosis.calls import Call, blocks_and_threads, calls_of, groups_of
from overlap_sweep.diagnosis.collectives import Group, group_of
from overlap_sweep.diagnosis.host import (
    Pause,
    Places,
    Stall,
    StreamEvent,
    Wait,
    launched_ns,
    pauses_of,
    stalls_of,
    stream_events_of,
    waits_of,
)
from overlap_sweep.trace.activity import COMPUTE, GEMM, MEMORY, Activity, activity_of, launches_of
from overlap_sweep.trace.columns import Trace
from overlap_sweep.trace.files import TraceFile, read_with_trace
from overlap_sweep.trace.intervals import Intervals, merge, no_intervals
from overlap_sweep.trace.iterations import IterationSpan, iteration_spans

Place = Literal["within", "between", ""]
"""Within a node, between nodes, or empty: unknown."""

PLACES: tuple[Place, ...] = get_args(Place)

_PEER_MEMORY = frozenset({"peer_copy", "userbuffers"})
"""Libraries that write into another GPU's memory, which they map through CUDA's handles for processes of one host."""


@dataclass(frozen=True)
class Work:
    """Computation, sorted by start: kernels, or on a CPU outermost operators. Columns of equal length."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    launch_ns: NDArray[np.int64]
    """When the host had launched it; of an operator on the CPU its own start; NEVER if unknown."""
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


@dataclass(frozen=True)
class RankFacts:
    """What one rank did. Times are nanoseconds on the trace's clock."""

    rank: int | None
    world_size: int | None
    on_device: bool
    """False if the trace has no device: times are those of operators on the CPU."""
    base_time_ns: int
    steps: list[IterationSpan]
    work: Work
    copies: Intervals
    """Copies and sets within the rank, [n, 2]."""
    calls: list[Call]
    """Sorted by start."""
    waits: list[Wait]
    """Sorted by start; only on threads that launch kernels."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Process groups that communicated, by name."""
    known_groups: list[Group] = field(default_factory=list)
    """All process groups that the trace lists."""
    ranks_per_node: int | None = None
    names: list[str] = field(default_factory=list)
    """Kernel or operator name, by signature."""
    grids: list[int] = field(default_factory=list)
    """Thread blocks of the kernel, by signature; 0 if it has none."""
    lanes: list[tuple[str, str]] = field(default_factory=list)
    libraries: frozenset[str] = frozenset()
    """What the names in the trace show to be in use, by the names of `LIBRARIES`: for advice alone."""
    loading: Intervals = field(default_factory=no_intervals)
    """When a thread that launches or computes waited for a DataLoader's next batch: a union."""
    pauses: list[Pause] = field(default_factory=list)
    """By start, as stalls and the next two, which are those of the host."""
    stalls: list[Stall] = field(default_factory=list)
    optimizer_steps: Intervals = field(default_factory=no_intervals)
    backward_passes: Intervals = field(default_factory=no_intervals)
    """One for each microbatch."""
    stream_events: list[StreamEvent] = field(default_factory=list)
    """What the host did for streams to wait for each other, by time."""
    copied: list[tuple[int, str, int]] = field(default_factory=list)
    """Step, name and number of its copies and sets within the rank."""
    device_name: str = ""
    """Kind of GPU, such as NVIDIA H200; empty if unknown."""
    nccl_version: str = ""

    @cached_property
    def startup_steps(self) -> frozenset[int]:
        return frozenset(step.number for step in self.steps if step.startup)

    @cached_property
    def steady_steps(self) -> list[int]:
        return [step.number for step in self.steps if not step.startup]

    @cached_property
    def step_starts_ns(self) -> list[int]:
        return [step.start_ns for step in self.steps]

    @cached_property
    def waits_by_end(self) -> list[int]:
        """Returns the indices of waits in the order of their ends, of equal ends the first wait last."""
        return sorted(range(len(self.waits)), key=lambda i: (self.waits[i].end_ns, -i))

    @cached_property
    def is_steady(self) -> NDArray[np.bool_]:
        """Returns a mask of the work in steps without start-up."""
        return np.isin(self.work.step, self.steady_steps)

    @property
    def computed_ns(self) -> float:
        took_ns = (self.work.end_ns - self.work.start_ns)[self.is_steady].sum()
        return float(took_ns) / max(len(self.steady_steps), 1)

    @property
    def work_per_step(self) -> float:
        """Returns the number of kernels, or of operators on a CPU, per steady step."""
        return float(self.is_steady.sum()) / max(len(self.steady_steps), 1)

    def runs_per_step(self, name: str) -> float:
        """Returns how often a kernel, or on a CPU an operator, of this name runs per steady step."""
        named = np.array([own == name for own in self.names], np.bool_)
        return float((named[self.work.signature] & self.is_steady).sum()) / max(len(self.steady_steps), 1)

    @property
    def time_by_kernel(self) -> Counter[str]:
        """Returns the time of all kernels, or of operators on a CPU, by name, in nanoseconds."""
        found: Counter[str] = Counter()
        took_ns = (self.work.end_ns - self.work.start_ns).tolist()
        for name, time_ns in zip(self.work.signature.tolist(), took_ns, strict=True):
            found[self.names[name]] += time_ns
        return found


_OPTIMIZER_STEP = re.compile(r"Optimizer\.step#")

LIBRARIES = {
    "fsdp2": re.compile(r"FSDP::"),
    "fsdp1": re.compile(r"FullyShardedDataParallel\."),
    "ddp": re.compile(r"DistributedDataParallel\.|torch::distributed::reducer"),
    "transformer_engine": re.compile(r"transformer_engine|_LayerNormLinear|_LayerNormMLP|kuserbuffers|userbuffers_"),
    "deepspeed": re.compile(r"[Dd]eep[Ss]peed|^(PreBackwardFunctionForModule|PostBackwardFunctionModule)"),
    "dtensor": re.compile(r"_FromTorchTensor|_ToTorchTensor|Redistribute|_c10d_functional"),
    "symm_mem": re.compile(r"symm_mem::"),
    "deep_ep": re.compile(r"deep_ep"),
    "torchrec": re.compile(r"fbgemm::|All2All_|KJTAllToAll"),
    "sparse_pipeline": re.compile(r"## (start_)?sparse_data_dist"),
    "optimizer": _OPTIMIZER_STEP,
    "fused": re.compile(r"aten::_fused_(adam|adamw|sgd|adagrad)_"),
    "nccl": re.compile(r"nccl(Dev)?Kernel|ncclSym"),
    "loader": re.compile(r"enumerate\(DataLoader\)#"),
    "loader_workers": re.compile(r"_MultiProcessingDataLoaderIter"),
}


class RankRead(msgspec.Struct):
    """What was read of one trace."""

    file: TraceFile
    facts: RankFacts | None
    """None if there is a problem."""


def read_rank(path: Path) -> RankRead:
    """Reads a trace and returns its analysis and its facts, without the cache."""
    file, trace, activity = read_with_trace(path, with_parts=False)
    return RankRead(file, facts_of(trace, file.startup, activity) if trace else None)


def facts_of(trace: Trace, startup: Collection[int] = (), activity: Activity | None = None) -> RankFacts:
    """Returns the facts of a trace. `startup`: numbers of the steps that contain the profiler's start; `activity`: that
    of the trace, if it is known."""
    activity = activity or activity_of(trace)
    launch = launches_of(trace) if len(trace.device) else None
    computes = np.isin(activity.kind, (GEMM, COMPUTE))
    if launch is None:
        moments = activity.events[np.flatnonzero(computes)]
    else:
        moments = trace.launches[launch[computes & (launch >= 0)]]
    places = Places(trace, moments)
    steps = [span._replace(startup=span.number in startup) for span in iteration_spans(activity)]
    apart = any(first.end_ns < second.start_ns for first, second in pairwise(steps))
    calls = list(calls_of(trace, activity, launch, places))
    calls.sort(key=lambda call: (call.start_ns, call.end_ns))
    names, grids, work = _work(trace, activity, launch)
    copies = activity.events[np.flatnonzero(activity.kind == MEMORY)].intervals
    return RankFacts(
        rank=trace.rank,
        world_size=trace.world_size,
        on_device=launch is not None,
        base_time_ns=trace.base_time_ns,
        steps=steps,
        work=work,
        copies=copies,
        calls=calls,
        waits=list(waits_of(trace, places, apart=apart)),
        groups=groups_of(trace, calls),
        known_groups=[group_of(name, None, group) for name, group in trace.groups.items()],
        names=names,
        grids=grids,
        lanes=trace.lanes,
        libraries=frozenset(
            library for library, pattern in LIBRARIES.items() if any(pattern.search(name) for _, name in trace.labels)
        ),
        # A thread of its own that fetches ahead holds nobody up.
        loading=_named(trace, LOADING, moments.lane),
        optimizer_steps=_named(trace, _OPTIMIZER_STEP),
        backward_passes=places.backward_passes(),
        pauses=list(pauses_of(trace, moments.lane)),
        stalls=[] if launch is None else list(stalls_of(trace, activity, launch)),
        stream_events=list(stream_events_of(trace)),
        copied=_copied(activity),
        device_name=trace.device_name,
        nccl_version=trace.nccl_version,
    )


def _copied(activity: Activity) -> list[tuple[int, str, int]]:
    chosen = np.flatnonzero(activity.kind == MEMORY)
    steps, labels = activity.assignment.iteration[chosen].tolist(), activity.events.label[chosen].tolist()
    counts = Counter(zip(steps, labels, strict=True))
    return [(step, activity.labels[label][1], count) for (step, label), count in sorted(counts.items())]


def _named(trace: Trace, pattern: re.Pattern[str], threads: NDArray[np.int32] | None = None) -> Intervals:
    """Returns the union of the host's events whose names begin with the pattern, on these threads or all."""
    own = trace.host[trace.is_named(trace.host, pattern)]
    return merge((own if threads is None else own[np.isin(own.lane, threads)]).intervals)


def _work(trace: Trace, activity: Activity, launch: NDArray[np.intp] | None) -> tuple[list[str], list[int], Work]:
    events = activity.events
    chosen = np.flatnonzero(np.isin(activity.kind, (GEMM, COMPUTE)))
    chosen = chosen[np.argsort(events.start_ns[chosen], kind="stable")]
    own = events[chosen]
    pairs = own.label.astype(np.int64) << 32 | own.detail
    known, signature = np.unique(pairs, return_inverse=True)
    launched = own.start_ns if launch is None else launched_ns(trace, launch[chosen], own.start_ns)
    names = [activity.labels[pair >> 32][1] for pair in known.tolist()]
    grids = [blocks_and_threads(trace.details[pair & 0xFFFFFFFF])[0] or 0 for pair in known.tolist()]
    return (
        names,
        grids,
        Work(
            start_ns=own.start_ns,
            end_ns=own.end_ns,
            launch_ns=launched,
            lane=own.lane,
            is_gemm=activity.kind[chosen] == GEMM,
            signature=signature.astype(np.int32),
            pass_=activity.assignment.pass_[chosen],
            step=activity.assignment.iteration[chosen],
        ),
    )


def steps_in_a_row(facts: Sequence[RankFacts]) -> list[int]:
    """Returns the last of the steady steps that all ranks have and between which none runs what is in no step, as
    benchmarks do that let GPUs rest."""
    numbers = [number for number in facts[0].steady_steps if all(number in one.steady_steps for one in facts)]
    spans = [{span.number: span for span in one.steps} for one in facts]
    apart = (
        place
        for place, (before, after) in enumerate(pairwise(numbers), start=1)
        if any(of_rank[before].end_ns < of_rank[after].start_ns for of_rank in spans)
    )
    return numbers[max(apart, default=0) :]


def size_of(rank: RankFacts, call: Call) -> int | None:
    """Returns the number of ranks in the call's group, if need be from its sizes."""
    group = rank.groups.get(call.group)
    known = (group.size if group else None) or call.group_size
    if known or not call.sent or not call.received:
        return known
    larger, smaller = max(call.sent, call.received), min(call.sent, call.received)
    return larger // smaller if call.collective in ("all_gather", "reduce_scatter") else None


def place_of(facts: RankFacts, call: Call) -> Place:
    """Returns where a call's communication goes: to its peer, or to all ranks of its process group; all groups of its
    size that the rank belongs to must agree where the trace does not name it. Rank r is on node r // ranks per node."""
    per_node, world_size = facts.ranks_per_node, facts.world_size
    if per_node is None:
        return ""
    if world_size is not None and world_size <= per_node:
        return "within"
    if facts.rank is not None and call.peer is not None:
        return _place_of_ranks((facts.rank, call.peer), per_node)
    size = size_of(facts, call)
    if size == 1 or (not call.group and call.library in _PEER_MEMORY):
        return "within"
    if per_node == 1:
        return "between"
    groups = [facts.groups[call.group]] if call.group in facts.groups else []
    if not call.group:
        own = (group for group in facts.known_groups if not group.ranks or facts.rank in (None, *group.ranks))
        groups = [group for group in own if group.size != 1 and size in (None, group.size)]
    # Without any, its size may show that it has more ranks than a node.
    places = {_place_of_group(group, facts, per_node, call) for group in groups or [Group("", "", (), size)]}
    return places.pop() if len(places) == 1 else ""


def _place_of_group(group: Group, facts: RankFacts, per_node: int, call: Call) -> Place:
    size = group.size or 0
    # A trace cuts the list of a large group's ranks.
    ranks = group.ranks or (range(size) if size == facts.world_size else ())
    if ranks and _place_of_ranks(ranks, per_node) == "within":
        return "within"
    if call.is_message and size != 2:
        # Two of its ranks, but not which.
        return ""
    return "between" if ranks or size > per_node else ""


def _place_of_ranks(ranks: Iterable[int], per_node: int) -> Place:
    return "within" if len({rank // per_node for rank in ranks}) == 1 else "between"
