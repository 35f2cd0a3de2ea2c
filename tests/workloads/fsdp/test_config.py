"""workload=fsdp: what a point is completed to. What is refused, and names, are in tests/golden/expected/refusals."""

from typing import Any

import msgspec
import pytest
import yaml

from overlap_sweep.results.identity import NO_MULTICAST, point_key
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.runtime import nodes
from overlap_sweep.runtime import point as runtime_point
from overlap_sweep.runtime.group_config import GroupConfig, shared_by, worker_environment
from overlap_sweep.workloads import fsdp
from overlap_sweep.workloads.fsdp import sharding
from overlap_sweep.workloads.fsdp.config import Resolved
from overlap_sweep.workloads.fsdp.tables import NodeTraffic, node_traffic, traffic_of
from tests.composed import fsdp_point
from tests.make_point import resolved
from tests.sweeps import ROOT


def test_conf_lists_variables_that_are_not_set() -> None:
    listed = yaml.safe_load((ROOT / "conf/workload/fsdp.yaml").read_text())
    assert "NCCL_ALGO" in listed["distributed"]["env"]
    assert set(listed["distributed"]["env"].values()) == {None}


def test_a_point_knows_nothing_of_operators() -> None:
    point = fsdp_point()
    assert not {"operator", "method", "num_sm", "layer", "kernel", "copy_engine"} & point.keys()
    assert (point.backend, point.precision, point.tp_size) == ("fsdp2", "fp32", 1)
    assert point.workload.tokens == 2 * 2 * (6 + 2 + 1)


def test_what_null_stands_for() -> None:
    point = fsdp_point("training.max_steps=null", "training.batch_size=null", "profiling.enabled=null", "profile=none")
    assert (point.training.max_steps, point.training.batch_size) == (8, 4)
    assert point.training.mixed_precision == "none"
    assert point.profiling.enabled is False
    assert point.training.output_dir is None


