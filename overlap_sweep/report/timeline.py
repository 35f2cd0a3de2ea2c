"""Merges the traces of a run's ranks into one timeline for Perfetto and chrome://tracing: a process per rank, with
tracks for iterations, passes and each kind of kernels."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from overlap_sweep.errors import UserError
from overlap_sweep.report.numbers import PASS_WORDS, some_of
from overlap_sweep.trace.activity import COMM, COMPUTE, GEMM, MEMORY, PHASE_OF_PASS, WAIT, Activity, activity_of
from overlap_sweep.trace.columns import Trace
from overlap_sweep.trace.disk import TIMELINE_MARK
from overlap_sweep.trace.intervals import intersect, merge, rows_without_overlap
from overlap_sweep.trace.iterations import PhaseEvents, phases_of
from overlap_sweep.trace.kernel_classes import function_name
from overlap_sweep.trace.kineto import read_trace

WHOLE = "all"
"""The phase of the whole iteration."""
COUNTER = "GEMM and communication overlap"
KINDS = {
    GEMM: ("GEMM", "gemm", "thread_state_running"),
    COMPUTE: ("computation", "compute", "rail_response"),
    COMM: ("communication", "comm", "thread_state_iowait"),
    WAIT: ("wait", "wait", "grey"),
    MEMORY: ("copies", "memory", "rail_load"),
}
"""Kinds from top to bottom: title, category, and a colour of chrome://tracing; Perfetto colours by name."""
RANKS_NAMED = 16


class _Span(NamedTuple):
    """A span on a track, in the trace's own nanoseconds; the other fields are the event's."""

    start_ns: int
    end_ns: int
    name: str
    cat: str
    cname: str
    args: dict[str, str | int]


@dataclass(frozen=True)
class RankTimeline:
    """One rank's work."""

    path: Path
    trace: Trace
    activity: Activity
    phases: dict[int, dict[str, PhaseEvents]]
    """By iteration and phase."""

    @property
    def rank(self) -> int | None:
        return self.trace.rank

    def span_ns(self, iteration: int, phase: str = WHOLE) -> tuple[int, int]:
        """Returns start and end in the trace's own nanoseconds."""
        return self.phases[iteration][phase].span_ns


@dataclass(frozen=True)
class Timeline:
    """A trace of all ranks."""

    content: bytes
    """JSON."""
    spans: int
    iterations: list[int]
    notes: list[str]
    """Sentences on missing ranks and on ranks that were aligned without a common clock."""


class _Event(msgspec.Struct, omit_defaults=True):
    """An event of Chrome's trace format."""

    ph: str
    pid: int
    tid: int
    name: str
    ts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    dur: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cat: str = ""
    cname: str = ""
    args: dict[str, str | int] = {}


def read_rank(path: Path) -> RankTimeline:
    """Returns one rank's work. UserError when it cannot be read or has no iteration."""
    trace = read_trace(path)
    activity = activity_of(trace)
    phases: dict[int, dict[str, PhaseEvents]] = {}
    for phase in phases_of(activity):
        phases.setdefault(phase.iteration, {})[phase.phase] = phase
    if not phases:
        raise UserError(f"{path} has no work inside its iterations; profile at least one forward pass.")
    return RankTimeline(path, trace, activity, phases)


def build(ranks: Sequence[RankTimeline], iteration: int | None = None) -> Timeline:
    """Returns the timeline of all iterations or of one. UserError for two traces of one rank or an unknown
    iteration."""
    seen: dict[int, RankTimeline] = {}
    for rank in ranks:
        if rank.rank is not None and (other := seen.setdefault(rank.rank, rank)) is not rank:
            raise UserError(f"{other.path} and {rank.path} are both of rank {rank.rank}; give the traces of one run.")
    ordered = sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0))
    wanted = sorted({number for rank in ordered for number in rank.phases})
    if iteration is not None:
        if iteration not in wanted:
            raise UserError(
                f"There is no iteration {iteration}; choose one of {', '.join(map(str, wanted[:20]))}, or all."
            )
        wanted = [iteration]
    shifts, notes = _shifts_ns(ordered)
    numbers = [[number for number in wanted if number in rank.phases] for rank in ordered]
    first_ns = min(
        rank.span_ns(number)[0] + shift
        for rank, shift, own in zip(ordered, shifts, numbers, strict=True)
        for number in own
    )
    tids = itertools.count(1)
    events = [
        event
        for pid, (rank, shift, own) in enumerate(zip(ordered, shifts, numbers, strict=True), start=1)
        for event in _events(rank, pid, tids, first_ns - shift, own)
    ]
    document = {
        # First in the file, so that it is found without reading the rest.
        "otherData": {"made_by": TIMELINE_MARK, "traces": [str(rank.path) for rank in ordered]},
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }
    return Timeline(
        content=msgspec.json.encode(document),
        spans=sum("kernel" in event.args for event in events),
        iterations=wanted,
        notes=[*_missing_ranks(ordered), *notes],
    )


