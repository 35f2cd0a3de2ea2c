"""Timelines from traces: a typical iteration of one variant above that of another, on the same time axis."""

from __future__ import annotations

import hashlib
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

CLASSES = {
    "gemm": "GEMM",
    "comm": "communication",
    "wait": "waiting",
    "compute": "other computation",
    "memory": "copies",
}
"""What is drawn, from top to bottom, in the colour of that name, and what a lane of it is called."""
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
class Timeline:
    chart: charts.Gantt
    notes: list[str]
    """What is missing."""


def timeline(title: str, sides: Mapping[str, Path | None], pass_name: str | None = None) -> Timeline | None:
    """Returns the iterations below each other, or one pass of them; None where no trace shows any. `sides`: the traces
    by what they are of."""
    lanes: list[charts.Lane] = []
    notes = []
    for name, trace in sides.items():
        iteration = _kept_iteration(trace) if trace else None
        shown = [span for span in iteration.spans if pass_name in (None, span.phase)] if iteration else []
        if shown:
            lanes += _lanes(name, shown)
        else:
            notes.append(f"No trace shows {name}.")
    return Timeline(charts.Gantt(title, "us", lanes), notes) if lanes else None


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
    """Returns the typical iteration, read once; None where the trace cannot be read, which analysis has reported."""
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


def _lanes(title: str, shown: Sequence[Span]) -> Iterator[charts.Lane]:
    """Yields the passes, then lanes by class, as many as it needs to draw what runs at once, with times from the first
    start on."""
    from overlap_sweep.trace.intervals import rows_without_overlap

    origin_us = min(span.start_us for span in shown)
    passes = []
    for name, words in PASS_WORDS.items():
        if own := [span for span in shown if span.phase == name]:
            start_us, end_us = min(span.start_us for span in own), max(span.end_us for span in own)
            took = f"{words} {as_us(end_us - start_us)} us"
            passes.append(charts.Span(start_us - origin_us, end_us - origin_us, "faint", took))
    yield charts.Lane(title, passes, bold=True)
    longest = sorted(shown, key=lambda span: span.start_us - span.end_us)[:MOST_SPANS]
    for kind, name in CLASSES.items():
        of_kind = sorted((span for span in longest if span.kind == kind), key=lambda span: span.start_us)
        for row in rows_without_overlap((span.start_us, span.end_us) for span in of_kind):
            yield charts.Lane(name, [_drawn(of_kind[i], origin_us) for i in row])


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
