"""Traces of measured points: metrics, all from one iteration of one rank, so that they are consistent; and how many
ranks each node had."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from overlap_sweep.config import ResolvedPoint
from overlap_sweep.errors import UserError
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.points import Point
from overlap_sweep.results.run_directory import RESULT_FILE, is_trace_of, read_result, trace_file
from overlap_sweep.trace import TraceRow, startup_sentence
from overlap_sweep.trace.files import TraceFile, read_trace_files

PASSES = ("fwd", "bwd")

_QUANTITIES = "gemm_us comm_us overlap_us overlap_ratio span_us exposed_comm_us wait_us idle_us"
QUANTITIES = tuple(_QUANTITIES.split())
"""Quantities of a trace row; their columns begin with `fwd_` or `bwd_`."""

WHOLE_COLUMNS = ("total_span_us", "total_overlap_ratio", "num_gemm_events", "num_comm_events")
"""Columns with sums over the two passes, and the ratio of sums."""

METRICS = (*(f"{phase}_{quantity}" for phase in PASSES for quantity in QUANTITIES), *WHOLE_COLUMNS)

_Phases = Mapping[str, TraceRow]
"""Rows of one iteration of one rank, by phase."""


@dataclass
class TraceReading:
    """The contents of one point's traces."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Values by column; columns without a value are missing."""
    missing: list[str] = field(default_factory=list)
    """Names of traces that result.json lists but that don't exist."""
    problems: list[str] = field(default_factory=list)
    """One sentence per trace that cannot be read."""
    warnings: list[str] = field(default_factory=list)
    """One sentence per trace that was read only in part, and one if start-up iterations were left out."""
    rows: list[TraceRow] = field(default_factory=list)
    """Rows of all ranks, without start-up iterations."""
    startup: list[int] = field(default_factory=list)
    """The start-up iterations that were left out."""


def summarise(rows: Iterable[TraceRow]) -> dict[str, float]:
    """Returns the columns of METRICS, all from the same iteration and rank: among the iterations with the most passes
    the one with the (lower) median operator time, and in it the slowest rank."""
    iterations: dict[int, dict[str, dict[str, TraceRow]]] = {}
    for row in rows:
        iterations.setdefault(row.iteration, {}).setdefault(row.file, {})[row.phase] = row
    slowest = [max(ranks.values(), key=_operator_us) for ranks in iterations.values()]
    most = max((len(_passes(phases)) for phases in slowest), default=0)
    whole = sorted((phases for phases in slowest if len(_passes(phases)) == most), key=_operator_us)
    return _metrics(whole[(len(whole) - 1) // 2]) if whole else {}


def _metrics(phases: _Phases) -> dict[str, float]:
    pass_columns = {
        f"{phase}_{quantity}": getattr(phases[phase], quantity)
        for phase in PASSES
        if phase in phases
        for quantity in QUANTITIES
    }
    passes = _passes(phases)
    shorter_us = min(sum(row.gemm_us for row in passes), sum(row.comm_us for row in passes))
    whole = (
        _operator_us(phases),
        sum(row.overlap_us for row in passes) / shorter_us if shorter_us else None,
        sum(row.num_gemm_events for row in passes),
        sum(row.num_comm_events for row in passes),
    )
    columns = {**pass_columns, **dict(zip(WHOLE_COLUMNS, whole, strict=True))}
    return {column: value for column, value in columns.items() if value is not None}


def _operator_us(phases: _Phases) -> float:
    return sum(row.active_us for row in _passes(phases))


def _passes(phases: _Phases) -> list[TraceRow]:
    """Returns the rows of the passes, or of the whole if the trace does not separate them, as in a CUDA graph."""
    return [phases[phase] for phase in PASSES if phase in phases] or [phases["all"]]


def read_traces(points: Iterable[Point]) -> dict[Path, TraceReading]:
    """Returns the trace readings by run directory; empty ones for points without traces."""
    names = {point.directory: own_traces(point) for point in points}
    paths = [directory / name for directory, listed in names.items() for name in listed]
    files = {file.path: file for file in read_trace_files([path for path in paths if path.exists()], with_parts=False)}
    return {
        directory: _reading({name: files.get(directory / name) for name in listed})
        for directory, listed in names.items()
    }


def own_traces(point: Point) -> list[str]:
    """Returns the names of the point's traces, without those of `none`."""
    return [name for name in (point.result.traces if point.result else []) if not is_trace_of("none", name)]


def listed_trace(point: Point, name: str) -> Path | None:
    """Returns the path of a point's trace; None if it has no trace of this name."""
    path = point.directory / name
    return path if point.result and name in point.result.traces and path.is_file() else None


def drawn_trace(point: Point, variant: str = "") -> Path | None:
    """Returns the trace that timelines show, rank 0's; None if the point has none."""
    return listed_trace(point, trace_file(0, variant))


def _reading(files: Mapping[str, TraceFile | None]) -> TraceReading:
    found = [file for file in files.values() if file]
    # If one rank starts up, the others wait for it.
    startup = sorted({iteration for file in found for iteration in file.startup})
    rows = [row for file in found for row in file.rows]
    left_out = [startup_sentence(str(found[0].path.parent), rows, startup)] if startup else []
    steady = [row for row in rows if row.iteration not in startup]
    return TraceReading(
        metrics=summarise(steady),
        missing=[name for name, file in files.items() if file is None],
        problems=[file.problem for file in found if file.problem],
        warnings=[*(warning for file in found for warning in file.warnings), *left_out],
        rows=steady,
        startup=startup,
    )


def on_nodes(count: int) -> str:
    """Returns ` over 2 nodes`, for the end of a name; empty for a single node."""
    return f" over {count} nodes" if count > 1 else ""


def ranks_of_each(config: ResolvedPoint) -> int | None:
    """Returns the number of ranks on each node of a completed point; None if it has a single node, where all
    communication stays."""
    return config.ranks_per_node if config.nodes > 1 else None


def ranks_of_each_trace(traces: Iterable[Path]) -> tuple[dict[Path, int], list[str]]:
    """Returns the number of ranks on each node by trace, for traces of points on several nodes; and a sentence for each
    result.json next to traces that cannot be read."""
    paths = list(traces)
    found: dict[Path, int | None] = {}
    problems = []
    for folder in dict.fromkeys(path.parent for path in paths):
        result = folder / RESULT_FILE
        try:
            check_place(result, folder)
            found[folder] = ranks_of_each(read_result(result).point) if result.exists() else None
        except UserError as error:
            problems.append(f"{str(error).rstrip('.')}; whether these traces are of several nodes is unknown.")
    return {path: ranks for path in paths if (ranks := found.get(path.parent)) is not None}, problems
