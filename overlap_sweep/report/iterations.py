"""Timelines from traces: a typical iteration of one variant above that of another, on the same time axis."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from overlap_sweep.cache import cached_bytes
from overlap_sweep.errors import UserError
from overlap_sweep.report.charts import Extent, Gantt, GanttBar, Group, Lane
from overlap_sweep.report.numbers import PASS_WORDS, as_us
from overlap_sweep.trace import startup_iterations
from overlap_sweep.trace.files import key_of
from overlap_sweep.trace.kernel_classes import Kind, function_name

if TYPE_CHECKING:
    from overlap_sweep.trace.activity import Activity

CLASSES = {
    "gemm": "GEMM",
    "comm": "communication",
    "wait": "waiting",
    "compute": "other computation",
    "memory": "copies",
}
"""What is drawn, from top to bottom, in the colour of that name, and what a lane of it is called."""
MOST_STREAMS = 6
"""With more of them lanes are packed: userbuffers use dozens."""
AT_ONCE_US = 1.0
"""From which on a GEMM and communication are said to run at once; less is how two kernels meet."""
INDEPENDENT = (
    "Without overlap, too, a GEMM and communication run at once here: such as do not depend on each other, for example "
    "the GEMM of the weight gradient and the reduce-scatter of the input gradient. What depends on each other runs one "
    "after the other."
)
"""What to know of the upper half."""
MOST_SPANS = 800
"""Drawn of one iteration: the longest."""
LONGEST_NAME = 90


@dataclass(frozen=True)
class Span:
    """One kernel or copy, or on a CPU one operator. Microseconds from the iteration's first start."""

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
    """`fwd`, `bwd`, `recompute`, or empty for what belongs to neither pass."""


@dataclass(frozen=True)
class Iteration:
    """What one rank did in one iteration, by start."""

    rank: int | None
    number: int
    spans: list[Span]


@dataclass(frozen=True)
class Side:
    """What one half is taken from; no trace, no half."""

    title: str
    trace: Path | None


@dataclass(frozen=True)
class Timeline:
    chart: Gantt
    notes: list[str]
    """What is missing, and why."""


def timeline(title: str, none: Side, best: Side, pass_name: str | None = None) -> Timeline | None:
    """Returns the iteration without overlap above the best, or of both one pass; None where no trace shows any."""
    groups, notes = [], []
    for side in (none, best):
        if side.trace is None:
            notes.append(f"Of {side.title} there is no trace to draw beside it.")
            continue
        iteration = _kept_iteration(side.trace)
        if iteration is None:
            notes.append(f"{side.trace.name} of {side.title} cannot be read.")
            continue
        shown = [span for span in iteration.spans if pass_name in (None, span.phase)]
        if not shown:
            notes.append(f"The trace of {side.title} shows nothing of this pass.")
            continue
        longest = sorted(shown, key=lambda span: span.start_us - span.end_us)[:MOST_SPANS]
        groups.append(_group(side.title, shown, longest))
        if side is none and at_once_us(shown) > AT_ONCE_US:
            notes.append(INDEPENDENT)
        if len(longest) < len(shown):
            notes.append(f"{side.title}: the {len(shown) - len(longest)} shortest spans are left out.")
    return Timeline(Gantt(title, "us", groups), notes) if groups else None


