"""Training runs of real processes: what they learn, and what of their communication overlaps."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_sweep.ranks import Ranks
from overlap_sweep.run_directory import TrainingRun, metrics_file
from overlap_sweep.telemetry import StepRecord
from overlap_sweep.trace.overlap import analyse_trace
from tests.processes import run_ranks
from tests.training.points import fsdp_point
from tests.training.runs import losses, telemetry, train

pytestmark = pytest.mark.end_to_end

FSDP2 = {
    "defaults": [],
    "forward_prefetch": ["fsdp.forward_prefetch=2"],
    "backward_post": ["fsdp.backward_prefetch=BACKWARD_POST"],
    "on demand": ["fsdp.backward_prefetch=null"],
    "kept": ["fsdp.reshard_after_forward=false"],
    "limited": ["fsdp.limit_all_gathers=true", "fsdp.forward_prefetch=true"],
    "own streams": ["distributed.enable_overlap=true"],
    "not synced": ["fsdp.sync_module_states=false"],
    "compiled": ["compile.enabled=true", "compile.backend=aot_eager"],
    "gated": ["model.gated_mlp=true", "model.num_kv_heads=2"],
}
DDP = {
    "ddp": ["distributed.strategy=ddp"],
    "ddp small buckets": ["distributed.strategy=ddp", "distributed.bucket_cap_mb=0.01"],
    "ddp own streams": ["distributed.strategy=ddp", "distributed.enable_overlap=true"],
    "ddp load": [
        *("distributed.strategy=ddp", "distributed.enable_overlap=true", "distributed.overlap_reduce_scatter=true"),
        *("distributed.bucket_cap_mb=0.01", "distributed.overlap_clone_for_reduce_scatter=false"),
    ],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """One process with the batches of two, and of four."""
    twice = ["training.batch_size=4"]
    accumulated = [*twice, "training.gradient_accumulation=2"]
    asked = {"two": twice, "four": ["training.batch_size=8"], "gated": [*twice, *FSDP2["gated"]]}
    return losses(train(tmp_path_factory.mktemp("alone"), 1, **asked, accumulated=accumulated))


Pair = tuple[Path, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    more = {"accumulated": ["training.gradient_accumulation=2"]}
    more["ddp accumulated"] = [*DDP["ddp"], *more["accumulated"]]
    return root, train(root, 2, **FSDP2, **DDP, **more)


@pytest.mark.parametrize("name", [*FSDP2, *DDP, "accumulated", "ddp accumulated"])
def test_two_processes_learn_what_one_learns(name: str, alone: dict[str, list[float]], pair: Pair) -> None:
    expected = alone[name if name == "gated" else "accumulated" if "accumulated" in name else "two"]
    assert losses(pair[1])[name] == pytest.approx(expected, rel=1e-5)
    assert expected[0] != pytest.approx(expected[-1], rel=1e-2)


def test_replicas_of_shards_learn_it_too(tmp_path: Path, alone: dict[str, list[float]]) -> None:
    found = train(tmp_path, 4, replicas=["fsdp.replicas=2"])
    assert losses(found)["replicas"] == pytest.approx(alone["four"], rel=1e-5)
    streams_ms = telemetry(tmp_path / "replicas")[-1].streams_ms
    assert min(streams_ms.values()) > 0


def test_lower_precisions_learn_nearly_the_same(tmp_path: Path, alone: dict[str, list[float]]) -> None:
    bf16 = ["training.mixed_precision=bf16"]
    found = train(tmp_path, 2, fsdp2=bf16, ddp=[*bf16, *DDP["ddp"]], fp16=["training.mixed_precision=fp16"])
    for name in ("fsdp2", "ddp"):
        assert losses(found)[name] == pytest.approx(alone["two"], rel=0.1)
    assert telemetry(tmp_path / "fp16")[0].loss_scale == 2**16
    assert telemetry(tmp_path / "fsdp2")[0].loss_scale is None


LARGER = ("model.hidden_size=256", "model.ffn_hidden_size=1024", "ranking.sequence_length=32", "training.batch_size=4")
"""Layers that take longer than a thread takes to wake up."""


def sum_of_comm(record: StepRecord) -> float:
    return sum(record.streams_ms.values()) - record.streams_ms["compute"]


def test_what_is_asked_for_early_overlaps_and_what_is_asked_for_late_does_not(tmp_path: Path) -> None:
    early = ("defaults", "forward_prefetch", "ddp small buckets", "ddp load")
    asked = {**FSDP2, **DDP, "ddp small buckets": ["distributed.strategy=ddp", "distributed.bucket_cap_mb=1"]}
    train(tmp_path, 2, **{name: [*LARGER, *asked[name]] for name in (*early, "on demand", "backward_post")})
    for name in early:
        assert sum(record.overlap_ms for record in telemetry(tmp_path / name.replace(" ", "_"))) > 0, name
    for record in telemetry(tmp_path / "on_demand"):
        assert (record.overlap_ms, record.exposed_comm_ms) == (0.0, pytest.approx(sum_of_comm(record), rel=0.01))
    # Beside nothing but the reduce-scatter before it.
    assert [record.overlap_ms for record in telemetry(tmp_path / "backward_post")] == [0.0] * 4


def test_kinds_of_communication_are_told_apart(pair: Pair) -> None:
    def kinds(name: str) -> set[str]:
        return {kind for kind, ms in telemetry(pair[0] / name)[-1].streams_ms.items() if ms}

    # The all-reduce is of the gradients' norm.
    assert kinds("defaults") == {"compute", "all_reduce", "reduce_scatter", "auxiliary"}
    assert kinds("ddp") == {"compute", "all_reduce"}
    assert kinds("ddp_load") == {"compute", "all_reduce", "reduce_scatter"}


def test_what_a_run_returns(pair: Pair) -> None:
    measured = pair[1]["defaults"]
    training: TrainingRun = measured["training"]
    assert list(training.step) == ["point", "none", "floor"]
    assert {len(timing.samples_us) for timing in training.step.values()} == {3}
    assert measured["objective_us"] == training.step["point"].median_us
    assert (training.samples_per_step, training.compiled, training.host_us) == (4, "no", {})
    assert training.telemetry == [metrics_file(0), metrics_file(1)]
    assert len(training.losses) == 4
    assert measured["launch_bound"] is False
    assert pair[1]["compiled"]["training"].compiled == "aot_eager"


def test_lines_tell_steps_and_rates(pair: Pair) -> None:
    found = telemetry(pair[0] / "defaults", rank=1)
    assert [record.step for record in found] == [0, 1, 2, 3]
    assert {record.rank for record in found} == {1}
    assert {record.learning_rate for record in found} == {0.01}
    assert [record.loss for record in found] == pair[1]["defaults"]["training"].losses
    norms = [[record.grad_norm for record in telemetry(pair[0] / name)] for name in ("defaults", "ddp")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def _set_up(ranks: Ranks, point: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A model in training that records; its steps, itself, its collectives."""
    from overlap_sweep.training.run import _set_up as set_up

    trained = set_up(point, ranks)
    trained.recorder.on = True
    return trained.steps, trained.steps._model, trained.collectives


