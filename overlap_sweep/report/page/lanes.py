"""Spans as rows of a timeline: a row for each stream, or where there are too many, as few as hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap_sweep.trace.intervals import rows_without_overlap
from overlap_sweep.trace.spans import Span

CLASSES = {
    "gemm": "GEMM",
    "comm": "communication",
    "wait": "waiting",
    "compute": "other computation",
    "memory": "copies",
}
"""What is drawn, from top to bottom, and what a row of it is called."""
MOST_STREAMS = 6
"""With more of them rows are packed: userbuffers use dozens."""


@dataclass(frozen=True)
class Lane:
    name: str
    spans: list[Span]


def lanes(spans: Sequence[Span]) -> list[Lane]:
    """By class, and within a class by stream or, of many streams, the first row where there is room."""
    drawn = [span for span in spans if span.kind in CLASSES]
    packed = len({(span.process, span.stream) for span in drawn}) > MOST_STREAMS
    found = []
    for kind, name in CLASSES.items():
        of_kind = sorted((span for span in drawn if span.kind == kind), key=lambda span: span.start_us)
        rows = _packed(of_kind) if packed else _by_stream(of_kind)
        found += [Lane(f"{f'{name} {i}' if i > 1 else name}{_of_stream(row)}", row) for i, row in enumerate(rows, 1)]
    return found


def at_once_us(spans: Sequence[Span]) -> float:
    """For how long some GEMM and some communication run at the same time, summed over their pairs."""
    gemms, comms = ([span for span in spans if span.kind == kind] for kind in ("gemm", "comm"))
    return sum(
        max(0.0, min(gemm.end_us, comm.end_us) - max(gemm.start_us, comm.start_us)) for gemm in gemms for comm in comms
    )


def _of_stream(row: Sequence[Span]) -> str:
    """Which one, where all of a row is of one."""
    streams = {(span.process, span.stream) for span in row}
    if len(streams) > 1:
        return ""
    ((_, stream),) = streams
    return f", {stream}" if not stream.isdecimal() else f", stream {stream}"


def _packed(spans: Sequence[Span]) -> list[list[Span]]:
    return [[spans[i] for i in row] for row in rows_without_overlap((s.start_us, s.end_us) for s in spans)]


def _by_stream(spans: Sequence[Span]) -> list[list[Span]]:
    """What overlaps within its stream, as operators of a CPU's threads may, gets a row more."""
    by_stream: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        by_stream.setdefault((span.process, span.stream), []).append(span)
    return [row for stream in by_stream.values() for row in _packed(stream)]
