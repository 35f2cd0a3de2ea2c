"""Timelines from traces: a typical iteration of one variant above that of another, on the same time axis."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from overlap_sweep.cache import cached_bytes
from overlap_sweep.errors import UserError
from overlap_sweep.report.charts import Extent, Gantt, GanttBar, Group, Lane
from overlap_sweep.report.numbers import PASS_WORDS, as_us
from overlap_sweep.trace import spans
from overlap_sweep.trace.intervals import rows_without_overlap
from overlap_sweep.trace.kernel_classes import function_name
from overlap_sweep.trace.spans import Iteration, Span, typical_iteration

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
        iteration = _iteration(side.trace)
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
    """Empty where a lane has several."""
    streams = {(span.process, span.stream) for span in row}
    if len(streams) > 1:
        return ""
    ((_, stream),) = streams
    return f", {stream}" if not stream.isdecimal() else f", stream {stream}"


def _packed(shown: Sequence[Span]) -> list[list[Span]]:
    return [[shown[i] for i in row] for row in rows_without_overlap((s.start_us, s.end_us) for s in shown)]


def _by_stream(shown: Sequence[Span]) -> list[list[Span]]:
    """What overlaps within its stream, as operators of a CPU's threads may, gets a lane more."""
    by_stream: dict[tuple[str, str], list[Span]] = {}
    for span in shown:
        by_stream.setdefault((span.process, span.stream), []).append(span)
    return [row for stream in by_stream.values() for row in _packed(stream)]


def _iteration(path: Path) -> Iteration | None:
    """None where the trace cannot be read, which analysis has said already. Kept, since reading takes a while."""

    def read() -> bytes:
        return msgspec.json.encode(typical_iteration(path))

    try:
        key = hashlib.sha256(path.read_bytes()).digest() + _reader_digest()
        return msgspec.json.decode(cached_bytes("timelines", key, read), type=Iteration)
    except (UserError, OSError):
        return None


@cache
def _reader_digest() -> bytes:
    """Of all that decides what is read from a trace."""
    digest = hashlib.sha256()
    for path in sorted(Path(spans.__file__).parent.iterdir()):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.digest()


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
