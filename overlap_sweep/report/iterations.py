"""Timelines from traces: typical iterations of several variants below each other on one time axis."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from overlap_sweep.cache import cached_bytes
from overlap_sweep.errors import UserError
from overlap_sweep.report import charts
from overlap_sweep.report.numbers import PASS_WORDS, as_us
from overlap_sweep.trace import startup_iterations
from overlap_sweep.trace.files import key_of
from overlap_sweep.trace.kernel_classes import Kind, function_name

if TYPE_CHECKING:
    from overlap_sweep.trace.activity import Activity
    from overlap_sweep.trace.intervals import Intervals
    from overlap_sweep.trace.iterations import PhaseEvents

CLASSES = {
    "gemm": "GEMM",
    "comm": "communication",
    "wait": "waiting",
    "compute": "other computation",
    "memory": "copies",
}
"""Classes from top to bottom: name of the colour, and name of the lane."""
MOST_SPANS = 800
"""Most spans drawn of one iteration: the longest."""
LONGEST_NAME = 90


@dataclass(frozen=True)
class Span:
    """One kernel or copy, or on a CPU one operator. Times in microseconds from the start of the iteration."""

    start_us: float
    end_us: float
    process: str
    """The device, or on a CPU the process."""
    stream: str
    """The stream, or on a CPU the thread."""
    kind: Kind
    library: str
    name: str
    phase: str
    """`fwd`, `bwd`, `recompute`, or empty if it belongs to neither pass."""


@dataclass(frozen=True)
class Iteration:
    """The spans of one rank in one iteration, sorted by start."""

    rank: int | None
    number: int
    spans: list[Span]


@dataclass(frozen=True)
class Timeline:
    chart: charts.Gantt
    notes: list[str]
    """A sentence for each variant that is missing."""


def timeline(
    title: str, sides: Mapping[str, Path | None], pass_name: str | None = None, *, by_stream: bool = False
) -> Timeline | None:
    """Returns typical iterations below each other, or one pass of them; None if there is no trace. `sides`: traces by
    name of the variant; `by_stream`: with a lane per stream and one for exposed communication, instead of one per class
    of kernels."""
    lanes: list[charts.Lane] = []
    notes = []
    for name, trace in sides.items():
        iteration = _cached_iteration(trace) if trace else None
        shown = [span for span in iteration.spans if pass_name in (None, span.phase)] if iteration else []
        if not iteration or not shown:
            notes.append(f"Trace missing: {name}.")
        elif by_stream:
            rank = "" if iteration.rank is None else f"rank {iteration.rank}, "
            lanes += _stream_lanes(f"{name}: {rank}step {iteration.number}", shown)
        else:
            lanes += _lanes(name, shown)
    return Timeline(charts.Gantt(title, "us", lanes), notes) if lanes else None


COLLECTIVES = {
    "all-gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce-scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all-reduce": re.compile(r"all_?reduce", re.IGNORECASE),
}
"""Patterns of the names of kernels, or on a CPU of operators."""


def _stream_lanes(title: str, spans: Sequence[Span]) -> Iterator[charts.Lane]:
    from overlap_sweep.trace.intervals import rows_without_overlap

    # Kernels of one pass may run late, during the other: a pass is where its GEMMs run.
    yield _passes(title, [span for span in spans if span.kind == "gemm"] or spans, 0.0, with_times=False)
    streams: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in _longest(spans):
        streams[span.process, span.stream].append(span)
    for (_, stream), own in sorted(streams.items(), key=lambda item: (_carries(item[1]) != "compute", item[0])):
        for row in rows_without_overlap((span.start_us, span.end_us) for span in own):
            yield charts.Lane(f"{_carries(own)}, stream {stream}", [_drawn(own[i], 0.0) for i in row])
    exposed = _exposed_us(spans)
    total = f"{as_us(sum(end - start for start, end in exposed))} us"
    details = {"class": "exposed communication", "in all": total}
    drawn = [
        charts.Span(start, end, "bad", details=details | {"takes": f"{as_us(end - start)} us"})
        for start, end in exposed
    ]
    yield charts.Lane(f"exposed, {total}", drawn)


def _carries(spans: Sequence[Span]) -> str:
    """Returns the kind of work that takes most of a stream's time."""
    busy_us: dict[str, float] = defaultdict(float)
    for span in spans:
        kind = "compute" if span.kind in ("gemm", "compute") else CLASSES[span.kind]
        if span.kind == "comm":
            kind = next((name for name, known in COLLECTIVES.items() if known.search(span.name)), kind)
        busy_us[kind] += span.end_us - span.start_us
    return max(busy_us, key=lambda kind: busy_us[kind])


