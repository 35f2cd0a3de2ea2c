"""Rows of points, traces and diagnoses as DataFrames, for the commands and for Python; and the tables of traces."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median as median_of
from statistics import median_low
from typing import TYPE_CHECKING, Literal

from overlap_sweep.errors import UserError
from overlap_sweep.report.numbers import shortened
from overlap_sweep.report.predictions import PREDICTIONS
from overlap_sweep.report.table import PointRow, Row, Table, item
from overlap_sweep.results.checks import check_place
from overlap_sweep.results.run_directory import find_points
from overlap_sweep.trace.kernel_classes import function_name

if TYPE_CHECKING:
    import pandas as pd

    from overlap_sweep.diagnosis.runs import Run
    from overlap_sweep.predict.runs import Mends
    from overlap_sweep.trace import PartRow, PhaseSummary, TraceRow
    from overlap_sweep.trace.files import TraceFile

PARTS_BY = ("class", "kernel", "stream")
PART_TIMES = ("busy_us", "total_us", "alone_us")
LONGEST_NAME = 56
"""Most characters of a kernel's name in a table."""
NOTHING_GIVEN = "No traces given; give files or directories."

_count, _text = partial(item, kind="count"), partial(item, kind="text")
_FILE = _text("file")
_RANK = _count("rank", "Rank that recorded the trace, from the trace or else from its name.", "rank")
_ITERATION = _count("iteration", header="iteration")
_PHASE = _text(
    "phase",
    "fwd, bwd, recompute (part of bwd: checkpointed layers run forward again), or all (the whole iteration).",
    "phase",
)
_STARTUP = item("startup", kind="flag")
_LEFT_OUT = _count("startup_iterations")
OF_MEDIANS = {"iteration": _count("iterations", header="iterations"), "startup": _LEFT_OUT}
"""Columns of the tables of medians, by the column that they replace."""
_EXPOSED = item(
    "exposed_comm_us",
    "Time in which communication runs while nothing computes, also for no other phase or iteration.",
    "exposed us",
)
_WAITING = item("wait_us", header="wait us")
_RATIO = item("overlap_ratio", "overlap_us / min(gemm_us, comm_us).", "ratio", show="{:.2f}".format)
PHASES: Table[Row] = Table(
    "phases",
    "one row per iteration and phase",
    (
        _FILE,
        _RANK,
        _ITERATION,
        _PHASE,
        item(
            "span_us",
            "Time from the start of the first kernel to the end of the last; of all until the next iteration starts.",
            "span us",
        ),
        item("gemm_us", header="GEMM us"),
        item("comm_us", header="comm us"),
        _WAITING,
        item("overlap_us", header="overlap us"),
        _EXPOSED,
        item("idle_us", "Part of the span in which nothing runs, of no phase and iteration.", "idle us"),
        _RATIO,
        _count("num_gemm_events", header="GEMMs"),
        _count("num_comm_events", header="comms"),
        _count("num_wait_events", header="waits"),
        _count("num_compute_events", header="others"),
        _STARTUP,
    ),
)
PARTS: Table[Row] = Table(
    "parts",
    "one row per iteration, phase and part",
    (
        _FILE,
        _RANK,
        _ITERATION,
        _PHASE,
        _text("by"),
        _text(
            "kind", "Class of the kernels: gemm, comm, wait, compute or memory; for a stream all its classes.", "kind"
        ),
        _text("library", header="library"),
        _text("name", header="name", show=lambda name: shortened(function_name(name) or name, LONGEST_NAME)),
        _count("num_events", header="events"),
        item("busy_us", header="busy us"),
        item("total_us", header="sum us"),
        item("alone_us", header="alone us"),
        _STARTUP,
    ),
)
RANKS: Table[Row] = Table(
    "runs",
    "one row per run and phase: medians",
    (
        _text("run"),
        _PHASE,
        _count("num_ranks", header="ranks"),
        _count("world_size"),
        _text("missing"),
        _count("slowest_rank", header="slowest"),
        item("slowest_us", header="span us"),
        _count("fastest_rank", header="fastest"),
        item("fastest_us", header="span us"),
        item("skew_us", header="skew us"),
        _EXPOSED,
        _WAITING,
        _RATIO,
        _LEFT_OUT,
    ),
)
TRACE_TABLES = {"of phases": PHASES, "with --by class, kernel or stream": PARTS, "with --by rank": RANKS}


