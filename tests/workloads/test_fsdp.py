"""workload=fsdp: what a point is completed to and refused for."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import yaml

from overlap_sweep import training_config
from overlap_sweep.config import OF_WORKLOAD, SweepConfig
from overlap_sweep.errors import UserError
from overlap_sweep.runtime.group import NO_MULTICAST, GroupConfig, shared_by, worker_environment
from overlap_sweep.space import point_name
from overlap_sweep.workloads import fsdp
from tests.sweeps import ROOT
from tests.training.points import composed, fsdp_point


def test_conf_lists_every_knob_with_its_default() -> None:
    listed = yaml.safe_load((ROOT / "conf/workload/fsdp.yaml").read_text())
    listed.pop("defaults")
    environment = listed["distributed"].pop("env")
    declared = {name: asdict(getattr(SweepConfig(), name)) for name in OF_WORKLOAD["fsdp"]}
    declared["distributed"].pop("env")
    assert listed == declared
    assert set(environment.values()) == {None}


def test_conf_lists_the_copy_engine_too() -> None:
    listed = yaml.safe_load((ROOT / "conf/workload/copy_engine.yaml").read_text())
    assert listed["copy_engine"] == asdict(training_config.CopyEngine())


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


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("fsdp.forward_prefetch=often", "neither true, false nor a number of layers"),
        ("fsdp.reshard_after_forward=1", "neither true, false nor a number of ranks"),
        ("fsdp.backward_prefetch=LATER", "choose one of BACKWARD_PRE, BACKWARD_POST"),
        ("backend=torch", "distributed.strategy"),
        ("precision=bf16", "training.mixed_precision"),
        ("+distributed.env.LD_PRELOAD=x", "no variable of NCCL"),
        ("+distributed.env.NCCL_NVLS_ENABLE=1", "runtime.multicast"),
        ("distributed.env.NCCL_ALGO=[Ring,Tree]", "no single value"),
        ("distributed.env.NCCL_ALGO=NVLSTree", "multicast is off"),
        ("+distributed.env.NCCL_CONF_FILE=a", "give its variables"),
        ("+distributed.env.HIP_VISIBLE_DEVICES=0", "set it in your shell"),
        ("+distributed.env.CUDA_DEVICE_MAX_CONNECTIONS=1", "runtime.max_connections"),
        ("copy_engine.matrix_size=8", "workload=copy_engine"),
        ("m=8", "workload=kernel"),
        ("distributed.dp_size=0", "out of range"),
        ("runtime.device=cuda", "needs 2 GPUs"),
    ],
)
def test_mistakes_are_told_in_a_line(override: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        fsdp_point(override)


DDP = ["distributed.strategy=ddp"]


def test_knobs_of_training_are_no_part_of_other_workloads() -> None:
    with pytest.raises(UserError, match=r"fsdp.replicas is for workload=fsdp"):
        composed("workload=operator", "runtime.device=cpu", "fsdp.replicas=2")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["fsdp.use_orig_params=false"], "no flat parameters"),
        (["fsdp.replicas=3"], "does not divide"),
        (["fsdp.reshard_after_forward=2"], "no smaller part"),
        ([*DDP, "fsdp.forward_prefetch=true"], "changes nothing under DDP"),
        ([*DDP, "distributed.overlap_reduce_scatter=true"], "needs distributed.enable_overlap"),
        (["distributed.overlap_reduce_scatter=true", "distributed.enable_overlap=true"], "is for DDP"),
        (["streams.auxiliary=normal"], "which is off"),
        (["distributed.dp_size=8", "fsdp.replicas=2", "fsdp.reshard_after_forward=2"], "beside fsdp.replicas"),
        (["distributed.bucket_cap_mb=5"], "changes nothing under FSDP2"),
        (["distributed.enable_overlap=true", "streams.all_reduce=normal"], "without fsdp.replicas"),
        ([*DDP, "distributed.enable_overlap=true", "streams.auxiliary=normal"], "only all-reduces"),
        (["compile.mode=default"], "without compile.enabled"),
        (["compile.enabled=true", "compile.mode=default", "+compile.options.trace.enabled=true"], "not both"),
        (["model.num_kv_heads=3"], "key-value heads"),
        (["profiling.tensorboard=true"], "writes nothing without profiling.enabled"),
        (["fsdp.forward_prefetch=3", "fsdp.backward_prefetch=null", "fsdp.reshard_after_forward=false"], None),
        (["distributed.dp_size=8", "fsdp.reshard_after_forward=4"], None),
        (["distributed.dp_size=8", "fsdp.replicas=4"], None),
        (["distributed.enable_overlap=true", "streams.auxiliary=normal"], None),
        ([*DDP, "distributed.enable_overlap=true", "distributed.overlap_reduce_scatter=true"], None),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: list[str], reason: str | None) -> None:
    refused = fsdp.refusal(fsdp_point(*overrides))
    assert refused is None if reason is None else reason in str(refused)


def test_the_environment_of_nccl_makes_another_group() -> None:
    plain, given = fsdp_point(), fsdp_point("distributed.env.NCCL_MAX_CTAS=4", "distributed.env.HSA_ENABLE_SDMA=true")
    environment = worker_environment(GroupConfig.of(given))
    assert (environment["NCCL_MAX_CTAS"], environment["HSA_ENABLE_SDMA"]) == ("4", "1")
    assert {name: environment[name] for name in NO_MULTICAST} == NO_MULTICAST
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert shared_by(plain) != shared_by(given)
    assert shared_by(plain) == shared_by(fsdp_point("fsdp.forward_prefetch=true"))


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        ([], ""),
        (["fsdp.forward_prefetch=2"], "_fsdp.forward_prefetch=2"),
        (["training.output_dir=/a/b"], ""),
    ],
)
def test_names_say_size_strategy_and_what_was_asked(overrides: list[str], more: str) -> None:
    # The configuration has these of every workload.
    point = {**fsdp_point("distributed.dp_size=4", "model.name=ranking"), "method": "bulk"}
    asked = ["workload=fsdp", "distributed.dp_size=4", *overrides]
    assert point_name(point, asked) == f"ranking_dp4_fsdp2{more}"