def lanes(shown: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Returns names and spans by class, and within a class by stream or, of many streams, in the first lane where there
    is room."""
    drawn = [span for span in shown if span.kind in CLASSES]
    packed = len({(span.process, span.stream) for span in drawn}) > MOST_STREAMS
    found = []
    for kind, name in CLASSES.items():
        of_kind = sorted((span for span in drawn if span.kind == kind), key=lambda span: span.start_us)
        rows = _packed(of_kind) if packed else _by_stream(of_kind)
        found += [(f"{f'{name} {i}' if i > 1 else name}{_stream_name(row)}", row) for i, row in enumerate(rows, 1)]
    return found


def at_once_us(shown: Sequence[Span]) -> float:
    """Returns for how long some GEMM and some communication run at the same time, summed over their pairs."""
    gemms, comms = ([span for span in shown if span.kind == kind] for kind in ("gemm", "comm"))
    return sum(
        max(0.0, min(gemm.end_us, comm.end_us) - max(gemm.start_us, comm.start_us)) for gemm in gemms for comm in comms
    )


def _stream_name(row: Sequence[Span]) -> str:
    """Returns what a lane is called by its stream; empty where it has several."""
    streams = {(span.process, span.stream) for span in row}
    if len(streams) > 1:
        return ""
    ((_, stream),) = streams
    return f", {stream}" if not stream.isdecimal() else f", stream {stream}"


def _packed(shown: Sequence[Span]) -> list[list[Span]]:
    from overlap_sweep.trace.intervals import rows_without_overlap

    return [[shown[i] for i in row] for row in rows_without_overlap((s.start_us, s.end_us) for s in shown)]


def _by_stream(shown: Sequence[Span]) -> list[list[Span]]:
    """Returns lanes by stream; what overlaps within one, as operators of a CPU's threads may, gets a lane more."""
    by_stream: dict[tuple[str, str], list[Span]] = {}
    for span in shown:
        by_stream.setdefault((span.process, span.stream), []).append(span)
    return [row for stream in by_stream.values() for row in _packed(stream)]


def typical_iteration(path: Path | str) -> Iteration:
    """Returns the iteration whose span is the (lower) median of those that are no start-up. UserError when there is
    none."""
    from overlap_sweep.trace.activity import activity_of
    from overlap_sweep.trace.kineto import read_trace
    from overlap_sweep.trace.measured import overlap_rows

    trace = read_trace(path)
    activity = activity_of(trace)
    rows = overlap_rows(activity, str(path), trace.rank)
    startup = startup_iterations(rows)
    whole = sorted((row.span_us, row.iteration) for row in rows if row.phase == "all" and row.iteration not in startup)
    number = whole[(len(whole) - 1) // 2][1]
    return Iteration(trace.rank, number, _spans(activity, number))


def _spans(activity: Activity, number: int) -> list[Span]:
    import numpy as np

    from overlap_sweep.trace.activity import KINDS, PHASE_OF_PASS

    events, assigned = activity.events, activity.assignment
    chosen = np.flatnonzero(assigned.iteration == number)
    chosen = chosen[np.argsort(events.start_ns[chosen], kind="stable")]
    origin_ns = events.start_ns[chosen[0]]
    return [
        Span(
            start_us=int(events.start_ns[i] - origin_ns) / 1000,
            end_us=int(events.end_ns[i] - origin_ns) / 1000,
            process=activity.lanes[events.lane[i]][0],
            stream=activity.lanes[events.lane[i]][1],
            kind=KINDS[activity.kind[i]],
            library=activity.classes[int(events.label[i])].library,
            name=activity.labels[events.label[i]][1],
            phase=PHASE_OF_PASS.get(int(assigned.pass_[i]), ""),
        )
        for i in chosen
    ]


def _kept_iteration(path: Path) -> Iteration | None:
    """Returns the typical iteration, read once; None where the trace cannot be read, as analysis has said already."""
    content = key_of(path)
    if content is None:
        return None
    try:
        # What is kept depends on this module, too.
        key = f"{content} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"
        made = cached_bytes("timelines", key, lambda: msgspec.json.encode(typical_iteration(path)))
        return msgspec.json.decode(made, type=Iteration)
    except UserError:
        return None


def _group(title: str, shown: Sequence[Span], longest: Sequence[Span]) -> Group:
    """Returns the iteration with times from its first start on."""
    origin_us = min(span.start_us for span in shown)
    drawn = [
        Lane(
            name,
            [
                GanttBar(
                    start := round(span.start_us - origin_us, 2),
                    end := round(span.end_us - origin_us, 2),
                    span.kind,
                    {
                        "runs": (function_name(span.name) or span.name)[:LONGEST_NAME],
                        "class": CLASSES[span.kind],
                        "stream": span.stream,
                        "takes": f"{as_us(end - start)} us",
                        "from": f"{as_us(start)} to {as_us(end)} us",
                    },
                )
                for span in row
            ],
        )
        for name, row in lanes(longest)
    ]
    extents = []
    for name, words in PASS_WORDS.items():
        own = [span for span in shown if span.phase == name]
        if own:
            start_us, end_us = min(span.start_us for span in own), max(span.end_us for span in own)
            text = f"{words} {as_us(end_us - start_us)} us"
            extents.append(Extent(round(start_us - origin_us, 2), round(end_us - origin_us, 2), text))
    return Group(title, drawn, extents)