@dataclass(frozen=True)
class Rows:
    """The rows of one table of points."""

    frame: pd.DataFrame
    table: Table
    points: Sequence[PointRow] = ()
    """What the rows are of, in their order; empty if they are from a file."""
    problems: list[str] = field(default_factory=list)
    """A sentence for each file that could not be read."""
    warnings: list[str] = field(default_factory=list)
    """A sentence for each file that was read only in part."""
    points_by_table: dict[str, int] = field(default_factory=dict)
    """The number of points of every table; empty if the rows are from a file."""


def read(directory: Path | str, table: str | None = None) -> pd.DataFrame:
    """Returns the measured points at or below a directory, with the columns of docs/columns.md.

    `table` is `points` (of operators), `layers`, `kernels`, `training`, `copies`, `tp_training` or `jobs`; None: the
    first of these that has rows; or `predictions`: what changes would gain, from all traces there. If there are no
    points, the Parquet file of an analysis is read. What cannot be read causes a warning; UserError if nothing can.
    """
    found = point_rows(Path(directory), table)
    _warn([*found.problems, *found.warnings])
    return found.frame


def read_trace(
    *paths: Path | str, by: Literal["phase", "class", "kernel", "stream"] = "phase", median: bool = False
) -> pd.DataFrame:
    """Returns the times of traces of Kineto or Nsight Systems, given as files or directories: one row per iteration and
    phase, or per part of a phase with `by`; with `median` the medians over the iterations.

    Times are in microseconds. Traces that cannot be read cause a warning; UserError if none can be read.
    """
    if by not in ("phase", *PARTS_BY):
        raise UserError(f"by={by!r} is not known; choose one of phase, {', '.join(PARTS_BY)}.")
    files, problems = read_files([Path(path) for path in paths], with_parts=by != "phase")
    good = [file for file in files if not file.problem]
    if not good:
        raise UserError(" ".join(problems) or NOTHING_GIVEN)
    _warn([*problems, *(warning for file in good for warning in file.warnings)])
    return trace_table(by, medians=median).frame(trace_rows(good, by, medians=median))


def read_diagnosis(
    *paths: Path | str, by: Literal["finding", "group", "step"] = "finding", ranks_per_node: int | None = None
) -> pd.DataFrame:
    """Returns why communication is exposed in traces, given as files or directories: one row per finding; with
    `by` per process group and collective, or per step and rank.

    `ranks_per_node`: ranks on each node, to tell communication within nodes from that between them; None: known only
    for traces of points.
    Times are in microseconds per step. What cannot be read causes a warning; UserError if nothing can be read.
    """
    from overlap_sweep.report.diagnosis import TABLE_BY, warnings_of

    if by not in TABLE_BY:
        raise UserError(f"by={by!r} is not known; choose one of {', '.join(TABLE_BY)}.")
    runs, problems, unknown = read_runs_of_nodes([Path(path) for path in paths], ranks_per_node)
    if not any(run.found for run in runs):
        raise UserError(" ".join(problems) or NOTHING_GIVEN)
    _warn([*problems, *unknown, *warnings_of(runs)])
    table, rows, _ = diagnosed_rows(runs, by)
    return table.frame(rows)


def diagnosed_rows(runs: Sequence[Run], by: str) -> tuple[Table[Row], list[Row], dict[str, Mends]]:
    """Returns the table of a diagnosis and its rows; and by run the changes that mend what was found."""
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.runs import advice_of, mends_of
    from overlap_sweep.report.diagnosis import TABLE_BY

    table, rows_of = TABLE_BY[by]
    rows = rows_of(runs)
    mends = {run.name: mends_of(run) for run in runs if run.found} if by == "finding" else {}
    findings = [one for run in runs if run.found for one in run.found.diagnosis.findings]
    changes = [pair for own in mends.values() for pair in zip(own.of_findings, own.is_first, strict=True)]
    for row, finding, (mend, is_first) in zip(rows, findings, changes, strict=False):
        if mend:
            # One change may answer several findings: what it gains is there once.
            row |= {"predicted_us": mend.gain_us if is_first else None, "change": mend.change}
            row["try"] = advice_of(finding, mend)
    return table, rows, mends