def _missing_ranks(ranks: Sequence[RankTimeline]) -> list[str]:
    sizes = {rank.trace.world_size for rank in ranks if rank.trace.world_size}
    if len(sizes) > 1:
        return [f"The traces record runs of {' and '.join(map(str, sorted(sizes)))} ranks; give the traces of one run."]
    if not sizes or any(rank.rank is None for rank in ranks):
        return []
    (size,) = sizes
    missing = sorted(set(range(size)) - {rank.rank for rank in ranks})
    are = "are" if len(missing) > 1 else "is"
    return [f"{len(missing)} of {size} ranks {are} missing: {some_of(missing, RANKS_NAMED)}."] if missing else []


def _shifts_ns(ranks: Sequence[RankTimeline]) -> tuple[list[int], list[str]]:
    """Returns the shift of each rank's times onto a common clock, and a note if there is no common clock."""
    common = sorted(set.intersection(*(set(rank.phases) for rank in ranks)))
    spans_ns = [rank.span_ns(common[0] if common else min(rank.phases)) for rank in ranks]
    bases_ns = [rank.trace.base_time_ns for rank in ranks]
    starts_ns, ends_ns = (np.array(spans_ns) + np.array(bases_ns)[:, None]).T
    same_base = all(bases_ns) or not any(bases_ns)
    # Ranks that communicate work on the same iteration at the same time.
    if len(ranks) == 1 or (common and same_base and starts_ns.max() < ends_ns.min()):
        return bases_ns, []
    start = f"iteration {common[0]}" if common else "each rank's first iteration"
    note = f"The ranks have no common clock: aligned at the start of {start}, so skew between ranks is not shown."
    return [-start_ns for start_ns, _ in spans_ns], [note]


def _events(
    rank: RankTimeline, pid: int, tids: Iterator[int], origin_ns: int, iterations: Sequence[int]
) -> Iterator[_Event]:
    """Yields a rank's events. `origin_ns`: start of the timeline in the rank's own nanoseconds."""
    name = rank.path.name if rank.rank is None else f"rank {rank.rank}"
    devices = sorted({rank.activity.lanes[lane][0] for lane in np.unique(rank.activity.events.lane)})
    device = f"device {', '.join(devices)}" if len(rank.trace.device) else "CPU"
    yield _Event("M", pid, 0, "process_name", args={"name": f"{name} ({device})"})
    yield _Event("M", pid, 0, "process_sort_index", args={"sort_index": pid - 1})
    if not iterations:
        return
    chosen = np.unique(np.concatenate([rank.phases[iteration][WHOLE].events for iteration in iterations]))
    for title, spans in _tracks(rank, iterations, chosen):
        tid = next(tids)
        yield _Event("M", pid, tid, "thread_name", args={"name": title})
        yield _Event("M", pid, tid, "thread_sort_index", args={"sort_index": tid})
        for span in spans:
            start, took = _us(span.start_ns - origin_ns), _us(span.end_ns - span.start_ns)
            yield _Event("X", pid, tid, span.name, start, took, span.cat, span.cname, span.args)
    intervals, kind = rank.activity.events.intervals[chosen], rank.activity.kind[chosen]
    for start_ns, end_ns in intersect(merge(intervals[kind == GEMM]), merge(intervals[kind == COMM])).tolist():
        yield _Event("C", pid, 0, COUNTER, _us(start_ns - origin_ns), args={"both": 1})
        yield _Event("C", pid, 0, COUNTER, _us(end_ns - origin_ns), args={"both": 0})


def _us(nanoseconds: int) -> msgspec.Raw:
    """Returns microseconds with exactly three decimals, which a float could not guarantee."""
    sign = "-" if nanoseconds < 0 else ""
    return msgspec.Raw(f"{sign}{abs(nanoseconds) // 1000}.{abs(nanoseconds) % 1000:03d}".encode())


def _tracks(
    rank: RankTimeline, iterations: Sequence[int], chosen: NDArray[np.intp]
) -> Iterator[tuple[str, list[_Span]]]:
    """Yields tracks as titles with spans sorted by start; overlapping spans go to further tracks."""
    whole = [_Span(*rank.span_ns(number), f"iteration {number}", "iteration", "", {}) for number in iterations]
    passes = [
        _Span(*rank.span_ns(number, phase), name, "pass", "", {"iteration": number})
        for number in iterations
        for phase, name in PASS_WORDS.items()
        if phase in rank.phases[number]
    ]
    kernels = (
        (title, [_kernel(rank, int(i), *drawn) for i in chosen[rank.activity.kind[chosen] == kind]])
        for kind, (title, *drawn) in KINDS.items()
    )
    for title, spans in (("iterations", whole), ("passes", passes), *kernels):
        ordered = sorted(spans, key=lambda span: span[:2])
        for number, row in enumerate(rows_without_overlap(span[:2] for span in ordered), start=1):
            yield title if number == 1 else f"{title} ({number})", [ordered[i] for i in row]


def _kernel(rank: RankTimeline, event: int, category: str, colour: str) -> _Span:
    activity, events = rank.activity, rank.activity.events
    source, name = activity.labels[events.label[event]]
    short = (function_name(name) if source == "kernel" else name) or name
    args: dict[str, str | int] = {
        "kernel": name,
        "library": activity.classes[int(events.label[event])].library,
        "stream": activity.lanes[events.lane[event]][1],
        "phase": PHASE_OF_PASS.get(int(activity.assignment.pass_[event]), ""),
        "iteration": int(activity.assignment.iteration[event]),
    }
    return _Span(int(events.start_ns[event]), int(events.end_ns[event]), short, category, colour, args)
