from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.trace import TraceRow, analyse_trace, summarise
from overlap_sweep.trace.activity import COMM, COMPUTE, GEMM, WAIT
from overlap_sweep.trace.overlap import measure
from tests.trace import independent_check

TIMES = {
    "span": "span_us",
    "gemm": "gemm_busy_us",
    "comm": "comm_busy_us",
    "wait": "wait_us",
    "overlap": "overlap_us",
    "exposed": "exposed_comm_us",
    "idle": "idle_us",
}
COUNTS = {f"num_{kind}": f"num_{kind}_events" for kind in ("gemm", "comm", "wait", "compute")}


def in_nanoseconds(row: TraceRow) -> dict[str, int]:
    times = {short: round(getattr(row, name) * 1000) for short, name in TIMES.items()}
    return times | {short: getattr(row, name) for short, name in COUNTS.items()}


def test_h200_traces_are_those_of_the_independent_check(gpu_trace: Path) -> None:
    rows = analyse_trace(gpu_trace)
    assert {f"{row.iteration} {row.phase}": in_nanoseconds(row) for row in rows} == independent_check.check(gpu_trace)
    assert [row.phase for row in rows] == ["fwd", "bwd", "all"] * 2
    for row in rows:
        assert row.overlap_ratio == pytest.approx(row.overlap_us / min(row.gemm_busy_us, row.comm_busy_us))
        assert (row.file, row.rank) == (str(gpu_trace), 0)


def test_every_quantity_on_one_page(trace: Any) -> None:
    """GEMM 0-100 and 50-150; NCCL 120-220; computation 200-210; wait 230-250; copy 260-270; nothing 250-260."""
    trace.work("nvjet_a", 0, 1000, 1100)
    trace.work("nvjet_b", 1, 1050, 1150, stream=8)
    trace.work("ncclDevKernel_AllGather", 2, 1120, 1220, stream=9)
    trace.work("void at::native::gelu_kernel<float>(int)", 3, 1200, 1210)
    trace.work("kuserbuffers_pushrecv(int)", 4, 1230, 1250)
    trace.launch(5, 5)
    trace.copy("Memcpy DtoD (Device -> Device)", 1205, 1270, 5)
    fwd, whole = analyse_trace(trace.write(distributedInfo={"rank": 3, "world_size": 8}))
    assert fwd == TraceRow(
        file=str(trace.path),
        rank=3,
        iteration=0,
        phase="fwd",
        span_us=270.0,
        gemm_busy_us=150.0,
        comm_busy_us=100.0,
        wait_us=20.0,
        overlap_us=30.0,
        exposed_comm_us=60.0,
        idle_us=0.0,
        overlap_ratio=0.3,
        num_gemm_events=2,
        num_comm_events=1,
        num_wait_events=1,
        num_compute_events=1,
    )
    assert msgspec.structs.replace(whole, phase="fwd") == fwd


some_events = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10), st.sampled_from(range(5))), min_size=1)


@given(some_events)
def test_measure_against_counting_every_nanosecond(events: list[tuple[int, int, int]]) -> None:
    running: dict[int, set[int]] = {}
    for start, duration, kind in events:
        for moment in range(start, start + duration):
            running.setdefault(moment, set()).add(kind)
    kinds = running.values()
    span = max(start + duration for start, duration, _ in events) - min(start for start, _, _ in events)
    found = measure(np.array([[start, start + duration] for start, duration, _ in events]), np.array(events)[:, 2])
    assert [found.span_us, found.idle_us] == pytest.approx([span / 1000, (span - len(kinds)) / 1000])
    assert found.gemm_busy_us == sum(GEMM in k for k in kinds) / 1000
    assert found.comm_busy_us == sum(COMM in k for k in kinds) / 1000
    assert found.wait_us == sum(WAIT in k for k in kinds) / 1000
    assert found.overlap_us == sum({GEMM, COMM} <= k for k in kinds) / 1000
    assert found.exposed_comm_us == sum(COMM in k and not k & {GEMM, COMPUTE} for k in kinds) / 1000


def test_idle_and_a_ratio_that_does_not_exist(trace: Any) -> None:
    trace.work("nvjet_a", 1, 1000, 1010)
    trace.work("nvjet_a", 2, 2000, 2010)
    row = analyse_trace(trace.write())[0]
    assert (row.span_us, row.idle_us, row.comm_busy_us, row.overlap_ratio) == (1010.0, 990.0, 0.0, None)


def test_summary_is_the_median_over_the_iterations(gpu_trace: Path) -> None:
    first, _, _, second, *_ = analyse_trace(gpu_trace)
    contaminated = msgspec.structs.replace(first, gemm_busy_us=1e9, overlap_ratio=None)
    (summary,) = summarise([contaminated, first, second])
    assert (summary.phase, summary.iterations, summary.rank) == ("fwd", 3, 0)
    assert summary.gemm_busy_us == max(first.gemm_busy_us, second.gemm_busy_us)
    assert summary.overlap_ratio == pytest.approx(((first.overlap_ratio or 0.0) + (second.overlap_ratio or 0.0)) / 2)
    assert summary.num_gemm_events == second.num_gemm_events
    assert summarise([]) == []


def test_needs_no_torch() -> None:
    code = "import sys, overlap_sweep.trace; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
