"""Training runs on real GPUs: marks, kernels and streams are what they are said to be."""

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from overlap_sweep.measure import Ranks
from overlap_sweep.trace import TraceRow
from overlap_sweep.workloads.fsdp.config import Resolved
from overlap_sweep.workloads.fsdp.telemetry import StepRecord
from tests.composed import fsdp_point
from tests.processes import run_ranks
from tests.trace.conftest import analyse_trace
from tests.workloads.fsdp.test_training_runs import telemetry

LAYERS = (
    *("model.hidden_size=2048", "model.ffn_hidden_size=8192", "model.num_attention_heads=16", "ranking.num_layers=4"),
    *("ranking.sequence_length=128", "training.mixed_precision=bf16", "training.max_steps=3"),
    *("profiling.enabled=true", "profiling.active=3", "workload.repeats=3"),
)
LARGE = "training.batch_size=256"
"""The device takes twice as long as the host: a layer's kernels follow each other without gaps."""
SMALL = "training.batch_size=32"
"""The device waits for the host: streams are idle when collectives are launched, and SMs are free."""


def _train(ranks: Ranks, points: dict[str, Resolved], root: Path) -> None:
    from overlap_sweep.workloads.fsdp.run import run

    for name, point in points.items():
        (root / name).mkdir(exist_ok=True)
        run(replace(point, runtime=replace(point.runtime, device="cuda")), root / name, ranks)


DDP = "distributed.strategy=ddp"
ASKED = {
    "fsdp2": [],
    "own": ["distributed.enable_overlap=true"],
    "post": ["fsdp.backward_prefetch=BACKWARD_POST", "fsdp.limit_all_gathers=true"],
    "ddp": [DDP],
    "ddp_own": [DDP, "distributed.enable_overlap=true", "distributed.overlap_reduce_scatter=true"],
}
POINTS = {
    **{name: [LARGE, *given] for name, given in ASKED.items()},
    **{f"small_{name}": [SMALL, *ASKED[name]] for name in ("fsdp2", "own", "ddp")},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    points = {name: fsdp_point(*LAYERS, *given) for name, given in POINTS.items()}
    # With one connection streams wait for each other, which no mark tells.
    run_ranks(2, _train, points, root, device="cuda", environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    return root


def kernels(trace: Path) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("cat") == "kernel"]


def steps_of(directory: Path) -> list[tuple[StepRecord, TraceRow]]:
    """Of rank 0 by marks and by kernels."""
    rows = [row for row in analyse_trace(directory / "trace_rank0.json.gz") if row.phase == "all"]
    records = [record for record in telemetry(directory) if record.profiled]
    assert len(rows) == len(records) == 3
    return list(zip(records, rows, strict=True))


def marked_too_much_us(directory: Path) -> float:
    """By how much communication by marks exceeds that by kernels, per collective: the median of the steps, of which the
    host may be held up in one."""
    return median(
        ((record.overlap_ms + record.exposed_comm_ms) * 1e3 - row.comm_us) / row.num_comm_events
        for record, row in steps_of(directory)
    )


@pytest.mark.quiet
@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", POINTS)
def test_marks_miss_no_communication(name: str, runs: Path) -> None:
    # Of an idle stream it is known to some 10 us when it began.
    assert marked_too_much_us(runs / name) > -15


@pytest.mark.quiet
@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", [name for name in POINTS if name not in ASKED])
def test_marks_add_little_to_communication(name: str, runs: Path) -> None:
    # The mark of a short collective's end is there when the host has come to it.
    assert marked_too_much_us(runs / name) < 100


@pytest.mark.quiet
@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", ASKED)
def test_marks_and_kernels_expose_the_same(name: str, runs: Path) -> None:
    """Where a layer's kernels leave no gaps. A collective may wait for SMs after its mark, but those compute then."""
    differ = [
        abs(step.exposed_comm_ms - row.exposed_comm_us / 1e3) / step.step_ms for step, row in steps_of(runs / name)
    ]
    assert median(differ) < 0.02


@pytest.mark.quiet
@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("name", ASKED)
def test_nothing_overlaps_in_the_baseline(name: str, runs: Path) -> None:
    rows = [row for row in analyse_trace(runs / name / "trace_none_rank0.json.gz") if row.phase == "all"]
    assert [row.overlap_us for row in rows] == [0.0] * 3
    assert all(row.comm_us > 0 for row in rows)
    # GEMMs that take all SMs leave all-reduces none: other kernels hide those.
    assert any(row.exposed_comm_us < 0.9 * row.comm_us for _, row in steps_of(runs / name))


@pytest.mark.quiet
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


def _losses(ranks: Ranks, points: dict[str, Resolved], root: Path) -> dict[str, list[float]]:
    from overlap_sweep.workloads.fsdp.run import run

    found = {}
    for name, point in points.items():
        (root / name).mkdir(exist_ok=True)
        found[name] = run(point, root / name, ranks)["measured"].losses
    return found


OWN_GROUP = "fsdp.separate_reduce_scatter_group=true"


def losses_of(asked: dict[str, list[str]], root: Path, **environment: str) -> dict[str, list[float]]:
    """Returns the losses of the first of two ranks, by run."""
    points = {name: fsdp_point(*LAYERS, SMALL, "runtime.device=cuda", *given) for name, given in asked.items()}
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", **environment}
    first: dict[str, list[float]] = run_ranks(2, _losses, points, root, device="cuda", environment=variables)[0]
    return first


@pytest.mark.gpu(count=2)
def test_reduce_scatters_in_a_group_of_their_own_learn_the_same(tmp_path: Path) -> None:
    losses = losses_of({"usual": [], "own": [OWN_GROUP]}, tmp_path)
    assert losses["own"] == pytest.approx(losses["usual"], rel=1e-3)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("kind", ["kernels", "copy_engines"])
def test_symmetric_memory_learns_the_same_by_other_means(kind: str, tmp_path: Path) -> None:
    symmetric = f"fsdp.symmetric_memory={kind}"
    asked: dict[str, list[str]] = {"usual": [], "symmetric": [symmetric], "symmetric_own": [symmetric, OWN_GROUP]}
    losses = losses_of(asked, tmp_path, NCCL_CTA_POLICY="2" if kind == "copy_engines" else "0")
    # Averages are sums that are divided: the last bits of bf16 differ.
    assert losses["symmetric"] == pytest.approx(losses["usual"], rel=2e-2)
    assert losses["symmetric_own"] == pytest.approx(losses["symmetric"], rel=1e-3)
    gathers = {
        name: {
            kernel["name"] for kernel in kernels(tmp_path / name / "trace_rank0.json.gz") if "Gather" in kernel["name"]
        }
        for name in asked
    }
    assert gathers["usual"]
    assert not any("ncclSym" in name for name in gathers["usual"])
    for name in ("symmetric", "symmetric_own"):
        # Parts of norms are no multiples of 16 bytes, and take the usual way.
        assert any("ncclSym" in kernel for kernel in gathers[name]) == (kind == "kernels")
        rows = [row for row in analyse_trace(tmp_path / name / "trace_rank0.json.gz") if row.phase == "all"]
        assert all(row.comm_us > 0 for row in rows)
