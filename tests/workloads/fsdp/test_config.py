"""workload=fsdp: what a point is completed to. What is refused, and names, are in tests/golden/expected/refusals."""

from __future__ import annotations

import yaml

from overlap_sweep.runtime.group_config import NO_MULTICAST, GroupConfig, shared_by, worker_environment
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


def test_the_environment_of_nccl_makes_another_group() -> None:
    plain, given = fsdp_point(), fsdp_point("distributed.env.NCCL_MAX_CTAS=4", "distributed.env.HSA_ENABLE_SDMA=true")
    environment = worker_environment(GroupConfig.of(given))
    assert (environment["NCCL_MAX_CTAS"], environment["HSA_ENABLE_SDMA"]) == ("4", "1")
    assert {name: environment[name] for name in NO_MULTICAST} == NO_MULTICAST
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert shared_by(plain) != shared_by(given)
    assert shared_by(plain) == shared_by(fsdp_point("fsdp.forward_prefetch=true"))
