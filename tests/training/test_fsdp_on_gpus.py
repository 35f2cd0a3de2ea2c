"""Training runs on real GPUs: marks, kernels and streams are what they are said to be."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.ranks import Ranks
from overlap_sweep.telemetry import StepRecord
from overlap_sweep.trace.overlap import analyse_trace
from tests.processes import run_ranks
from tests.training.points import fsdp_point
from tests.training.runs import telemetry

LARGE = (
    *("model.hidden_size=2048", "model.ffn_hidden_size=8192", "model.num_attention_heads=16", "ranking.num_layers=4"),
    *("ranking.sequence_length=128", "training.batch_size=64", "training.mixed_precision=bf16"),
    *("training.max_steps=6", "profiling.enabled=true", "profiling.active=3", "workload.repeats=3"),
)
"""The device takes longer than the host, so that a mark is passed when the kernel behind it is there."""


def _train(ranks: Ranks, points: dict[str, dict[str, Any]], root: Path) -> None:
    from overlap_sweep.training.run import run_training

    for name, point in points.items():
        (root / name).mkdir(exist_ok=True)
        run_training({**point, "runtime": {**point["runtime"], "device": "cuda"}}, root / name, ranks)


WAIT_FOR_SMS_US = 100.0
"""At most, on the average of a step's collectives."""
DDP = "distributed.strategy=ddp"
ASKED = {
    "fsdp2": [],
    "own": ["distributed.enable_overlap=true"],
    "post": ["fsdp.backward_prefetch=BACKWARD_POST", "fsdp.limit_all_gathers=true"],
    "ddp": [DDP],
    "ddp_own": [
        "distributed.strategy=ddp",
        "distributed.enable_overlap=true",
        "distributed.overlap_reduce_scatter=true",
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    points = {name: fsdp_point(*LARGE, *given) for name, given in ASKED.items()}
    # With one connection streams wait for each other, which no mark tells.
    run_ranks(2, _train, points, root, device="cuda", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    return root


def profiled(directory: Path) -> list[StepRecord]:
    return [record for record in telemetry(directory) if record.profiled]


def kernels(trace: Path) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("cat") == "kernel"]


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", ASKED)
def test_marks_and_kernels_tell_the_same(name: str, runs: Path) -> None:
    rows = [row for row in analyse_trace(runs / name / "trace_rank0.json.gz") if row.phase == "all"]
    records = profiled(runs / name)
    assert len(rows) == len(records) == 3
    for record, row in zip(records, rows, strict=True):
        comm_us = (record.overlap_ms + record.exposed_comm_ms) * 1e3
        # The norm's reductions have no marks, and wait for the other rank. A mark is passed when the stream comes to
        # it, a kernel begins when it finds free SMs.
        assert comm_us > 0.98 * row.comm_busy_us - 1000
        assert comm_us < 1.02 * row.comm_busy_us + WAIT_FOR_SMS_US * row.num_comm_events
        # Between the marks of a layer are gaps between its kernels, too.
        assert record.exposed_comm_ms * 1e3 == pytest.approx(row.exposed_comm_us, abs=0.05 * record.step_ms * 1e3)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", ASKED)
def test_nothing_overlaps_in_the_baseline(name: str, runs: Path) -> None:
    rows = [row for row in analyse_trace(runs / name / "trace_none_rank0.json.gz") if row.phase == "all"]
    assert [row.overlap_us for row in rows] == [0.0] * 3
    assert all(row.comm_busy_us > 0 for row in rows)
    assert max(row.overlap_us for row in analyse_trace(runs / name / "trace_rank0.json.gz")) > 0


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize(
    ("name", "kinds"), [("own", ("AllGather", "ReduceScatter")), ("ddp_own", ("AllReduce", "ReduceScatter"))]
)
def test_collectives_run_on_streams_of_their_own(name: str, kinds: tuple[str, ...], runs: Path) -> None:
    busy_us: dict[str, Counter[int]] = defaultdict(Counter)
    for kernel in kernels(runs / name / "trace_rank0.json.gz"):
        kind = next((k for k in ("AllGather", "ReduceScatter", "AllReduce") if k in kernel["name"]), "compute")
        busy_us[kind][kernel["args"]["stream"]] += kernel["dur"]
    # What is on another stream, too, are the reductions of single numbers.
    mostly = {kind: busy_us[kind].most_common(1)[0][0] for kind in ("compute", *kinds)}
    assert len(set(mostly.values())) == 3
