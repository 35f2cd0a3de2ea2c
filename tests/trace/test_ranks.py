"""Which traces belong to one run, what is missing of it, and how far its ranks are apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_sweep.trace.files import TraceFile, read_trace_files
from overlap_sweep.trace.overlap import TraceRow
from overlap_sweep.trace.ranks import rank_of, ranks_of, run_name
from tests.trace.conftest import HandMadeTrace


def row(rank: int | None, iteration: int, phase: str, span_us: float, ratio: float | None = 0.5) -> TraceRow:
    return TraceRow(
        **{"file": "f", "rank": rank, "iteration": iteration, "phase": phase, "span_us": span_us},
        **{"gemm_busy_us": span_us / 2, "comm_busy_us": span_us / 4, "wait_us": span_us / 16, "idle_us": 1.0},
        **{"overlap_us": span_us / 8, "exposed_comm_us": span_us / 8, "overlap_ratio": ratio},
        **{"num_gemm_events": 1, "num_comm_events": 1, "num_wait_events": 0, "num_compute_events": 0},
    )


def file(name: str, rank: int | None, world_size: int | None = None, spans: tuple[float, ...] = (100.0,)) -> TraceFile:
    rows = [row(rank, i, phase, span) for i, span in enumerate(spans) for phase in ("fwd", "all")]
    return TraceFile(Path(name), rank=rank, world_size=world_size, rows=rows)


def unreadable(name: str) -> TraceFile:
    return TraceFile(Path(name), problem=f"{name} is cut short.")


def test_slowest_rank_and_skew_of_medians_over_iterations() -> None:
    # Medians: 100, 300, 100. The slowest iteration of all is rank 0's, and does not count.
    (run,) = ranks_of(
        [
            file("d/trace_rank0.json.gz", 0, 3, (100.0, 9000.0, 80.0)),
            file("d/trace_rank1.json.gz", 1, 3, (300.0, 320.0, 10.0)),
            file("d/trace_rank2.json.gz", 2, 3, (100.0, 100.0, 100.0)),
        ]
    )
    assert (run.name, run.world_size, run.ranks, run.missing) == ("d/trace_rank*.json.gz", 3, [0, 1, 2], [])
    assert [found.phase for found in run.rows] == ["fwd", "all"]
    for found in run.rows:
        assert (found.run, found.num_ranks) == (run.name, 3)
        assert (found.slowest_rank, found.slowest_us) == (1, 300.0)
        # The first of two that are as fast.
        assert (found.fastest_rank, found.fastest_us, found.skew_us) == (0, 100.0, 200.0)
        assert (found.exposed_comm_us, found.wait_us, found.overlap_ratio) == (37.5, 18.75, 0.5)


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
    assert {found.phase: found.num_ranks for found in run.rows} == {"fwd": 1, "all": 2}
    (run,) = ranks_of([file("t_rank0.json", 0, 2)])
    assert (run.ranks, run.missing, run.rows) == ([0], [1], [])


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("trace_rank12.json.gz", 12),
        ("Rank-3.json", 3),
        ("x.rank.4.pt.trace.json", 4),
        ("rank_5/trace.json", 5),
        ("trace.json", None),
        ("7.json", None),
        (f"rank{'9' * 200}.json", None),
    ],
)
def test_the_rank_in_the_name(name: str, rank: int | None) -> None:
    assert rank_of(file(name, None)) == rank
    # What the trace itself says counts.
    assert rank_of(file(name, 1)) == 1


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/trace_none_rank10.json.gz", "a/trace_none_rank*.json.gz"),
        ("a/rank0/trace.json", "a/rank*/trace.json"),
        ("rank0/trace_rank0.json", "rank0/trace_rank*.json"),
        ("a/node-3_4711.1720000000000.pt.trace.json", "a/*.pt.trace.json"),
        ("a/trace.json", "a/trace.json"),
    ],
)
def test_what_the_traces_of_a_run_have_in_common(path: str, name: str) -> None:
    assert run_name(Path(path)) == name


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


@pytest.mark.parametrize("name", ["trace.json", f"rank{'9' * 200}.json"])
def test_a_trace_without_any_rank_is_in_no_run(name: str) -> None:
    assert ranks_of([file(name, None)]) == []


def test_the_same_file_counts_once() -> None:
    (run,) = ranks_of([file("t_rank0.json", 0), file("t_rank0.json", 0)])
    assert run.ranks == [0]


def test_of_files(tmp_path: Path) -> None:
    for rank, end in ((0, 1100), (2, 1300)):
        made = HandMadeTrace(tmp_path / f"trace_rank{rank}.json")
        made.work("nvjet_a", 1, 1000, end)
        made.write(distributedInfo={"rank": rank, "world_size": 4})
    (tmp_path / "trace_rank3.json").write_text("[")
    (run,) = ranks_of(read_trace_files(sorted(tmp_path.glob("*.json"))))
    assert (run.world_size, run.ranks, run.missing) == (4, [0, 2], [1, 3])
    assert {(found.slowest_rank, found.skew_us) for found in run.rows} == {(2, 200.0)}
