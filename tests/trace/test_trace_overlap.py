from __future__ import annotations

import json
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

H200 = {
    # (configuration, iteration, phase): span, gemm, comm, wait, overlap, exposed, idle in nanoseconds
    ("none", 0, "fwd"): (15_317_537, 5_745_929, 1_378_521, 0, 0, 1_378_521, 717_724),
    ("none", 0, "bwd"): (19_297_874, 11_738_161, 2_182_423, 0, 1_476_891, 705_532, 88_574),
    ("none", 0, "all"): (34_617_011, 17_484_090, 3_560_944, 0, 1_476_891, 2_084_053, 807_898),
    ("none", 1, "fwd"): (14_672_133, 5_734_985, 1_421_819, 0, 0, 1_421_819, 74_944),
    ("none", 1, "bwd"): (19_398_993, 11_764_850, 2_183_671, 0, 1_479_418, 704_253, 94_460),
    ("none", 1, "all"): (34_076_021, 17_499_835, 3_605_490, 0, 1_479_418, 2_126_072, 174_299),
    ("pipeline_rs", 0, "fwd"): (15_969_920, 6_548_199, 2_094_615, 221_405, 1_538_138, 556_477, 878_108),
    ("pipeline_rs", 0, "bwd"): (19_145_779, 11_749_489, 3_746_383, 121_248, 3_485_679, 260_704, 156_061),
    ("pipeline_rs", 0, "all"): (35_116_979, 18_297_688, 5_840_998, 342_653, 5_023_817, 817_181, 1_035_449),
    ("pipeline_rs", 1, "fwd"): (14_736_869, 6_661_957, 1_447_355, 42_239, 1_246_299, 201_056, 134_720),
    ("pipeline_rs", 1, "bwd"): (19_151_795, 11_823_506, 3_626_451, 210_623, 3_451_188, 175_263, 152_448),
    ("pipeline_rs", 1, "all"): (33_890_008, 18_485_463, 5_073_806, 252_862, 4_697_487, 376_319, 288_512),
    ("ring_rs", 0, "fwd"): (15_772_067, 5_819_976, 1_096_314, 2_534_870, 1_081_594, 14_720, 479_588),
    ("ring_rs", 0, "bwd"): (19_165_175, 11_714_452, 3_874_323, 374_880, 3_704_052, 170_271, 165_312),
    ("ring_rs", 0, "all"): (34_938_490, 17_534_428, 4_970_637, 2_909_750, 4_785_646, 184_991, 646_148),
    ("ring_rs", 1, "fwd"): (13_842_411, 5_898_025, 1_198_425, 42_335, 1_096_921, 101_504, 153_090),
    ("ring_rs", 1, "bwd"): (18_977_911, 11_669_937, 3_682_065, 10_431, 3_442_514, 239_551, 156_196),
    ("ring_rs", 1, "all"): (32_821_730, 17_567_962, 4_880_490, 52_766, 4_539_435, 341_055, 310_694),
    ("te_default", 0, "fwd"): (15_730_296, 6_301_345, 1_952_309, 204_222, 1_273_911, 678_398, 998_622),
    ("te_default", 0, "bwd"): (19_024_329, 11_892_778, 1_998_871, 64_830, 1_960_888, 37_983, 158_463),
    ("te_default", 0, "all"): (34_755_970, 18_194_123, 3_951_180, 269_052, 3_234_799, 716_381, 1_158_430),
    ("te_default", 1, "fwd"): (14_462_462, 6_247_940, 1_742_102, 175_838, 1_270_426, 471_676, 138_815),
    ("te_default", 1, "bwd"): (19_282_536, 12_012_745, 1_891_832, 114_753, 1_856_535, 35_297, 152_256),
    ("te_default", 1, "all"): (33_746_470, 18_260_685, 3_633_934, 290_591, 3_126_961, 506_973, 292_543),
}


def in_nanoseconds(row: TraceRow) -> dict[str, int]:
    times = {short: round(getattr(row, name) * 1000) for short, name in TIMES.items()}
    return times | {short: getattr(row, name) for short, name in COUNTS.items()}


def test_h200_traces_are_those_of_the_independent_script(gpu_trace: Path) -> None:
    script = Path(__file__).parent / "independent_check.py"
    printed = subprocess.run([sys.executable, script, gpu_trace], check=True, capture_output=True, text=True).stdout
    expected = json.loads(printed)[str(gpu_trace)]
    rows = analyse_trace(gpu_trace)
    assert {f"{row.iteration} {row.phase}": in_nanoseconds(row) for row in rows} == expected


def test_h200_traces_are_pinned(gpu_trace: Path) -> None:
    rows = analyse_trace(gpu_trace)
    name = gpu_trace.name.removeprefix("h200x4_llama3_70b_layer_").removesuffix(".json.gz")
    found = {
        (name, row.iteration, row.phase): tuple(round(getattr(row, time) * 1000) for time in TIMES.values())
        for row in rows
    }
    assert found == {key: value for key, value in H200.items() if key[0] == name}
    for row in rows:
        assert row.overlap_ratio == pytest.approx(row.overlap_us / min(row.gemm_busy_us, row.comm_busy_us))
        assert (row.file, row.rank) == (str(gpu_trace), 0)


def test_every_quantity_on_one_page(trace: Any) -> None:
    """GEMM 0-100 and 50-150; NCCL 120-220; computation 200-210; wait 230-250; copy 260-270; nothing 250-260."""
    for correlation in range(6):
        trace.launch(correlation, correlation)
    trace.kernel("nvjet_a", 1000, 1100, 0, stream=7)
    trace.kernel("nvjet_b", 1050, 1150, 1, stream=8)
    trace.kernel("ncclDevKernel_AllGather", 1120, 1220, 2, stream=9)
    trace.kernel("void at::native::gelu_kernel<float>(int)", 1200, 1210, 3)
    trace.kernel("kuserbuffers_pushrecv(int)", 1230, 1250, 4)
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
    for correlation in (1, 2):
        trace.launch(correlation, correlation)
        trace.kernel("nvjet_a", 1000 * correlation, 1000 * correlation + 10, correlation)
    row = analyse_trace(trace.write())[0]
    assert (row.span_us, row.idle_us, row.comm_busy_us, row.overlap_ratio) == (1010.0, 990.0, 0.0, None)


def test_rows_become_json_with_the_identifying_columns_first(gpu_trace: Path) -> None:
    rows = json.loads(msgspec.json.encode(analyse_trace(gpu_trace)))
    assert list(rows[0])[:5] == ["file", "rank", "iteration", "phase", "span_us"]
    assert [row["phase"] for row in rows] == ["fwd", "bwd", "all"] * 2


def test_summary_is_the_median_over_the_iterations(gpu_trace: Path) -> None:
    first, second = analyse_trace(gpu_trace)[:1], analyse_trace(gpu_trace)[3:4]
    contaminated = [msgspec.structs.replace(row, gemm_busy_us=1e9, overlap_ratio=None) for row in first]
    (summary,) = summarise(contaminated + first + second)
    assert (summary.phase, summary.iterations, summary.rank) == ("fwd", 3, 0)
    assert summary.gemm_busy_us == max(first[0].gemm_busy_us, second[0].gemm_busy_us)
    ratios = [first[0].overlap_ratio, second[0].overlap_ratio]
    assert summary.overlap_ratio == pytest.approx(sum(ratio or 0.0 for ratio in ratios) / 2)
    assert summary.num_gemm_events == second[0].num_gemm_events


def test_summary_of_nothing() -> None:
    assert summarise([]) == []


def test_needs_no_torch() -> None:
    code = "import sys, overlap_sweep.trace; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
