"""Reads the rows of `analyze.py query`, `trace` and `diagnose` as DataFrames, for these commands and for Python."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from overlap_sweep.diagnosis.runs import Run
    from overlap_sweep.report.table import PointRow, Table


@dataclass(frozen=True)
class Rows:
    """The rows of one table."""

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
    first of these that has rows. If there are no points, the Parquet file of an analysis is read. Files that cannot be
    read cause a warning; UserError if nothing can be read.
    """
    found = point_rows(Path(directory), table)
    for sentence in (*found.problems, *found.warnings):
        warnings.warn(sentence, stacklevel=2)
    return found.frame


def read_trace(
    *paths: Path | str, by: Literal["phase", "class", "kernel", "stream"] = "phase", median: bool = False
) -> pd.DataFrame:
    """Returns the times of Kineto traces, given as files or directories: one row per iteration and phase, or per part
    of a phase with `by`; with `median` the medians over the iterations.

    Times are in microseconds. Traces that cannot be read cause a warning; UserError if none can be read.
    """
    from overlap_sweep.commands import trace_rows
    from overlap_sweep.report.table import to_frame
    from overlap_sweep.trace.files import read_trace_files

    if by not in ("phase", *trace_rows.PARTS_BY):
        raise UserError(f"by={by!r} is not known; choose one of phase, {', '.join(trace_rows.PARTS_BY)}.")
    found, problems = find_traces([Path(path) for path in paths])
    files = read_trace_files(found, with_parts=by != "phase")
    problems += [file.problem for file in files if file.problem]
    good = [file for file in files if not file.problem]
    if not good:
        raise UserError(" ".join(problems) or "No traces given; give files or directories.")
    for sentence in (*problems, *(warning for file in good for warning in file.warnings)):
        warnings.warn(sentence, stacklevel=2)
    table = trace_rows.PHASES if by == "phase" else trace_rows.PARTS
    written = trace_rows.of_medians(table) if median else table
    return to_frame(written.records(trace_rows.rows_of(good, by, medians=median)), written.types)


def read_diagnosis(
    *paths: Path | str, by: Literal["finding", "group", "step"] = "finding", ranks_per_node: int | None = None
) -> pd.DataFrame:
    """Returns why communication is exposed in Kineto traces, given as files or directories: one row per finding; with
    `by` per process group and collective, or per step and rank.

    `ranks_per_node`: ranks on each node, to tell communication within nodes from that between them; None: known only
    for traces of points.
    Times are in microseconds per step. What cannot be read or is unknown causes a warning; UserError if nothing can be
    read.
    """
    from overlap_sweep.report.diagnosis import TABLE_BY, warnings_of
    from overlap_sweep.report.table import to_frame

    if by not in TABLE_BY:
        raise UserError(f"by={by!r} is not known; choose one of {', '.join(TABLE_BY)}.")
    found, problems = find_traces([Path(path) for path in paths])
    runs, unknown = read_runs_of_nodes(found, ranks_per_node)
    problems += [file.problem for run in runs for file in run.files if file.problem]
    if not any(run.found for run in runs):
        raise UserError(" ".join(problems) or "No traces given; give files or directories.")
    for sentence in (*problems, *unknown, *warnings_of(runs)):
        warnings.warn(sentence, stacklevel=2)
    table, rows_of = TABLE_BY[by]
    return to_frame(table.records(rows_of(runs)), table.types)


def read_runs_of_nodes(traces: Sequence[Path], ranks_per_node: int | None) -> tuple[list[Run], list[str]]:
    """Returns the runs of traces, and a sentence for each result.json that does not tell their nodes. `ranks_per_node`:
    None: as the results next to the traces tell."""
    from overlap_sweep.diagnosis.runs import read_runs
    from overlap_sweep.results.nodes import ranks_of_each_trace

    if ranks_per_node is not None:
        if ranks_per_node < 1:
            raise UserError(f"ranks_per_node={ranks_per_node} is not possible; give the number of ranks on each node.")
        return read_runs(traces, dict.fromkeys(traces, ranks_per_node)), []
    known, problems = ranks_of_each_trace(traces)
    return read_runs(traces, known), problems


def tables() -> dict[str, Table]:
    """Returns the tables of points of all workloads by name."""
    from overlap_sweep.workloads import names, section_module

    return {table.name: table for table in (section_module(name).TABLE for name in names())}


def point_rows(directory: Path, table: str | None) -> Rows:
    """Returns all rows of the named table; None: of the first workload that has points."""
    from overlap_sweep import workloads
    from overlap_sweep.config import AnalysisConfig
    from overlap_sweep.report.table import to_frame
    from overlap_sweep.workloads.sections import read_sources

    known = tables()
    if table not in (None, *known):
        raise UserError(f"table={table!r} is not known; choose one of {', '.join(known)}.")
    workload_of = dict(zip(known, workloads.names(), strict=True))
    try:
        sources = read_sources(directory, AnalysisConfig())
    except UserError:
        written = {name: directory / f"{name}.parquet" for name in known}
        there = [name for name, path in written.items() if path.is_file()]
        if table and there and table not in there:
            found = ", ".join(f"{name}.parquet" for name in there)
            raise UserError(f"{directory} has no {table}.parquet, only {found}; choose one of these tables.") from None
        there = [table] if table in there else there
        if not there:
            raise
        return Rows(_written(written[there[0]], known[there[0]].types), known[there[0]])
    points = {name: len(sources.points(workload)) for name, workload in workload_of.items()}
    name = table or next((name for name, number in points.items() if number), next(iter(known)))
    section = workloads.section_module(workload_of[name]).section(sources)
    return Rows(
        to_frame(section.records if section else [], known[name].types),
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

    from overlap_sweep.results.checks import check_place

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

    found: dict[Path, Path] = {}
    problems = []
    for path in paths:
        below = find_traces(path) if path.is_dir() else [path]
        refused = refused_links(path) if path.is_dir() else []
        problems += refused
        if not below and not refused:
            problems.append(f"{path} holds no traces; give a directory with .json or .json.gz files of torch.profiler.")
        for one in below:
            found.setdefault(one.resolve(), one)
    return list(found.values()), problems