def _spans(ranks: Ranks, points: dict[str, dict[str, Any]]) -> dict[str, Counter[str]]:
    """How many spans of each kind the second step of each point has."""
    found = {}
    for name, point in points.items():
        steps, _, collectives = _set_up(ranks, point)
        collectives.mode = name.partition(" ")[2] if name.startswith("load ") else "point"
        steps.run()
        found[name] = Counter(span.stream for span in steps.run().spans)
    return found


def test_how_often_a_step_communicates() -> None:
    twice = ["training.gradient_accumulation=2"]
    asked = {"defaults": [], "accumulated": twice, "kept": FSDP2["kept"], "replicas": ["fsdp.replicas=2"]}
    asked |= {"ddp": DDP["ddp small buckets"], "ddp accumulated": [*DDP["ddp small buckets"], *twice]}
    asked |= dict.fromkeys(("load", "load none", "load floor"), DDP["ddp load"])
    points = {name: fsdp_point("distributed.dp_size=4", *given) for name, given in asked.items()}
    found = run_ranks(4, _spans, points, keep="cpu")
    units = 5
    # An all-reduce of the gradients' norm is in the middle of the optimizer's step.
    norm, optimizer = 1, 2
    assert found[0]["defaults"] == {
        **{"compute": 2 * units + optimizer, "auxiliary": 2 * units},
        **{"reduce_scatter": units, "all_reduce": norm},
    }
    assert found[0]["accumulated"] == {
        **{"compute": 4 * units + optimizer, "auxiliary": 4 * units},
        **{"reduce_scatter": units, "all_reduce": norm},
    }
    assert found[0]["kept"]["auxiliary"] == units
    assert found[0]["replicas"]["all_reduce"] == units + norm
    assert found[0]["ddp"]["all_reduce"] == found[0]["ddp accumulated"]["all_reduce"] > units
    # What loads the point loads it without overlap, too.
    assert found[0]["load none"]["reduce_scatter"] == found[0]["load"]["reduce_scatter"]
    assert set(found[0]["load floor"]) == {"compute"}
    assert found[0]["load"]["all_reduce"] == found[0]["load"]["reduce_scatter"] > units
    assert found[1:] == found[:-1]


