"""Whether telemetry's marks and the profiler's kernels say the same of the steps that have both."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import metrics_file
from overlap_sweep.results.traces import own_traces
from overlap_sweep.trace.files import TraceFile, read_trace_files
from overlap_sweep.workloads.fsdp.telemetry_runs import MOST_BYTES, Step, read_steps

NOTABLE = 0.05
"""Share of a step."""


@dataclass(frozen=True)
class Exposed:
    """Communication without computation beside it in rank 0's profiled steps, without start-up. Milliseconds."""

    by_marks_ms: float
    """Median, as the step's."""
    step_ms: float
    kernels_ms: Sequence[float]
    """By iteration of the traces."""
    kernels_hidden_share: Sequence[float]
    """The rest of their communication; of the iterations that have any."""

    @property
    def by_kernels_ms(self) -> float:
        return statistics.median(self.kernels_ms)

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
    files = read_trace_files(traces, with_parts=False)
    rows = [row for file in files for row in file.steady_rows if row.phase == "all"]
    records = _steady(records, files)
    if not records or not rows:
        return None
    return Exposed(
        by_marks_ms=statistics.median(record.exposed_comm_ms for record in records),
        step_ms=statistics.median(record.step_ms for record in records),
        kernels_ms=[row.exposed_comm_us / 1e3 for row in rows],
        kernels_hidden_share=[1 - row.exposed_comm_us / row.comm_busy_us for row in rows if row.comm_busy_us],
    )


def _steady(records: Sequence[Step], files: Iterable[TraceFile]) -> list[Step]:
    """The records of the steps that are no start-up in their trace: both have the same steps in the same order."""
    startup = [row.iteration in file.startup for file in files for row in file.rows if row.phase == "all"]
    if len(startup) != len(records):
        return list(records)
    return [record for record, left_out in zip(records, startup, strict=True) if not left_out]


def disagreements(points: Iterable[Point]) -> Iterator[str]:
    """A sentence for each point whose marks must not be believed."""
    for point in points:
        try:
            found = exposed(point)
        except UserError as error:
            yield str(error)
            continue
        if found and found.disagree:
            yield disagreement(point.name, found)


def disagreement(name: str, found: Exposed) -> str:
    """Of the point of that name."""
    return (
        f"{name}: by the telemetry's marks {found.by_marks_ms:.2f} ms of communication are exposed in a "
        f"profiled step of {found.step_ms:.1f} ms, by the kernels in the trace {found.by_kernels_ms:.2f}: "
        "believe the kernels. Gaps between a layer's kernels count as its computation, as when the host is "
        "slow, or streams wait for each other (CUDA_DEVICE_MAX_CONNECTIONS=1)."
    )