def read_prediction(*paths: Path | str, changes: Sequence[str] = ()) -> pd.DataFrame:
    """Returns what changes would gain, from traces of all ranks, given as files or directories: one row per
    change of `changes`, each `NAME=VALUE`, or of each run all that apply, the best first.

    Times are in microseconds per step. What cannot be read causes a warning; UserError if nothing can be read.
    """
    from overlap_sweep.commands.predict import predicted_rows

    rows, names, problems = predicted_rows([Path(path) for path in paths], changes)
    if not names:
        raise UserError(" ".join(problems) or NOTHING_GIVEN)
    _warn(problems)
    return PREDICTIONS.frame(rows)


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        warnings.warn(sentence, stacklevel=3)


def tables() -> dict[str, Table]:
    """Returns the tables of points of all workloads by name."""
    from overlap_sweep import workloads

    return {table.name: table for table in (workloads.section_module(name).TABLE for name in workloads.names())}


def point_rows(directory: Path, table: str | None) -> Rows:
    """Returns all rows of the named table; None: of the first workload that has points."""
    from overlap_sweep import workloads
    from overlap_sweep.config import AnalysisConfig
    from overlap_sweep.workloads import read_sources

    if table == PREDICTIONS.name:
        from overlap_sweep.commands.predict import rows_that_apply

        rows, problems = rows_that_apply([directory])
        return Rows(PREDICTIONS.frame(rows), PREDICTIONS, problems=problems)
    known = tables()
    if table not in (None, *known):
        raise UserError(f"table={table!r} is not known; choose one of {', '.join([*known, PREDICTIONS.name])}.")
    workload_of = dict(zip(known, workloads.names(), strict=True))
    try:
        sources = read_sources(directory, AnalysisConfig())
    except UserError:
        there = [name for name in known if (directory / f"{name}.parquet").is_file()]
        if table and there and table not in there:
            found = ", ".join(f"{name}.parquet" for name in there)
            raise UserError(f"{directory} has no {table}.parquet, only {found}; choose one of these tables.") from None
        if not there:
            raise
        name = table or there[0]
        return Rows(_written(directory / f"{name}.parquet", known[name].types), known[name])
    points = {name: len(sources.points(workload)) for name, workload in workload_of.items()}
    name = table or next((name for name, number in points.items() if number), next(iter(known)))
    section = workloads.section_module(workload_of[name]).section(sources)
    return Rows(
        section.frame if section else known[name].frame([]),
        known[name],
        section.points.rows if section else [],
        problems=[*sources.reading.problems, *(section.problems if section else ())],
        warnings=section.warnings if section else [],
        points_by_table=points,
    )


def _written(path: Path, types: dict[str, str]) -> pd.DataFrame:
    """Returns the rows of a Parquet file that an analysis wrote with --output."""
    import pandas as pd
    from pyarrow import ArrowException

    check_place(path, path.parent)
    try:
        frame = pd.read_parquet(path)
        return frame.reindex(columns=list(types)).astype(types)
    except (OSError, ValueError, TypeError, ArithmeticError, ArrowException) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"{path} cannot be read ({reason}); analyse the results again.") from None


