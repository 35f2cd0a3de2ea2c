"""Traces of two H200s (benchmarks/record_gpu_traces.py) against what the recorded programs are known to have done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap_sweep.trace.files import TraceFile, read_trace_files
from overlap_sweep.trace.overlap import TraceRow
from overlap_sweep.trace.ranks import ranks_of

TRACES = Path(__file__).parent.parent / "data" / "traces"
EXPECTED = json.loads((TRACES / "h200x2_expected.json").read_text())
LAYERS = 2


def recorded(case: str) -> list[TraceFile]:
    return read_trace_files(sorted(TRACES.glob(f"h200x2_{case}_rank*.json.gz")))


def rows_of(file: TraceFile, phase: str) -> list[TraceRow]:
    return [row for row in file.rows if row.phase == phase]


def events(file: TraceFile, phase: str, name: str) -> list[int]:
    """How many events of kernels with such a name each iteration has."""
    parts = [part for part in file.parts if part.by == "kernel" and part.phase == phase]
    iterations = sorted({row.iteration for row in file.rows})
    return [sum(p.num_events for p in parts if p.iteration == i and name in p.name) for i in iterations]


@pytest.mark.parametrize(
    "case", ["ddp", "fsdp2_checkpoint", "reentrant_checkpoint", "compiled", "cuda_graph", "send_recv"]
)
def test_every_matrix_product_is_found_in_its_pass(case: str) -> None:
    for file in recorded(case):
        assert (file.problem, file.warnings, file.world_size) == (None, [], 2)
        for phase, count in EXPECTED[case].items():
            assert {row.num_gemm_events for row in rows_of(file, phase)} == {count}


def test_iterations_from_the_profilers_steps_and_without() -> None:
    assert [row.iteration for row in rows_of(recorded("ddp")[0], "all")] == [1, 2]
    assert [row.iteration for row in rows_of(recorded("reentrant_checkpoint")[0], "all")] == [0, 1, 2]


@pytest.mark.parametrize(("case", "again"), [("fsdp2_checkpoint", 3), ("reentrant_checkpoint", 4)])
def test_checkpoints_run_forward_again(case: str, again: int) -> None:
    """A layer has four products. Without reentrance the last of them is not needed again, and left out."""
    for file in recorded(case):
        assert {row.num_gemm_events for row in rows_of(file, "recompute")} == {again * LAYERS}
        assert events(file, "recompute", "sdpa_sm90_flash_fprop") == [LAYERS] * len(rows_of(file, "all"))
        assert events(file, "fwd", "sdpa_sm90_flash_fprop") == [LAYERS] * len(rows_of(file, "all"))


@pytest.mark.parametrize("case", ["ddp", "compiled", "cuda_graph", "send_recv", "symm_mem"])
def test_nothing_is_recomputed_without_checkpoints(case: str) -> None:
    assert not any(rows_of(file, "recompute") for file in recorded(case))


def test_ddp_reduces_gradients_beside_the_backward_pass_and_nothing_in_the_forward_pass() -> None:
    (file,) = recorded("ddp")
    # What it copies back when autograd has finished is no forward pass either.
    assert all(row.num_comm_events == 0 and row.span_us < 2000 for row in rows_of(file, "fwd"))
    for row in rows_of(file, "bwd"):
        assert 0 < row.overlap_us < row.comm_busy_us
        assert row.exposed_comm_us < row.comm_busy_us - row.overlap_us


def test_gradients_that_are_reduced_by_hand_after_the_backward_pass_are_in_neither() -> None:
    (file,) = recorded("compiled")
    assert {row.num_comm_events for phase in ("fwd", "bwd") for row in rows_of(file, phase)} == {0}
    assert {row.num_comm_events for row in rows_of(file, "all")} == {10}


def test_fsdp_gathers_in_both_passes_and_scatters_in_the_backward_pass() -> None:
    for file in recorded("fsdp2_checkpoint"):
        assert events(file, "fwd", "AllGather") == [LAYERS] * 2
        assert events(file, "bwd", "AllGather") == [LAYERS] * 2
        assert events(file, "fwd", "ReduceScatter") == [0] * 2
        assert events(file, "bwd", "ReduceScatter") == [LAYERS] * 2


def test_a_cuda_graphs_replays_are_iterations_without_passes() -> None:
    for file in recorded("cuda_graph"):
        assert [(row.iteration, row.phase) for row in file.rows] == [(0, "all"), (1, "all"), (2, "all")]
        assert {(row.num_gemm_events, row.num_comm_events) for row in file.rows} == {(2, 2)}


def test_symmetric_memory_communicates_by_peer_copies_and_waits_in_barriers() -> None:
    for file in recorded("symm_mem"):
        for row in rows_of(file, "all"):
            assert row.num_gemm_events >= EXPECTED["symm_mem"]["at_least"]
            assert (row.num_comm_events, row.num_wait_events >= 7) == (2, True)


def test_the_ranks_of_a_run_side_by_side() -> None:
    (run,) = ranks_of(recorded("send_recv"))
    assert (run.world_size, run.ranks, run.missing) == (2, [0, 1], [])
    (whole,) = [row for row in run.rows if row.phase == "all"]
    assert (whole.slowest_rank, whole.slowest_us) == (1, pytest.approx((338.272 + 282.016) / 2))
    assert whole.skew_us == pytest.approx(whole.slowest_us - whole.fastest_us)