@pytest.fixture
def many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch on eight machines."""
    monkeypatch.setattr(nodes, "nodes_here", lambda: 8)


@pytest.mark.usefixtures("many_nodes")
def test_a_replica_on_each_node_is_that_number_of_replicas() -> None:
    four = "distributed.dp_size=4"
    on_two_nodes = [fsdp_point(four, "runtime.nodes=2", f"fsdp.replicas={given}") for given in ("nodes", "2")]
    assert on_two_nodes[0] == on_two_nodes[1]
    assert on_two_nodes[0].fsdp.replicas == 2
    assert fsdp_point(four, "fsdp.replicas=nodes") == fsdp_point(four)


@pytest.mark.usefixtures("many_nodes")
@pytest.mark.parametrize(
    ("ranks", "nodes", "replicas", "expected"),
    [(8, 2, "1", 4), (8, 4, "1", 2), (8, 2, "2", True), (8, 2, "4", True), (8, 1, "1", True), (2, 2, "1", False)],
)
def test_resharding_within_nodes(ranks: int, nodes: int, replicas: str, expected: bool | int) -> None:
    of_all = [f"distributed.dp_size={ranks}", f"runtime.nodes={nodes}", f"fsdp.replicas={replicas}"]
    point = fsdp_point(*of_all, "fsdp.reshard_after_forward=node")
    assert repr(point.fsdp.reshard_after_forward) == repr(expected)
    assert fsdp.refusal(point) is None


def test_the_environment_of_nccl_makes_another_group() -> None:
    of_network = ("+distributed.env.FI_PROVIDER=efa", "+distributed.env.OFI_NCCL_PROTOCOL=RDMA")
    plain = fsdp_point()
    given = fsdp_point("distributed.env.NCCL_MAX_CTAS=4", "distributed.env.HSA_ENABLE_SDMA=true", *of_network)
    environment = worker_environment(GroupConfig.of(given))
    assert (environment["FI_PROVIDER"], environment["OFI_NCCL_PROTOCOL"]) == ("efa", "RDMA")
    assert (environment["NCCL_MAX_CTAS"], environment["HSA_ENABLE_SDMA"]) == ("4", "1")
    assert {name: environment[name] for name in NO_MULTICAST} == NO_MULTICAST
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert shared_by(plain) != shared_by(given)
    assert shared_by(plain) == shared_by(fsdp_point("fsdp.forward_prefetch=true"))


def test_a_point_is_the_same_as_before_there_were_later_options() -> None:
    point = fsdp_point("fsdp.layers_per_unit=1", "fsdp.separate_reduce_scatter_group=false")
    later = ("layers_per_unit", "separate_reduce_scatter_group", "symmetric_memory")
    before = {**point, "fsdp": {name: value for name, value in point["fsdp"].items() if name not in later}}
    assert point_key(point) == point_key(decoded_point(before))
    grouped = fsdp_point("fsdp.layers_per_unit=2", "fsdp.separate_reduce_scatter_group=true").fsdp
    assert (grouped.layers_per_unit, grouped.separate_reduce_scatter_group) == (2, True)


def test_copy_engines_are_asked_for_by_the_environment_without_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_point, "visible_gpus", lambda: 2)
    kinds = {
        kind: GroupConfig.of(fsdp_point("runtime.device=cuda", f"fsdp.symmetric_memory={kind}"))
        for kind in ("null", "kernels", "copy_engines")
    }
    environments = {kind: worker_environment(config) for kind, config in kinds.items()}
    assert {kind: found.get("NCCL_CTA_POLICY") for kind, found in environments.items()} == {
        **{"null": None, "kernels": None, "copy_engines": "2"}
    }
    assert all(found["NCCL_NVLS_ENABLE"] == "0" for found in environments.values())
    # What is registered stays in the processes.
    assert len(set(kinds.values())) == 3


@pytest.mark.usefixtures("many_nodes")
@pytest.mark.parametrize(("replicas", "fits"), [("1", False), ("nodes", True), ("4", True)])
def test_symmetric_memory_is_within_a_node(monkeypatch: pytest.MonkeyPatch, replicas: str, fits: bool) -> None:
    monkeypatch.setattr(runtime_point, "visible_gpus", lambda: 4)
    on_two_nodes = ("runtime.device=cuda", "distributed.dp_size=8", "runtime.nodes=2", f"fsdp.replicas={replicas}")
    refused = fsdp.refusal(fsdp_point(*on_two_nodes, "fsdp.symmetric_memory=kernels"))
    assert (refused is None) == fits
    assert fits or "shards within a node; add fsdp.replicas=nodes" in str(refused)


@pytest.mark.parametrize(
    ("kind", "torch_version", "nccl", "expected"),
    [
        ("kernels", "2.9.0+cu130", (2, 27, 5), None),
        ("copy_engines", "2.11.0+cu130", (2, 28, 9), None),
        ("copy_engines", "2.15.0", (3, 0, 1), None),
        ("kernels", "2.8.1", (2, 27, 3), "needs torch 2.9; 2.8.1 is installed"),
        ("kernels", "2.9.0", (2, 26, 2), "needs NCCL 2.27; torch has 2.26.2"),
        ("copy_engines", "2.9.0", (2, 27, 5), "needs NCCL 2.28; torch has 2.27.5"),
    ],
)
def test_symmetric_memory_needs_what_torch_and_nccl_have(
    kind: str, torch_version: str, nccl: tuple[int, ...], expected: str | None
) -> None:
    found = sharding.lacks_for_symmetric_memory(kind, torch_version, nccl, rocm=False)
    assert found == (expected and f"fsdp.symmetric_memory={kind} {expected}")
    assert "ROCm" in str(sharding.lacks_for_symmetric_memory(kind, torch_version, nccl, rocm=True))


SIZE = 1600.0
"""Bytes of the parameters, and of the gradients."""


@pytest.mark.parametrize(
    ("sharding", "within", "between"),
    [
        # Three collectives, of 7/8 each; one of four ranks of a node sends to the other node.
        ({"ranks": 8, "nodes": 2}, 3 * 1400 * 3 / 4, 3 * 1400 / 4),
        ({"ranks": 8, "nodes": 2, "reshard_after_forward": False}, 2 * 1400 * 3 / 4, 2 * 1400 / 4),
        ({"ranks": 8, "nodes": 2, "micro_batches": 4}, 9 * 1400 * 3 / 4, 9 * 1400 / 4),
        # All-gathers and reduce-scatter within the node; twice half of a quarter of the gradients between.
        ({"ranks": 8, "nodes": 2, "replicas": 2}, 3 * 1200, 400),
        # The backward pass gathers within the node.
        ({"ranks": 8, "nodes": 2, "reshard_after_forward": 4}, 2 * 1400 * 3 / 4 + 1200, 2 * 1400 / 4),
        # Two replicas on each node: only half of the all-reduce's ring is between nodes.
        ({"ranks": 8, "nodes": 2, "replicas": 4}, 3 * 800 + 2 * 800 * 3 / 4 / 2, 2 * 800 * 3 / 4 / 2),
        # DDP: nothing but an all-reduce.
        ({"ranks": 8, "nodes": 2, "replicas": 8}, 2 * 1400 * 3 / 4, 2 * 1400 / 4),
        # The middle one of three replicas has a rank on either node.
        ({"ranks": 6, "nodes": 2, "replicas": 3}, 3 * 800 * 4 / 6 + 2 * 800 * 2 / 3 * 2 / 6, None),
        ({"ranks": 2, "nodes": 2}, 0, 3 * 800),
        ({"ranks": 8, "nodes": 1}, 3 * 1400, 0),
        ({"ranks": 1, "nodes": 1}, 0, 0),
    ],
)
def test_bytes_of_a_sharding(sharding: dict[str, Any], within: float, between: float | None) -> None:
    traffic = node_traffic(parameter_bytes=SIZE, gradient_bytes=SIZE, **sharding)
    total = 3 * 800 + 2 * 800 * 2 / 3 if between is None else within + between
    assert traffic.within_node == pytest.approx(within)
    assert traffic.within_node + traffic.between_nodes == pytest.approx(total)


def test_a_replica_on_each_node_sends_least_between_nodes() -> None:
    sent = {
        replicas: node_traffic(parameter_bytes=SIZE, gradient_bytes=SIZE, ranks=32, nodes=4, replicas=replicas)
        for replicas in (1, 2, 4, 8, 32)
    }
    assert min(sent, key=lambda replicas: sent[replicas].between_nodes) == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # bf16: 200 bytes of 100 parameters.
        ({}, NodeTraffic(3 * 150 / 2, 3 * 150 / 2)),
        ({"fsdp.reduce_dtype": "fp32"}, NodeTraffic(600 / 2, 600 / 2)),
        ({"training.gradient_accumulation": 2}, NodeTraffic(5 * 150 / 2, 5 * 150 / 2)),
        ({"fsdp.replicas": 2}, NodeTraffic(3 * 100, 100)),
        # float32, whatever autocast computes in.
        ({"distributed.strategy": "ddp"}, NodeTraffic(2 * 300 / 2, 2 * 300 / 2)),
        (
            {"distributed.strategy": "ddp", "distributed.overlap_reduce_scatter": True},
            NodeTraffic(3 * 300 / 2, 3 * 300 / 2),
        ),
    ],
)
def test_bytes_of_a_point_on_two_nodes(changes: dict[str, Any], expected: NodeTraffic) -> None:
    found = traffic_of(msgspec.convert(resolved("fsdp", **{"runtime.nodes": 2}, **changes), Resolved), 100)
    assert found is not None
    assert (found.within_node, found.between_nodes) == pytest.approx((expected.within_node, expected.between_nodes))


def test_a_point_on_one_node_has_none() -> None:
    assert traffic_of(msgspec.convert(resolved("fsdp"), Resolved), 100) is None
