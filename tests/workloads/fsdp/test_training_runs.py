"""Training runs of real processes: what they learn, and which of their communication overlaps."""

import gc
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import active_children, current_process
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.distributed as dist

from overlap_sweep.measure import Ranks
from overlap_sweep.results.run_directory import metrics_file
from overlap_sweep.workloads.fsdp.config import Resolved
from overlap_sweep.workloads.fsdp.result import TrainingRun
from overlap_sweep.workloads.fsdp.telemetry import StepRecord
from tests.composed import fsdp_point
from tests.processes import run_ranks
from tests.trace.conftest import analyse_trace

Pair = tuple[Path, dict[str, dict[str, Any]]]
FSDP2 = {
    "defaults": [],
    "forward_prefetch": ["fsdp.forward_prefetch=2"],
    "backward_post": ["fsdp.backward_prefetch=BACKWARD_POST"],
    "on demand": ["fsdp.backward_prefetch=null"],
    "kept": ["fsdp.reshard_after_forward=false"],
    "limited": ["fsdp.limit_all_gathers=true", "fsdp.forward_prefetch=true"],
    "own streams": ["distributed.enable_overlap=true"],
    "not synced": ["fsdp.sync_module_states=false"],
    "grouped": ["fsdp.layers_per_unit=2", "fsdp.forward_prefetch=1"],
    "grouped post": ["fsdp.layers_per_unit=2", "fsdp.backward_prefetch=BACKWARD_POST", "fsdp.limit_all_gathers=true"],
    "own group": ["fsdp.separate_reduce_scatter_group=true"],
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


def _train(ranks: Ranks, points: dict[str, Resolved], root: Path) -> dict[str, dict[str, Any]]:
    from overlap_sweep.workloads import fsdp

    found = {}
    for name, point in points.items():
        directory = root / name.replace(" ", "_")
        directory.mkdir(exist_ok=True)
        found[name] = fsdp.WORKLOAD.run(point, directory, ranks)
    return found


def train(root: Path, ranks: int, **overrides: list[str]) -> dict[str, dict[str, Any]]:
    """By name what rank 0 returns."""
    points = {name: fsdp_point(f"distributed.dp_size={ranks}", *given) for name, given in overrides.items()}
    found: dict[str, dict[str, Any]] = run_ranks(ranks, _train, points, root, keep="cpu")[0]
    return found


def losses(found: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    return {name: one["measured"].losses for name, one in found.items()}


def telemetry(directory: Path, rank: int = 0) -> list[StepRecord]:
    lines = (directory / metrics_file(rank)).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=StepRecord) for line in lines]


