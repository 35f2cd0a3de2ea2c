"""How many machines and ranks a point gets, and why its ranks cannot be spread over machines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from overlap_sweep import gpus, workloads
from overlap_sweep.errors import UserError
from overlap_sweep.gpus import visible_gpus
from overlap_sweep.hydra_adapter.plugins import SlurmLauncherConf, TorchrunLauncherConf
from overlap_sweep.runtime import nodes, point
from overlap_sweep.runtime.meeting import Place
from overlap_sweep.runtime.nodes import Nodes, given, nodes_here, nodes_of, nodes_refusal, requested, take, with_hosts
from tests.composed import composed
from tests.make_point import resolved


def launcher(**options: int) -> DictConfig:
    """The options of hydra/launcher=slurm, of which some were given."""
    config = OmegaConf.structured(SlurmLauncherConf())
    for name, value in options.items():
        config[name] = value
    return config


def training(dp_size: int = 8, device: str = "cuda", nodes: int | None = None) -> Any:
    return resolved("fsdp", device=device, runtime={"nodes": nodes}, **{"distributed.dp_size": dp_size})


@pytest.mark.parametrize(
    ("point", "options", "wanted"),
    [
        (training(), {}, 1),
        (training(nodes=2), {}, 2),
        (training(), {"nodes": 4}, 4),
        (training(nodes=4), {"nodes": 4}, 4),
        (training(dp_size=8), {"gpus_per_node": 8}, 1),
        (training(dp_size=16), {"gpus_per_node": 8}, 2),
        (training(dp_size=4), {"gpus_per_node": 8}, 1),
        (training(dp_size=12), {"gpus_per_node": 8}, 2),
        (training(dp_size=16, nodes=4), {"gpus_per_node": 8}, 4),
        (training(dp_size=16, device="cpu"), {"gpus_per_node": 8}, 1),
        (resolved("operator", tp_size=8), {"gpus_per_node": 4}, 2),
    ],
)
def test_the_options_say_how_many_nodes_a_point_gets(point: Any, options: dict[str, int], wanted: int) -> None:
    assert requested(point, launcher(**options)) == wanted


def test_options_that_differ_are_refused() -> None:
    with pytest.raises(UserError, match=r"^runtime\.nodes=2 and hydra\.launcher\.nodes=4 differ; give only one\.$"):
        requested(training(nodes=2), launcher(nodes=4))


def test_only_what_the_user_gave_counts_of_the_launcher() -> None:
    found = launcher(gpus_per_node=8)
    assert (given(found, "gpus_per_node"), given(found, "nodes"), given(found, "cpus_per_task")) == (8, None, None)
    assert given(OmegaConf.structured(TorchrunLauncherConf()), "nodes") is None
    assert given(None, "nodes") is None
    assert requested(training(nodes=2), None) == 2


def test_a_launch_on_one_machine_refuses_points_on_several() -> None:
    assert (nodes_here(), nodes_of(training())) == (1, 1)
    with pytest.raises(UserError, match=r"runtime\.nodes=2 needs 2 machines, but this launch has 1; use"):
        nodes_of(training(nodes=2))


def test_a_launch_on_two_machines_has_points_on_one_or_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "LEAVE_S", 0.0)
    found = Nodes(Place(0, 2, tmp_path / "meeting", ("localhost",)))
    monkeypatch.setattr(nodes, "_present", [found])
    assert nodes_here() == 2
    assert [nodes_of(training(nodes=number)) for number in (None, 1, 2)] == [1, 1, 2]
    with pytest.raises(UserError, match=r"needs 3 machines, but this launch has 2"):
        nodes_of(training(nodes=3))
    (own,) = take(1, 0.0)
    assert own.address == "127.0.0.1"
    found.close()


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        (training(dp_size=8), None),
        (training(dp_size=8, nodes=2), None),
        (training(dp_size=8, nodes=3), "8 ranks cannot be spread evenly over runtime.nodes=3"),
        (training(dp_size=2, nodes=4), "2 ranks cannot be spread evenly over runtime.nodes=4"),
        (
            resolved("operator", tp_size=4, runtime={"nodes": 2}),
            "workload=operator runs on one node; leave out runtime.nodes",
        ),
    ],
)
def test_ranks_that_cannot_be_spread_say_why(point: Any, reason: str | None) -> None:
    assert nodes_refusal(point) == reason


def test_a_result_names_its_hosts_only_if_these_are_several() -> None:
    (own,) = take(1, 0.0)
    assert with_hosts({"host": own.host}, [own]) == {"host": own.host}
    assert with_hosts({"host": own.host}, [own, own]) == {"host": own.host, "hosts": [own.host, own.host]}


# Which points may span nodes, by their placement alone.


def why_one_node(workload: str, nodes: int, **changes: Any) -> str | None:
    return workloads.load(workload).on_one_node(resolved(workload, **{"runtime.nodes": nodes}, **changes))


@pytest.mark.parametrize(
    ("workload", "changes"),
    [
        ("fsdp", {"distributed.dp_size": 8}),
        ("job", {"job.ranks": 8}),
        ("tp_training", {"tp_size": 2, "dp_size": 4}),
        ("tp_training", {"tp_size": 4, "dp_size": 2, "impl": "megatron"}),
        ("layer", {"tp_size": 4, "layer.num_replicas": 2}),
        ("layer", {"tp_size": 1, "layer.num_replicas": 2}),
        ("kernel", {"tp_size": 4, "backend": "torch"}),
    ],
)
def test_points_that_may_span_two_nodes(workload: str, changes: dict[str, Any]) -> None:
    assert why_one_node(workload, 2, **changes) is None
    assert nodes_refusal(resolved(workload, **{"runtime.nodes": 2}, **changes)) is None


@pytest.mark.parametrize(
    ("workload", "changes", "reason"),
    [
        ("tp_training", {"tp_size": 4, "dp_size": 1}, "tp_size=4 does not fit the 2 ranks of a node"),
        ("tp_training", {"tp_size": 2, "dp_size": 3}, "tp_size=2 does not fit the 3 ranks of a node"),
        ("layer", {"tp_size": 2, "layer.num_replicas": 1}, "tp_size=2 does not fit the single rank of a node"),
        ("layer", {"tp_size": 4, "layer.num_replicas": 1}, "tp_size=4 does not fit the 2 ranks of a node"),
        ("kernel", {"tp_size": 4, "backend": "transformer_engine"}, "backend=transformer_engine run on one node"),
        ("kernel", {"tp_size": 4, "backend": "symm_mem"}, "backend=symm_mem run on one node"),
        ("kernel", {"tp_size": 4, "backend": "flux"}, "backend=flux run on one node"),
        ("operator", {}, "workload=operator runs on one node"),
        ("copy_engine", {}, "workload=copy_engine runs on one node"),
    ],
)
def test_points_that_must_be_on_one_node(workload: str, changes: dict[str, Any], reason: str) -> None:
    said = why_one_node(workload, 2, **changes)
    assert said
    assert reason in said
    assert "\n" not in said


# How many ranks a point has whose options leave it open.


LAYER, STACK, FSDP = "workload=layer", "workload=tp_training", "workload=fsdp"
MOE = ("layer=moe", "model=qwen3_moe_tiny")


@pytest.fixture
def _eight_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(point, "visible_gpus", visible_gpus)
    visible_gpus.cache_clear()
    yield
    monkeypatch.undo()
    visible_gpus.cache_clear()


@pytest.mark.usefixtures("_eight_gpus")
@pytest.mark.parametrize(
    ("given", "tp_size", "ranks"),
    [
        ((LAYER,), 8, 8),
        ((LAYER, "layer.num_replicas=2"), 4, 8),
        ((LAYER, *MOE), 1, 2),
        ((LAYER, *MOE, "tp_size=null"), 1, 2),
        ((LAYER, "runtime.device=cpu"), 2, 2),
        ((LAYER, "runtime.device=cpu", "layer.num_replicas=2"), 2, 4),
        ((STACK,), 8, 8),
        ((STACK, "dp_size=4"), 2, 8),
        ((STACK, "tp_size=null", "ranks=4"), 4, 4),
        ((STACK, "tp_size=2"), 2, 2),
        ((STACK, "runtime.device=cpu", "dp_size=2"), 2, 4),
        ((FSDP,), 1, 8),
        ((FSDP, "distributed.dp_size=2"), 1, 2),
        ((FSDP, "runtime.device=cpu"), 1, 2),
        (("workload=operator",), 2, 2),
        (("workload=operator", "tp_size=null"), 8, 8),
    ],
)
def test_all_gpus_are_used_unless_a_number_is_given(given: tuple[str, ...], tp_size: int, ranks: int) -> None:
    found = composed(*given)
    assert (found["tp_size"], found.world_size) == (tp_size, ranks)


@pytest.mark.usefixtures("_eight_gpus")
def test_what_cannot_be_decided_is_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^tp_size=null: 8 GPUs are not divisible by 3 data-parallel ranks; give tp_"):
        composed(STACK, "dp_size=3")
    monkeypatch.setattr(gpus, "_elsewhere", True)
    with pytest.raises(UserError, match=r"^tp_size=null means all GPUs of the nodes, whose number only Slurm knows;"):
        composed(LAYER)