def test_the_profiler_and_the_marks_see_the_same_collectives(tmp_path: Path) -> None:
    asked = ["profiling.enabled=true", "profiling.active=3", "model.hidden_size=128", "model.ffn_hidden_size=512"]
    measured = train(tmp_path, 2, run=asked)["run"]
    assert measured["traces"] == [
        *("trace_rank0.json.gz", "trace_rank1.json.gz", "trace_none_rank0.json.gz", "trace_none_rank1.json.gz")
    ]
    marked = [record for record in telemetry(tmp_path / "run") if record.profiled]
    rows = [row for row in analyse_trace(tmp_path / "run" / "trace_rank0.json.gz") if row.phase == "all"]
    assert (len(marked), len(rows)) == (3, 3)
    for record, row in zip(marked, rows, strict=True):
        # gloo's own spans begin when its thread does, ours when the collective was handed over and a thread was free.
        assert sum_of_comm(record) * 1e3 > 0.7 * row.comm_busy_us
        assert row.comm_busy_us > 0
    none = [row for row in analyse_trace(tmp_path / "run" / "trace_none_rank0.json.gz") if row.phase == "all"]
    assert [row.overlap_us for row in none] == [0.0] * len(none)
    assert all(row.comm_busy_us > 0 for row in none)


def _modes(ranks: Ranks, point: dict[str, Any], root: Path) -> dict[str, list[StepRecord]]:
    """One step in each mode, recorded."""
    from overlap_sweep.measure.device_samples import DeviceSampler
    from overlap_sweep.training.collectives import FLOOR, NONE, POINT
    from overlap_sweep.training.recording import Recording

    steps, model, collectives = _set_up(ranks, point)
    steps.freeze()
    # The first step asks torch for much that it keeps.
    steps.run()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = {}
    for mode in (POINT, NONE, FLOOR):
        collectives.mode = mode
        directory = root / mode
        directory.mkdir(exist_ok=True)
        recording = Recording(directory, ranks, DeviceSampler(ranks.device, 0.0), log_interval=1)
        recording.add(steps.run())
        found[mode] = telemetry(directory, ranks.rank)
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach(), was)
    return found


@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_the_baselines_are_what_they_are_called(strategy: str, tmp_path: Path) -> None:
    point = fsdp_point(f"distributed.strategy={strategy}", "distributed.bucket_cap_mb=1", *LARGER)
    for modes in run_ranks(2, _modes, point, tmp_path, keep="cpu"):
        (overlapped,), (none,), (floor,) = modes["point"], modes["none"], modes["floor"]
        assert overlapped.overlap_ms > 0
        assert (none.overlap_ms, none.exposed_comm_ms) == (0.0, pytest.approx(sum_of_comm(none)))
        assert sum_of_comm(none) > 0
        assert sum_of_comm(floor) == 0
        assert math.isfinite(floor.loss)


def _left(ranks: Ranks, points: list[dict[str, Any]], root: Path) -> tuple[int, list[int]]:
    """How many of the tensors that the points have made are there after them, and how many graphs torch.compile has
    made for each."""
    import gc

    from torch._dynamo.utils import counters

    from overlap_sweep.workloads import fsdp

    def count() -> int:
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    before, graphs = count(), []
    for point in points:
        counters.clear()
        fsdp.run(point, root, ranks)
        graphs.append(counters["stats"]["unique_graphs"])
    return count() - before, graphs


def test_every_point_compiles_its_own_layers(tmp_path: Path) -> None:
    """torch would take what it has compiled for other points, and at last nothing."""
    asked = [[*FSDP2["compiled"], f"training.batch_size={batch}"] for batch in range(2, 12)]
    for _, graphs in run_ranks(2, _left, [fsdp_point(*given) for given in asked], tmp_path, keep="cpu"):
        assert graphs == [graphs[0]] * len(asked)
        assert graphs[0] > 0


def test_a_point_leaves_no_memory_to_the_next(tmp_path: Path) -> None:
    asked = [FSDP2["defaults"], FSDP2["limited"], FSDP2["backward_post"], DDP["ddp load"]]
    for left, _ in run_ranks(2, _left, [fsdp_point(*given) for given in asked], tmp_path, keep="cpu"):
        # A model has dozens of parameters; clocks and counters stay.
        assert left < 5