def find_traces(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Returns the traces, each once, and a sentence for each directory without any."""
    from overlap_sweep.trace.disk import find_traces, refused_links
    from overlap_sweep.trace.nsight_files import paths_in

    found: dict[Path, Path] = {}
    problems = []
    for path in paths:
        below = find_traces(path) if path.is_dir() else paths_in(path)
        refused = refused_links(path) if path.is_dir() else []
        problems += refused
        if not below and not refused:
            give = "give a directory with torch.profiler's .json or .json.gz, or Nsight Systems' .sqlite or .nsys-rep"
            give = "query reads the points that were measured there" if find_points(path) else give
            problems.append(f"{path} holds no traces; {give}.")
        for one in below:
            found.setdefault(one.resolve(), one)
    return list(found.values()), problems


def read_files(paths: Sequence[Path], *, with_parts: bool) -> tuple[list[TraceFile], list[str]]:
    """Returns the traces at or below the paths, and a sentence for everything that cannot be read."""
    from overlap_sweep.trace.files import read_trace_files

    found, problems = find_traces(paths)
    files = read_trace_files(found, with_parts=with_parts)
    return files, [*problems, *(file.problem for file in files if file.problem)]


def read_runs_of_nodes(paths: Sequence[Path], ranks_per_node: int | None) -> tuple[list[Run], list[str], list[str]]:
    """Returns the runs of the traces at or below the paths, a sentence for everything that cannot be read, and one for
    each result.json that does not say their nodes. `ranks_per_node`: None: as the results next to the traces say."""
    from overlap_sweep.diagnosis.runs import read_runs
    from overlap_sweep.results.traces import ranks_of_each_trace

    if ranks_per_node is not None and ranks_per_node < 1:
        raise UserError(f"ranks_per_node={ranks_per_node} is not possible; give the number of ranks on each node.")
    found, problems = find_traces(paths)
    if ranks_per_node is None:
        known, unknown = ranks_of_each_trace(found)
    else:
        known, unknown = dict.fromkeys(found, ranks_per_node), []
    runs = read_runs(found, known)
    return runs, [*problems, *(file.problem for run in runs for file in run.files if file.problem)], unknown


def trace_table(by: str, *, medians: bool) -> Table[Row]:
    """Returns the table of `trace_rows`; in that of medians the number of iterations replaces iteration, and
    startup_iterations replaces startup."""
    table = PARTS if by in PARTS_BY else PHASES
    columns = (OF_MEDIANS.get(column.name, column) for column in table.columns)
    return replace(table, columns=tuple(columns)) if medians else table


def trace_rows(
    files: Sequence[TraceFile], by: str, phases: Sequence[str] = (), top: int | None = None, *, medians: bool
) -> list[Row]:
    """Returns the rows of all files: one per iteration and phase, or per part of these if `by` is one of PARTS_BY,
    sorted by busy time; or one of medians per phase or part. `phases`: default all; `top`: most parts of each phase."""
    from overlap_sweep.trace import summarise

    found = []
    for file in files:
        if by in PARTS_BY:
            parts = _rows(file, [part for part in file.parts if part.by == by], phases)
            found += _medians_of_parts(file, parts, top) if medians else _first(parts, top, "iteration", "phase")
        else:
            found += _rows(file, summarise(file.steady_rows) if medians else file.rows, phases)
    return found


def _medians_of_parts(file: TraceFile, parts: Sequence[Row], top: int | None) -> list[Row]:
    """Medians are over all iterations that have the phase, without start-up: an iteration that lacks the part counts 0.
    `iterations` is the number of iterations that have the part."""
    members: dict[tuple[str, ...], list[Row]] = {}
    for row in parts:
        if not row["startup"]:
            members.setdefault((row["phase"], row["kind"], row["library"], row["name"]), []).append(row)
    iterations = Counter(row.phase for row in file.steady_rows)
    rows = []
    for (phase, *_), same in members.items():
        absent = [0] * (iterations[phase] - len(same))
        # A median may be half a nanosecond; further digits are rounding errors.
        times = {name: round(median_of([*map(itemgetter(name), same), *absent]), 4) for name in PART_TIMES}
        num_events = median_low([*map(itemgetter("num_events"), same), *absent])
        rows.append({**same[0], "iterations": len(same), "num_events": num_events, **times})
    order = list(iterations)
    rows.sort(key=lambda row: (order.index(row["phase"]), -row["busy_us"]))
    return _first(rows, top, "phase")


def _first(rows: Iterable[Row], top: int | None, *by: str) -> list[Row]:
    return [row for _, same in groupby(rows, key=itemgetter(*by)) for row in list(same)[:top]]


def _rows(file: TraceFile, rows: Iterable[TraceRow | PartRow | PhaseSummary], phases: Sequence[str]) -> list[Row]:
    from msgspec.structs import asdict

    from overlap_sweep.trace.files import rank_of

    # If a trace does not record its rank, the file's name may have it.
    common = {"rank": rank_of(file), "startup_iterations": len(file.startup)}
    found = [{**asdict(row), **common} for row in rows if not phases or row.phase in phases]
    return [{**row, "startup": row.get("iteration") in file.startup} for row in found]
