"""CPU traces: what operators calling operators amount to, and a recorded one of gloo."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.trace import TraceRow, analyse_trace


def by_phase(rows: list[TraceRow]) -> dict[tuple[int, str], TraceRow]:
    return {(row.iteration, row.phase): row for row in rows}


def test_a_gemm_counts_once_however_deep_the_call(trace: Any) -> None:
    trace.op("aten::linear", 0, 100)
    trace.op("aten::t", 1, 5)
    trace.op("aten::addmm", 10, 90)
    trace.op("aten::copy_", 12, 20)
    trace.op("aten::resolve_conj", 21, 22)
    trace.op("aten::mm", 100, 150)
    row = analyse_trace(trace.write())[0]
    assert (row.num_gemm_events, row.gemm_busy_us, row.span_us, row.idle_us) == (2, 130.0, 140.0, 10.0)


def test_of_other_operators_the_outermost_count(trace: Any) -> None:
    trace.op("aten::softmax", 0, 50)
    trace.op("aten::_softmax", 2, 48)
    trace.op("aten::copy_", 3, 10)
    trace.op("aten::gelu", 60, 90)
    trace.op("aten::scaled_dot_product_attention", 100, 200)
    trace.op("aten::bmm", 120, 150)
    row = analyse_trace(trace.write())[0]
    assert (row.num_compute_events, row.num_gemm_events) == (3, 1)
    assert (row.gemm_busy_us, row.idle_us) == (30.0, 20.0)


def test_operators_inside_a_gloo_span_are_part_of_the_communication_and_launching_is_none(trace: Any) -> None:
    trace.op("c10d::_allgather_base_", 0, 5)
    trace.annotation("gloo:all_gather", 10, 110, thread=5)
    trace.op("aten::copy_", 90, 95, thread=5)
    trace.op("aten::add_", 95, 100, thread=5)
    trace.op("aten::add_", 30, 50, thread=1)
    row = analyse_trace(trace.write())[0]
    assert (row.comm_busy_us, row.exposed_comm_us, row.span_us) == (100.0, 80.0, 100.0)
    assert (row.num_comm_events, row.num_compute_events) == (1, 1)


def test_recorded_gloo_trace(cpu_trace: Path) -> None:
    """Against sums written out for this file: every span and GEMM of it is known by name."""
    document = json.loads(gzip.decompress(cpu_trace.read_bytes()))
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    backward = [event for event in events if event["name"].startswith("autograd::engine::evaluate_function: Col")]
    forward = [event for event in events if event["name"] == "ColumnParallel"]
    rows = by_phase(analyse_trace(cpu_trace))
    assert set(rows) == {(iteration, phase) for iteration in (0, 1) for phase in ("fwd", "bwd", "all")}
    for iteration in (0, 1):
        for phase, window, gemms, spans in (("fwd", forward, 1, 3), ("bwd", backward, 2, 2)):
            start = window[iteration]["ts"]
            end = start + window[iteration]["dur"]
            inside = [event for event in events if start <= event["ts"] < end]
            gemm = [event for event in inside if event["name"] == "aten::mm"]
            comm = [event for event in inside if event["name"].startswith("gloo:")]
            row = rows[iteration, phase]
            assert (row.num_gemm_events, row.num_comm_events) == (gemms, spans) == (len(gemm), len(comm))
            assert row.gemm_busy_us == pytest.approx(sum(event["dur"] for event in gemm), abs=1e-6)
            assert row.comm_busy_us == pytest.approx(covered(comm, []), abs=1e-3)
            both = covered(comm, []) + covered(gemm, []) - covered(comm, gemm)
            assert row.overlap_us == pytest.approx(both, abs=2e-3)
        whole = rows[iteration, "all"]
        assert (whole.num_gemm_events, whole.num_comm_events) == (3, 5)
        assert whole.comm_busy_us == pytest.approx(
            rows[iteration, "fwd"].comm_busy_us + rows[iteration, "bwd"].comm_busy_us, abs=1e-6
        )


def covered(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    """Microseconds that the events of both lists cover together, counted by walking over them."""
    total, reach = 0.0, float("-inf")
    for event in sorted(a + b, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(reach, event["ts"]))
        reach = max(reach, end)
    return total