def _exposed_us(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Returns the intervals in which communication runs while nothing computes."""
    import numpy as np

    from overlap_sweep.trace.intervals import merge, subtract

    def union_of(*kinds: Kind) -> Intervals:
        own = [(round(span.start_us * 1e3), round(span.end_us * 1e3)) for span in spans if span.kind in kinds]
        return merge(np.array(own, np.int64).reshape(-1, 2))

    return [(start / 1e3, end / 1e3) for start, end in subtract(union_of("comm"), union_of("gemm", "compute")).tolist()]


def typical_iteration(path: Path | str) -> Iteration:
    """Returns the iteration of (lower) median time, without start-up. UserError when there is none."""
    from overlap_sweep.trace.activity import activity_of
    from overlap_sweep.trace.iterations import overlap_rows, phases_of
    from overlap_sweep.trace.kineto import read_trace

    trace = read_trace(path)
    activity = activity_of(trace)
    rows = overlap_rows(activity, str(path), trace.rank)
    startup = startup_iterations(rows)
    steady = [row for row in rows if row.phase == "all" and row.iteration not in startup]
    _, number = sorted((row.active_us, row.iteration) for row in steady)[(len(steady) - 1) // 2]
    whole = next(phase for phase in phases_of(activity) if (phase.iteration, phase.phase) == (number, "all"))
    return Iteration(trace.rank, number, _spans(activity, whole))


def _spans(activity: Activity, whole: PhaseEvents) -> list[Span]:
    import numpy as np

    from overlap_sweep.trace.activity import KINDS, PHASE_OF_PASS

    events, assigned = activity.events, activity.assignment
    order = np.argsort(whole.intervals[:, 0], kind="stable")
    times_us = (whole.intervals[order] - whole.span_ns[0]) / 1000
    return [
        Span(
            start_us=start_us,
            end_us=end_us,
            process=activity.lanes[events.lane[i]][0],
            stream=activity.lanes[events.lane[i]][1],
            kind=KINDS[activity.kind[i]],
            library=activity.classes[int(events.label[i])].library,
            name=activity.labels[events.label[i]][1],
            phase=PHASE_OF_PASS.get(int(assigned.pass_[i]), ""),
        )
        for i, (start_us, end_us) in zip(whole.events[order], times_us.tolist(), strict=True)
    ]


def _cached_iteration(path: Path) -> Iteration | None:
    """Returns the typical iteration from the cache or the trace; None if the trace cannot be read, which analysis
    reports."""
    content = key_of(path)
    if content is None:
        return None
    try:
        # The cached content also depends on this module.
        key = f"{content} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"
        made = cached_bytes("timelines", key, lambda: msgspec.json.encode(typical_iteration(path)))
        return msgspec.json.decode(made, type=Iteration)
    except UserError:
        return None


def _lanes(title: str, shown: Sequence[Span]) -> Iterator[charts.Lane]:
    """Yields the passes, then as many lanes per class as run at the same time; times count from the first start."""
    from overlap_sweep.trace.intervals import rows_without_overlap

    origin_us = min(span.start_us for span in shown)
    yield _passes(title, shown, origin_us)
    longest = _longest(shown)
    for kind, name in CLASSES.items():
        own = [span for span in longest if span.kind == kind]
        for row in rows_without_overlap((span.start_us, span.end_us) for span in own):
            yield charts.Lane(name, [_drawn(own[i], origin_us) for i in row])


def _longest(spans: Sequence[Span]) -> list[Span]:
    longest = sorted(range(len(spans)), key=lambda i: spans[i].start_us - spans[i].end_us)[:MOST_SPANS]
    return [spans[i] for i in sorted(longest)]


def _passes(title: str, shown: Sequence[Span], origin_us: float, *, with_times: bool = True) -> charts.Lane:
    """Returns the lane of the passes, whose name is the title of the lanes below it."""
    passes = []
    for name, words in PASS_WORDS.items():
        if own := [span for span in shown if span.phase == name]:
            start_us, end_us = min(span.start_us for span in own), max(span.end_us for span in own)
            took = f"{words} {as_us(end_us - start_us)} us" if with_times else words
            passes.append(charts.Span(start_us - origin_us, end_us - origin_us, "faint", took))
    return charts.Lane(title, passes, bold=True)


def _drawn(span: Span, origin_us: float) -> charts.Span:
    start, end = round(span.start_us - origin_us, 2), round(span.end_us - origin_us, 2)
    details = {
        "runs": (function_name(span.name) or span.name)[:LONGEST_NAME],
        "class": CLASSES[span.kind],
        "stream": span.stream,
        "takes": f"{as_us(end - start)} us",
        "from": f"{as_us(start)} to {as_us(end)} us",
    }
    return charts.Span(start, end, span.kind, details=details)
