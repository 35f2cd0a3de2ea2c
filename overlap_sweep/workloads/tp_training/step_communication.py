"""How much of a step's communication the profiler saw hidden behind computation."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from overlap_sweep.results.points import Point
from overlap_sweep.results.traces import own_traces, startup_of
from overlap_sweep.trace.files import read_trace_files
from overlap_sweep.trace.overlap import TraceRow, in_words


@dataclass(frozen=True)
class StepCommunication:
    """Of one step, the median over the profiled steps, in microseconds. What runs twice at a time counts once.

    A collective's kernel runs from when its rank arrives until the last one has, so on all ranks but that it is mostly
    waiting. What counts is the rank whose communication takes least in the step.
    """

    total_us: float
    exposed_us: float
    """With no computation beside it."""
    waiting_us: float = 0.0
    """How much longer the communication of another rank takes: it waits there for this one."""
    startup_iterations: int = 0
    """How many profiled steps are left out as start-up."""

    @property
    def hidden_us(self) -> float:
        return self.total_us - self.exposed_us

    @property
    def hidden_fraction(self) -> float:
        """NaN where nothing communicates."""
        return self.hidden_us / self.total_us if self.total_us else float("nan")


@dataclass
class CommunicationReading:
    """Of the traces of several points."""

    of_point: dict[Path, StepCommunication] = field(default_factory=dict)
    """By run directory, where there are traces that can be read."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each trace that is there and cannot be read."""
    warnings: list[str] = field(default_factory=list)
    """One sentence for each that was read only in part, and for each point of which start-up is left out."""


def read_communication(points: Iterable[Point]) -> CommunicationReading:
    """Of each point's own traces; one that is not there is left out, and so are steps that are start-up."""
    paths = {point.directory: [point.directory / name for name in own_traces(point)] for point in points}
    there = [path for of_point in paths.values() for path in of_point if path.exists()]
    files = {file.path: file for file in read_trace_files(there, with_parts=False)}
    reading = CommunicationReading(
        problems=[file.problem for file in files.values() if file.problem],
        warnings=[warning for file in files.values() for warning in file.warnings],
    )
    for directory, of_point in paths.items():
        own = [files[path] for path in of_point if path in files]
        startup = startup_of(own)
        rows = [row for file in own for row in file.rows]
        if startup:
            reading.warnings.append(in_words(str(directory), rows, startup))
        found = communication_of(row for row in rows if row.iteration not in startup)
        if found:
            reading.of_point[directory] = replace(found, startup_iterations=len(startup))
    return reading


def communication_of(rows: Iterable[TraceRow]) -> StepCommunication | None:
    """Of the rows of all ranks. None without a whole iteration."""
    iterations: dict[int, list[TraceRow]] = {}
    for row in rows:
        if row.phase == "all":
            iterations.setdefault(row.iteration, []).append(row)
    if not iterations:
        return None
    least = [min(ranks, key=lambda row: row.comm_busy_us) for ranks in iterations.values()]
    most = [max(ranks, key=lambda row: row.comm_busy_us) for ranks in iterations.values()]
    return StepCommunication(
        statistics.median(row.comm_busy_us for row in least),
        statistics.median(row.exposed_comm_us for row in least),
        statistics.median(high.comm_busy_us - low.comm_busy_us for high, low in zip(most, least, strict=True)),
    )
