"""What the profiler saw of each point: the slowest rank's spans, median over iterations."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from overlap_sweep.analysis.points import Point
from overlap_sweep.run_directory import is_trace_of
from overlap_sweep.trace.files import TraceFile, read_trace_files
from overlap_sweep.trace.overlap import TraceRow

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
    warnings: list[str] = field(default_factory=list)
    """One sentence for each that was read only in part."""


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
    names = {point.directory: own_traces(point) for point in points}
    paths = [directory / name for directory, of_point in names.items() for name in of_point]
    files = {file.path: file for file in read_trace_files([path for path in paths if path.exists()], with_parts=False)}
    return {
        directory: _reading({name: files.get(directory / name) for name in of_point})
        for directory, of_point in names.items()
    }


def own_traces(point: Point) -> list[str]:
    """The names of the point's traces, without those of the operator without overlap that some have beside them."""
    return [name for name in (point.result.traces if point.result else []) if not is_trace_of("none", name)]


def _reading(files: Mapping[str, TraceFile | None]) -> TraceReading:
    """`files` by the name that result.json lists; None for those that are not there."""
    found = [file for file in files.values() if file]
    return TraceReading(
        metrics=summarise(row for file in found for row in file.rows),
        missing=[name for name, file in files.items() if file is None],
        problems=[file.problem for file in found if file.problem],
        warnings=[warning for file in found for warning in file.warnings],
    )
