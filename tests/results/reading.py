"""Reads and analyses a directory with a single case, and writes such directories."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.table import Row
from overlap_sweep.results.points import Point, group_cases, read_points
from overlap_sweep.results.records import read_records
from overlap_sweep.results.traces import read_traces
from overlap_sweep.study.analysis import analyse
from overlap_sweep.trace import TraceRow
from overlap_sweep.workloads import read_sources
from overlap_sweep.workloads.fsdp.study import STUDY, Analysis
from overlap_sweep.workloads.operator import section as operators
from overlap_sweep.workloads.operator.answer import OperatorAnalysis, analyse_operators
from overlap_sweep.workloads.operator.choice import PassChoice, choose_all
from overlap_sweep.workloads.tp_training.study import STUDY as STACKS
from overlap_sweep.workloads.tp_training.study import Analysis as Stacks
from tests.make_point import make_point, resolved


def layer_point(directory: Path) -> Point:
    """The directory's only point."""
    (point,) = read_points(directory).points
    return point


def only_case(directory: Path) -> list[Point]:
    (points,) = group_cases(read_points(directory).points, "operator").values()
    return points


def operators_of(directory: Path) -> OperatorAnalysis:
    return analyse_operators(read_sources(directory, AnalysisConfig()))


def operator_rows(directory: Path) -> list[Row]:
    """The rows of points.csv; none where there are no operators."""
    section = operators.section(read_sources(directory, AnalysisConfig()))
    return section.points.table.records(section.points.rows) if section else []


def choices(directory: Path, objective: str = "time") -> dict[tuple[int, str, str], PassChoice]:
    """What is chosen for the directory's only case, by TP size, operator and pass."""
    points = only_case(directory)
    chosen = choose_all(points, read_traces(points), objective)
    return {(choice.tp_size, choice.operator, choice.pass_name): choice for choice in chosen}


def trace_row(rank: int, iteration: int, phase: str, span_us: float, **changed: Any) -> TraceRow:
    """Half of it GEMMs, a quarter communication, half of which is hidden."""
    known: dict[str, Any] = {
        **{"file": f"trace_rank{rank}.json.gz", "rank": rank, "iteration": iteration, "phase": phase},
        **{"span_us": span_us, "gemm_us": span_us / 2, "comm_us": span_us / 4, "wait_us": 1.0},
        **{"overlap_us": span_us / 8, "exposed_comm_us": span_us / 8, "idle_us": 2.0, "overlap_ratio": 0.5},
        **{"num_gemm_events": 4, "num_comm_events": 2, "num_wait_events": 0, "num_compute_events": 1},
    }
    return TraceRow(**{**known, **changed})


def train(directory: Path, changes: Mapping[str, Any] | None = None, **run: Any) -> Path:
    """A training run of workload=fsdp with these knobs; `run` as make_point takes it."""
    return make_point("fsdp", directory, resolved("fsdp", **(changes or {})), **run)


def training_of(directory: Path) -> Analysis:
    """The directory's only case, with what searches in it settled."""
    (analysis,) = analyse(STUDY, read_points(directory).points, read_records(directory).knobs)
    return analysis


def stacks_of(directory: Path) -> list[Stacks]:
    """The cases of workload=tp_training, with what searches in it settled."""
    points = read_points(directory).points
    return analyse(STACKS.over(points, {}), points, read_records(directory).knobs)
