"""Whether telemetry's marks and the profiler's kernels say the same of the steps that have both."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from overlap_sweep.analysis.checks import check_place
from overlap_sweep.analysis.points import Point
from overlap_sweep.analysis.telemetry import MOST_BYTES, read_steps
from overlap_sweep.analysis.traces import own_traces
from overlap_sweep.errors import UserError
from overlap_sweep.run_directory import metrics_file
from overlap_sweep.trace.files import read_trace_files
from overlap_sweep.trace.overlap import TraceRow

NOTABLE = 0.05
"""Share of a step."""


@dataclass(frozen=True)
class Exposed:
    """Communication without computation beside it in rank 0's profiled steps, medians. Milliseconds."""

    by_marks_ms: float
    by_kernels_ms: float
    step_ms: float

    @property
    def disagree(self) -> bool:
        return abs(self.by_kernels_ms - self.by_marks_ms) > NOTABLE * self.step_ms


def exposed(point: Point) -> Exposed | None:
    """None of points without GPUs, telemetry or traces: a CPU's marks and gloo's spans differ by threads waking up.
    UserError where the telemetry is a link out of the directory, or too large."""
    path = point.directory / metrics_file(0)
    traces = [point.directory / name for name in own_traces(point) if name.endswith("rank0.json.gz")]
    traces = [trace for trace in traces if trace.exists()]
    if point.config["runtime"]["device"] != "cuda" or not path.exists() or not traces:
        return None
    check_place(path, point.directory, MOST_BYTES)
    # What of it cannot be read is said where telemetry is compared.
    steps, _ = read_steps(path, 0)
    records = [step for step in steps.values() if step.profiled]
    rows = list(_whole_iterations(row for file in read_trace_files(traces, with_parts=False) for row in file.rows))
    if not records or not rows:
        return None
    return Exposed(
        by_marks_ms=statistics.median(record.exposed_comm_ms for record in records),
        by_kernels_ms=statistics.median(row.exposed_comm_us for row in rows) / 1e3,
        step_ms=statistics.median(record.step_ms for record in records),
    )


def disagreements(points: Iterable[Point]) -> Iterator[str]:
    """A sentence for each point whose marks must not be believed."""
    for point in points:
        try:
            found = exposed(point)
        except UserError as error:
            yield str(error)
            continue
        if found and found.disagree:
            yield (
                f"{point.name}: by the telemetry's marks {found.by_marks_ms:.2f} ms of communication are exposed in a "
                f"profiled step of {found.step_ms:.1f} ms, by the kernels in the trace {found.by_kernels_ms:.2f}: "
                "believe the kernels. Gaps between a layer's kernels count as its computation, as when the host is "
                "slow, or streams wait for each other (CUDA_DEVICE_MAX_CONNECTIONS=1)."
            )


def _whole_iterations(rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
    return (row for row in rows if row.phase == "all")
