"""What the profiler saw of each point: the slowest rank's spans, median over iterations."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from overlap_sweep.analysis.points import Point
from overlap_sweep.errors import UserError
from overlap_sweep.trace.overlap import TraceRow, analyse_trace

PHASE_COLUMNS = {
    "gemm_time_us": "gemm_busy_us",
    "comm_time_us": "comm_busy_us",
    "overlap_time_us": "overlap_us",
    "overlap_ratio": "overlap_ratio",
    "e2e_time_us": "span_us",
    "exposed_comm_us": "exposed_comm_us",
    "wait_us": "wait_us",
    "idle_us": "idle_us",
}
"""After `forward_` and `backward_`: the column, and the trace row's field."""

WHOLE_COLUMNS = {
    "operator_e2e_time_us": "span_us",
    "total_overlap_ratio": "overlap_ratio",
    "num_gemm_events": "num_gemm_events",
    "num_comm_events": "num_comm_events",
}
"""Of a whole iteration, forward and backward: unions of all its spans, not sums of the two."""

METRICS = {
    **{f"forward_{column}": ("fwd", name) for column, name in PHASE_COLUMNS.items()},
    **{f"backward_{column}": ("bwd", name) for column, name in PHASE_COLUMNS.items()},
    **{column: ("all", name) for column, name in WHOLE_COLUMNS.items()},
}
"""Every column that comes from a trace, with the phase and the field of the trace rows that it is taken from."""


@dataclass
class TraceReading:
    """The trace metrics of one point, by column; columns without a value are left out."""

    metrics: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Names of traces that result.json lists and that are not there."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each trace that is there and cannot be read."""


def summarise(rows: Iterable[TraceRow]) -> dict[str, float]:
    """The columns of METRICS: per iteration of the slowest rank (longest span), then the median over iterations."""
    iterations: dict[int, dict[str, dict[str, TraceRow]]] = {}
    for row in rows:
        iterations.setdefault(row.iteration, {}).setdefault(row.file, {})[row.phase] = row
    slowest = [max(ranks.values(), key=lambda phases: phases["all"].span_us) for ranks in iterations.values()]
    metrics = {}
    for column, (phase, name) in METRICS.items():
        values = [getattr(phases[phase], name) for phases in slowest if phase in phases]
        values = [value for value in values if value is not None]
        if values:
            metrics[column] = statistics.median(values)
    return metrics


def read_traces(points: Iterable[Point]) -> dict[Path, TraceReading]:
    """By run directory; points that list no traces get an empty reading."""
    return {point.directory: _read_traces_of(point) for point in points}


def _read_traces_of(point: Point) -> TraceReading:
    reading = TraceReading()
    rows: list[TraceRow] = []
    for name in point.result.traces if point.result else []:
        path = point.directory / name
        if not path.exists():
            reading.missing.append(name)
            continue
        try:
            rows += analyse_trace(path)
        except UserError as error:
            reading.problems.append(str(error))
    reading.metrics = summarise(rows)
    return reading
