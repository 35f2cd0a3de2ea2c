"""Trace files, each read and analysed: what it holds, or why it holds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlap_sweep.errors import UserError
from overlap_sweep.trace.activity import activity_of
from overlap_sweep.trace.breakdown import PartRow, breakdown
from overlap_sweep.trace.kineto import read_trace
from overlap_sweep.trace.overlap import TraceRow, overlap_rows


@dataclass(frozen=True)
class TraceFile:
    """One rank's trace."""

    path: Path
    rank: int | None = None
    world_size: int | None = None
    """None, like the rank, when the trace doesn't say."""
    rows: list[TraceRow] = field(default_factory=list)
    """Per iteration and phase; empty where there is a problem."""
    parts: list[PartRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """One sentence for each reason why it was read only in part."""
    problem: str | None = None
    """In a sentence, why it could not be analysed."""


def read_trace_files(paths: Sequence[Path]) -> list[TraceFile]:
    """In the order of `paths`."""
    return [_read(path) for path in paths]


def _read(path: Path) -> TraceFile:
    try:
        trace = read_trace(path)
        activity = activity_of(trace)
        rows = overlap_rows(activity, str(path), trace.rank)
    except UserError as error:
        return TraceFile(path, problem=str(error))
    return TraceFile(path, trace.rank, trace.world_size, rows, breakdown(activity, str(path), trace.rank))
