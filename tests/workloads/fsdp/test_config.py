"""workload=fsdp: what a point is completed to. What is refused, and names, are in tests/golden/expected/refusals."""

from __future__ import annotations

import pytest
import yaml

from overlap_sweep.errors import UserError
from overlap_sweep.runtime import placement
from overlap_sweep.runtime.group_config import NO_MULTICAST, GroupConfig, shared_by, worker_environment
from overlap_sweep.workloads import fsdp
from tests.sweeps import ROOT
from tests.workloads.fsdp.points import fsdp_point


def test_conf_changes_no_default_and_lists_variables_that_are_not_set() -> None:
    listed = yaml.safe_load((ROOT / "conf/workload/fsdp.yaml").read_text())
    assert listed.keys() == {"defaults", "distributed"}
    assert listed["distributed"].keys() == {"env"}
    assert set(listed["distributed"]["env"].values()) == {None}


def test_a_point_knows_nothing_of_operators() -> None:
    point = fsdp_point()
    assert not {"operator", "method", "num_sm", "layer", "kernel", "copy_engine"} & point.keys()
    assert (point["backend"], point["precision"], point["tp_size"]) == ("fsdp2", "fp32", 1)
    assert point["workload"]["tokens"] == 2 * 2 * (6 + 2 + 1)


def test_what_null_stands_for() -> None:
    point = fsdp_point("training.max_steps=null", "training.batch_size=null", "profiling.enabled=null", "profile=none")
    assert (point["training"]["max_steps"], point["training"]["batch_size"]) == (8, 4)
    assert point["training"]["mixed_precision"] == "none"
    assert point["profiling"]["enabled"] is False
    assert "output_dir" not in point["training"]


@pytest.fixture
def many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch on eight machines."""
    monkeypatch.setattr(placement, "nodes_here", lambda: 8)


@pytest.mark.usefixtures("many_nodes")
def test_a_replica_on_each_node_is_that_number_of_replicas() -> None:
    four = "distributed.dp_size=4"
    on_two_nodes = [fsdp_point(four, "runtime.nodes=2", f"fsdp.replicas={given}") for given in ("nodes", "2")]
    assert on_two_nodes[0] == on_two_nodes[1]
    assert on_two_nodes[0]["fsdp"]["replicas"] == 2
    assert fsdp_point(four, "fsdp.replicas=nodes") == fsdp_point(four)


@pytest.mark.usefixtures("many_nodes")
@pytest.mark.parametrize(
    ("ranks", "nodes", "replicas", "expected"),
    [(8, 2, "1", 4), (8, 4, "1", 2), (8, 2, "2", True), (8, 2, "4", True), (8, 1, "1", True), (2, 2, "1", False)],
)
def test_resharding_within_nodes(ranks: int, nodes: int, replicas: str, expected: bool | int) -> None:
    of_all = [f"distributed.dp_size={ranks}", f"runtime.nodes={nodes}", f"fsdp.replicas={replicas}"]
    point = fsdp_point(*of_all, "fsdp.reshard_after_forward=node")
    assert repr(point["fsdp"]["reshard_after_forward"]) == repr(expected)
    assert fsdp.refusal(point) is None


@pytest.mark.parametrize("given", ["0", "1025", "true", "1.5", "node"])
def test_other_numbers_of_replicas_are_refused(given: str) -> None:
    with pytest.raises(UserError, match=r"fsdp\.replicas=.*from 1 to 1024, or nodes"):
        fsdp_point(f"fsdp.replicas={given}")


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
