"""Which traces belong to one run, what is missing of it, and how far its ranks are apart."""

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.trace import Overlap, TraceRow
from overlap_sweep.trace.files import TraceFile, rank_of, ranks_of, run_name


def row(rank: int | None, iteration: int, phase: str, span_us: float) -> TraceRow:
    usual: dict[str, Any] = dict.fromkeys(Overlap.__struct_fields__, 1)
    usual |= {"span_us": span_us, "wait_us": span_us / 16, "exposed_comm_us": span_us / 8, "overlap_ratio": 0.5}
    usual |= {"gemm_us": 2.0, "comm_us": 3.0}
    return TraceRow(file="f", rank=rank, iteration=iteration, phase=phase, **usual)


def file(name: str, rank: int | None, world_size: int | None = None, spans: tuple[float, ...] = (100.0,)) -> TraceFile:
    rows = [row(rank, i, phase, span) for i, span in enumerate(spans) for phase in ("fwd", "all")]
    return TraceFile(Path(name), rank=rank, world_size=world_size, rows=rows)


def unreadable(name: str) -> TraceFile:
    return TraceFile(Path(name), problem=f"{name} is cut short.")


def test_slowest_rank_and_skew_of_medians_over_iterations() -> None:
    # Medians: 100, 300, 100. The slowest iteration of all is rank 0's, and does not count.
    spans = {0: (100.0, 9000.0, 80.0), 1: (300.0, 320.0, 10.0), 2: (100.0, 100.0, 100.0)}
    (run,) = ranks_of([file(f"d/trace_rank{rank}.json.gz", rank, 3, of_rank) for rank, of_rank in spans.items()])
    assert (run.name, run.world_size, run.ranks, run.missing) == ("d/trace_rank*.json.gz", 3, [0, 1, 2], [])
    # The fastest is the first of two that are as fast.
    same = {"run": run.name, "num_ranks": 3, "slowest_rank": 1, "slowest_us": 300.0, "fastest_rank": 0}
    same |= {"fastest_us": 100.0, "skew_us": 200.0, "exposed_comm_us": 37.5, "wait_us": 18.75, "overlap_ratio": 0.5}
    same |= {"startup_iterations": 0, "world_size": 3, "missing": None}
    assert run.rows == [{"phase": phase, **same} for phase in ("fwd", "all")]


def test_missing_by_world_size_by_a_gap_and_by_being_unreadable() -> None:
    (run,) = ranks_of([file("t_rank0.json", 0, 5), unreadable("t_rank3.json"), file("t_rank2.json", 2)])
    assert (run.world_size, run.ranks, run.missing) == (5, [0, 2], [1, 3, 4])
    (run,) = ranks_of([file("t_rank0.json", None), unreadable("t_rank3.json")])
    assert (run.world_size, run.ranks, run.missing) == (None, [0], [1, 2, 3])
    (run,) = ranks_of([unreadable("t_rank0.json"), unreadable("t_rank1.json")])
    assert (run.ranks, run.missing, run.rows) == ([], [0, 1], [])


def test_a_phase_that_only_some_ranks_have_and_a_rank_without_another_to_compare_with() -> None:
    last = TraceFile(Path("t_rank1.json"), rank=1, rows=[row(1, 0, "all", 50.0)])
    (run,) = ranks_of([file("t_rank0.json", 0), last])
    assert {found["phase"]: found["num_ranks"] for found in run.rows} == {"fwd": 1, "all": 2}
    (run,) = ranks_of([file("t_rank0.json", 0, 2)])
    assert (run.ranks, run.missing, run.rows) == ([0], [1], [])


@pytest.mark.parametrize(
    ("path", "rank", "name"),
    [
        ("a/trace_none_rank12.json.gz", 12, "a/trace_none_rank*.json.gz"),
        ("Rank-3.json", 3, "rank*.json"),
        ("x.rank.4.pt.trace.json", 4, "x.rank*.pt.trace.json"),
        ("a/rank_5/trace.json", 5, "a/rank*/trace.json"),
        ("rank0/trace_rank1.json", 1, "rank0/trace_rank*.json"),
        ("a/node-3_4711.1720000000000.pt.trace.json", None, "a/*.pt.trace.json"),
        ("a/trace.json", None, "a/trace.json"),
        ("7.json", None, "*.json"),
        (f"rank{'9' * 200}.json", None, "rank*.json"),
    ],
)
def test_the_rank_in_a_name_and_what_names_of_a_run_have_in_common(path: str, rank: int | None, name: str) -> None:
    assert (rank_of(file(path, None)), run_name(Path(path))) == (rank, name)
    # What the trace itself says counts.
    assert rank_of(file(path, 1)) == 1


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        (
            {f"d/trace_{run}_rank{rank}.json": rank for rank in (0, 1) for run in ("none", "default")},
            ["d/trace_none_rank*.json", "d/trace_default_rank*.json"],
        ),
        # torch's own names have host, process and time, the rank is in the trace alone: two cycles of its schedule.
        (
            {"a_11.100.pt.trace.json": 0, "a_11.200.pt.trace.json": 0, "b_13.102.pt.trace.json": 1}
            | {"b_13.203.pt.trace.json": 1},
            ["*.pt.trace.json", "*.pt.trace.json (2)"],
        ),
    ],
)
def test_several_runs_in_one_directory(ranks: dict[str, int], runs: list[str]) -> None:
    found = ranks_of([file(name, rank, 2) for name, rank in ranks.items()])
    assert [run.name for run in found] == runs
    assert [(run.ranks, run.missing) for run in found] == [([0, 1], [])] * 2


def test_a_trace_without_any_rank_is_in_no_run_and_the_same_file_counts_once() -> None:
    (run,) = ranks_of([file("trace.json", None), file("t_rank0.json", 0), file("t_rank0.json", 0)])
    assert (run.name, run.ranks) == ("t_rank*.json", [0])