def test_fsdp2_and_ddp_learn_the_same_with_their_own_collectives(tmp_path: Path) -> None:
    found = train(tmp_path, 2, fsdp2=["fsdp.forward_prefetch=true"], ddp=["distributed.strategy=ddp"])
    fsdp2, ddp = losses(found).values()
    assert fsdp2 == pytest.approx(ddp, rel=1e-5)
    assert fsdp2[0] != pytest.approx(fsdp2[-1], rel=1e-2)
    assert all(list(one["measured"].step) == ["point", "none", "floor"] for one in found.values())
    kinds = {name: {kind for kind, ms in telemetry(tmp_path / name)[-1].streams_ms.items() if ms} for name in found}
    # FSDP2's all-reduce is of the gradients' norm.
    assert kinds["fsdp2"] == {"compute", "all_reduce", "reduce_scatter", "auxiliary"}
    assert kinds["ddp"] == {"compute", "all_reduce"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """One process with the batches of two, and of four."""
    twice = ["training.batch_size=4"]
    accumulated = [*twice, "training.gradient_accumulation=2"]
    asked = {"two": twice, "four": ["training.batch_size=8"], "gated": [*twice, *FSDP2["gated"]]}
    return losses(train(tmp_path_factory.mktemp("alone"), 1, **asked, accumulated=accumulated))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    twice, bf16 = "training.gradient_accumulation=2", "training.mixed_precision=bf16"
    more = {"accumulated": [twice], "ddp accumulated": [*DDP["ddp"], twice], "bf16": [bf16]}
    more |= {"ddp_bf16": [bf16, *DDP["ddp"]], "fp16": ["training.mixed_precision=fp16"]}
    return root, train(root, 2, **FSDP2, **DDP, **more)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", [*FSDP2, *DDP, "accumulated", "ddp accumulated"])
def test_two_processes_learn_what_one_learns(name: str, alone: dict[str, list[float]], pair: Pair) -> None:
    expected = alone[name if name == "gated" else "accumulated" if "accumulated" in name else "two"]
    assert losses(pair[1])[name] == pytest.approx(expected, rel=1e-5)
    assert expected[0] != pytest.approx(expected[-1], rel=1e-2)


def _load(ranks: Ranks, point: Resolved, directory: Path) -> tuple[list[float], int, int]:
    """Losses, and how many processes of this rank there are before its loader is closed and after the run."""
    from overlap_sweep.workloads.fsdp import steps
    from overlap_sweep.workloads.fsdp.run import run

    close, before = steps.MicroBatches.close, []

    def closed(self: steps.MicroBatches) -> None:
        before.append(len(active_children()))
        close(self)

    # Processes of a pool may have no children; those of a launch may.
    daemons = patch.dict(current_process()._config, daemon=False)  # type: ignore[attr-defined]
    with daemons, patch.object(steps.MicroBatches, "close", closed):
        measured = run(point, directory, ranks)["measured"]
    return measured.losses, before[0], len(active_children())


def test_a_loader_has_workers_with_the_same_samples_that_end_with_the_point(tmp_path: Path) -> None:
    for directory in ("none", "two"):
        (tmp_path / directory).mkdir()
    none, two = (
        run_ranks(1, _load, fsdp_point("distributed.dp_size=1", *given), tmp_path / name)[0]
        for name, given in {"none": [], "two": ["training.num_workers=2"]}.items()
    )
    assert none[0] == two[0]
    assert (none[1:], two[1:]) == ((0, 0), (2, 0))


def test_replicas_of_shards_learn_it_too(tmp_path: Path, alone: dict[str, list[float]]) -> None:
    replicas = ["fsdp.replicas=2"]
    found = train(tmp_path, 4, replicas=replicas, own=[*replicas, *FSDP2["own group"]], sharded=[])
    assert losses(found)["replicas"] == pytest.approx(alone["four"], rel=1e-5)
    assert losses(found)["own"] == losses(found)["replicas"]
    assert min(telemetry(tmp_path / "replicas")[-1].streams_ms.values()) > 0
    norms = {name: [record.grad_norm for record in telemetry(tmp_path / name, rank=3)] for name in found}
    assert norms["replicas"] == pytest.approx(norms["sharded"], rel=1e-5)


@pytest.mark.end_to_end
def test_lower_precisions_learn_nearly_the_same(alone: dict[str, list[float]], pair: Pair) -> None:
    for name in ("bf16", "ddp_bf16"):
        assert losses(pair[1])[name] == pytest.approx(alone["two"], rel=0.1)
    scales = {name: telemetry(pair[0] / name)[0].loss_scale for name in ("fp16", "bf16")}
    assert scales == {"fp16": 2**16, "bf16": None}


LARGER = ("model.hidden_size=256", "model.ffn_hidden_size=1024", "ranking.sequence_length=32", "training.batch_size=4")
"""Layers that take longer than a thread takes to wake up."""


def sum_of_comm(record: StepRecord) -> float:
    return sum(record.streams_ms.values()) - record.streams_ms["compute"]


@pytest.mark.end_to_end
def test_what_is_asked_for_early_overlaps_and_what_is_asked_for_late_does_not(tmp_path: Path) -> None:
    early = ("forward_prefetch", "ddp small buckets", "ddp load")
    asked = {**FSDP2, **DDP, "ddp small buckets": ["distributed.strategy=ddp", "distributed.bucket_cap_mb=1"]}
    train(tmp_path, 2, **{name: [*LARGER, *asked[name]] for name in (*early, "on demand", "backward_post")})
    for name in early:
        assert sum(record.overlap_ms for record in telemetry(tmp_path / name.replace(" ", "_"))) > 0, name
    for record in telemetry(tmp_path / "on_demand"):
        assert (record.overlap_ms, record.exposed_comm_ms) == (0.0, pytest.approx(sum_of_comm(record), rel=0.01))
    # Beside nothing but the reduce-scatter before it.
    assert [record.overlap_ms for record in telemetry(tmp_path / "backward_post")] == [0.0] * 4


@pytest.mark.end_to_end
def test_a_run_returns_its_steps_and_losses_and_lines_tell_rates_and_norms(pair: Pair) -> None:
    measured = pair[1]["defaults"]
    training: TrainingRun = measured["measured"]
    assert list(training.step) == ["point", "none", "floor"]
    assert {len(timing.samples_us) for timing in training.step.values()} == {3}
    assert measured["objective_us"] == training.step["point"].median_us
    assert (training.samples_per_step, training.compiled, training.host_us) == (4, "no", {})
    assert training.telemetry == [metrics_file(0), metrics_file(1)]
    assert measured["launch_bound"] is False
    assert pair[1]["compiled"]["measured"].compiled == "aot_eager"
    lines = [(line.step, line.rank, line.learning_rate, line.loss) for line in telemetry(pair[0] / "defaults", rank=1)]
    assert lines == [(step, 1, 0.01, training.losses[step]) for step in range(4)]
    norms = [[record.grad_norm for record in telemetry(pair[0] / name)] for name in ("defaults", "ddp")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def _recording(ranks: Ranks, point: Resolved) -> Any:
    """A model in training that records."""
    from overlap_sweep.workloads.fsdp.run import _set_up

    training, _, _ = _set_up(point, ranks)
    training.collectives.recorder.on = True
    return training


def _spans(ranks: Ranks, points: dict[str, Resolved]) -> dict[str, Counter[str]]:
    """How many spans of each kind the second step of each point has."""
    found = {}
    for name, point in points.items():
        training = _recording(ranks, point)
        mode = name.partition(" ")[2] if name.startswith("load ") else "point"
        training.step(mode)
        found[name] = Counter(span.stream for span in training.step(mode).spans)
    return found


@pytest.mark.end_to_end
def test_how_often_a_step_communicates() -> None:
    twice = ["training.gradient_accumulation=2"]
    asked = {"defaults": [], "accumulated": twice, "kept": FSDP2["kept"], "replicas": ["fsdp.replicas=2"]}
    asked |= {"kept accumulated": [*FSDP2["kept"], *twice], "grouped": FSDP2["grouped"]}
    asked |= {"ddp": DDP["ddp small buckets"], "ddp accumulated": [*DDP["ddp small buckets"], *twice]}
    asked |= dict.fromkeys(("load", "load none", "load floor"), DDP["ddp load"])
    points = {name: fsdp_point("distributed.dp_size=4", *given) for name, given in asked.items()}
    found = run_ranks(4, _spans, points, keep="cpu")
    units = 5
    # An all-reduce of the gradients' norm is in the middle of the optimizer's step.
    norm, optimizer = 1, 2
    for name, passes in {"defaults": 2, "accumulated": 4}.items():
        assert found[0][name] == {
            **{"compute": passes * units + optimizer, "auxiliary": passes * units},
            **{"reduce_scatter": units, "all_reduce": norm},
        }
    assert found[0]["kept"]["auxiliary"] == units
    assert found[0]["kept accumulated"]["auxiliary"] == 2 * units
    # Three layers in two units.
    assert found[0]["grouped"] == {
        **{"compute": 2 * units + optimizer, "auxiliary": 2 * (units - 1)},
        **{"reduce_scatter": units - 1, "all_reduce": norm},
    }
    assert found[0]["replicas"]["all_reduce"] == units + norm
    assert found[0]["ddp"]["all_reduce"] == found[0]["ddp accumulated"]["all_reduce"] > units
    # What loads the point loads it without overlap, too.
    assert found[0]["load none"]["reduce_scatter"] == found[0]["load"]["reduce_scatter"]
    assert set(found[0]["load"]) == {"compute", "all_reduce", "reduce_scatter"}
    assert set(found[0]["load floor"]) == {"compute"}
    assert found[0]["load"]["all_reduce"] == found[0]["load"]["reduce_scatter"] > units
    assert found[1:] == found[:-1]


@contextmanager
def _collectives_noted(note: Callable[[str, str, set[int]], object]) -> Iterator[None]:
    """Calls `note` with the kind of each all-gather and reduce-scatter, its group's name, and the addresses of its
    buffers."""

    def noted(kind: str, issue: Any) -> Any:
        def collective(output: Any, source: Any, *given: Any, **options: Any) -> Any:
            (group,) = (one for one in given if isinstance(one, dist.ProcessGroup))
            note(kind, group.group_name, {tensor.untyped_storage().data_ptr() for tensor in (output, source)})
            return issue(output, source, *given, **options)

        return collective

    with pytest.MonkeyPatch.context() as patched:
        for kind in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            patched.setattr(dist, kind, noted(kind, getattr(dist, kind)))
        yield


def _groups(ranks: Ranks, points: dict[str, Resolved]) -> dict[str, tuple[set[str], set[str]]]:
    """The names of the groups in which the second step of each point all-gathers and reduce-scatters."""
    found = {}
    for name, point in points.items():
        used = defaultdict(set)
        with _collectives_noted(lambda kind, group, _, used=used: used[kind].add(group)):
            _recording(ranks, point).step("point")
        found[name] = used["all_gather_into_tensor"], used["reduce_scatter_tensor"]
    return found


@pytest.mark.end_to_end
def test_reduce_scatters_have_a_group_of_their_own_if_asked() -> None:
    asked = {"shared": [], "own": FSDP2["own group"], "replicas": ["fsdp.replicas=2", *FSDP2["own group"]]}
    points = {name: fsdp_point("distributed.dp_size=4", *given) for name, given in asked.items()}
    (found, *_) = run_ranks(4, _groups, points, keep="cpu")
    assert found["shared"][0] == found["shared"][1]
    assert all(len(gathers) == len(scatters) == 1 for gathers, scatters in found.values())
    assert not found["own"][0] & found["own"][1]
    assert not found["replicas"][0] & found["replicas"][1]


def _in_symmetric_memory(ranks: Ranks, point: Resolved, root: Path) -> tuple[list[float], dict[str, set[int]]]:
    """The losses of a point whose buffers come from a stand-in for NCCL's memory; by group the addresses of the buffers
    that its collectives used outside of that memory."""
    from overlap_sweep.workloads.fsdp import sharding

    allocated: dict[str, set[int]] = defaultdict(set)
    foreign: dict[str, set[int]] = defaultdict(set)

    class StandIn:
        def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
            self.group = group

        def release(self) -> None:
            pass

        def __call__(self, size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            buffer = torch.empty(*size, dtype=dtype, device=device)
            allocated[self.group.group_name].add(buffer.untyped_storage().data_ptr())
            return buffer

    with (
        patch.object(sharding, "check_symmetric_memory", lambda kind, ranks: None),
        patch.object(sharding, "symmetric_memory", StandIn),
        _collectives_noted(lambda _, group, used: foreign[group].update(used - allocated[group])),
    ):
        losses = _train(ranks, {"symmetric": point}, root)["symmetric"]["measured"].losses
    return losses, dict(foreign)


@pytest.mark.end_to_end
def test_collectives_use_only_symmetric_memory_of_their_group(tmp_path: Path, pair: Pair) -> None:
    point = fsdp_point(*FSDP2["own group"])
    point.fsdp.symmetric_memory = "kernels"
    for learnt, foreign in run_ranks(2, _in_symmetric_memory, point, tmp_path, keep="cpu"):
        assert learnt == pytest.approx(losses(pair[1])["defaults"], rel=1e-5)
        assert list(foreign.values()) == [set(), set()]


@pytest.mark.end_to_end
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
        assert sum_of_comm(record) * 1e3 > 0.7 * row.comm_us
        assert row.comm_us > 0
    none = [row for row in analyse_trace(tmp_path / "run" / "trace_none_rank0.json.gz") if row.phase == "all"]
    assert [row.overlap_us for row in none] == [0.0] * len(none)
    assert all(row.comm_us > 0 for row in none)


def _modes(ranks: Ranks, point: Resolved, root: Path) -> dict[str, list[StepRecord]]:
    """One step in each mode, recorded."""
    from overlap_sweep.measure.environment import DeviceSampler
    from overlap_sweep.workloads.fsdp.collectives import FLOOR, NONE, POINT
    from overlap_sweep.workloads.fsdp.run import TelemetryWriter

    training = _recording(ranks, point)
    training.freeze()
    # The first step asks torch for much that it keeps.
    training.step(POINT)
    parameters = list(training._model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    found = {}
    for mode in (POINT, NONE, FLOOR):
        directory = root / mode
        directory.mkdir(exist_ok=True)
        recording = TelemetryWriter(directory, ranks, DeviceSampler(ranks.device, 0.0), log_interval=1)
        recording.add(training.step(mode))
        found[mode] = telemetry(directory, ranks.rank)
    assert all(torch.equal(parameter, was) for parameter, was in zip(parameters, before, strict=True))
    return found


@pytest.mark.end_to_end
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


def _left(ranks: Ranks, points: list[Resolved], root: Path) -> tuple[int, list[int]]:
    """How many of the tensors that the points have made are there after them, and how many graphs torch.compile has
    made for each."""
    from overlap_sweep.workloads import fsdp

    def count() -> int:
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    before, graphs, counters = count(), [], torch._dynamo.utils.counters
    # A layer that was compiled for two points is not compiled for a third: torch would stop at eight.
    with torch._dynamo.config.patch(recompile_limit=2):
        for point in points:
            counters.clear()
            fsdp.WORKLOAD.run(point, root, ranks)
            graphs.append(counters["stats"]["unique_graphs"])
    return count() - before, graphs


@pytest.mark.end_to_end
def test_a_point_leaves_neither_memory_nor_compiled_layers_to_the_next(tmp_path: Path) -> None:
    asked = [FSDP2["defaults"], FSDP2["limited"], FSDP2["backward_post"], DDP["ddp load"]]
    for left, _ in run_ranks(2, _left, [fsdp_point(*given) for given in asked], tmp_path, keep="cpu"):
        # A model has dozens of parameters; clocks and counters stay.
        assert left < 5
    # torch would take what it has compiled for other points, and at last nothing.
    compiled = ["compile.enabled=true", "compile.backend=eager", "ranking.num_layers=1", "training.max_steps=2"]
    asked = [[*compiled, f"training.batch_size={batch}"] for batch in range(2, 7)]
    for _, graphs in run_ranks(2, _left, [fsdp_point(*given) for given in asked], tmp_path, keep="cpu"):
        assert graphs == [graphs[0]] * len(asked)
        assert graphs[0] > 0
