"""A layer with experts on real GPUs, through launch.py: with Transformer Engine's modules and NCCL."""

from pathlib import Path

import pytest

from overlap_sweep.backends import installed
from overlap_sweep.workloads.layer import moe
from overlap_sweep.workloads.layer.result import LayerTimes
from tests.sweeps import Launch

pytestmark = [
    pytest.mark.skipif(bool(installed.missing(package)), reason=f"needs {package}")
    for package in ("transformer_engine", "megatron.core")
]
SMALL = ("workload=layer", "layer=moe", "model=qwen3_30b_a3b", "workload.tokens=2048", "workload.repeats=5")
SHARED = "model.shared_expert_ffn_hidden_size=768"


def layers(directory: Path, *arguments: str) -> dict[str, LayerTimes]:
    launch = Launch(directory)
    done = launch.run("-m", *SMALL, *arguments)
    results = launch.results()
    assert results, done.stderr
    assert {name: result.error for name, result in results.items() if result.status != "ok"} == {}
    return {name: result.measured_as(LayerTimes) for name, result in results.items()}


@pytest.mark.gpu(count=1)
def test_one_gpu_runs_all_experts_grouped_or_one_by_one(tmp_path: Path) -> None:
    found = layers(tmp_path, "layer.moe.ep_size=1", "layer.moe.grouped_gemm=true,false", "profile=none")
    assert len(found) == 2
    for layer in found.values():
        assert list(layer.variants) == ["none", "floor"]
        assert layer.attention_backend


@pytest.mark.gpu(count=2)
def test_every_variant_computes_what_none_does(tmp_path: Path) -> None:
    found = layers(tmp_path, SHARED, "layer.moe.routing=balanced,random", "runtime.max_connections=1,8")
    assert len(found) == 4
    installed = [] if moe.find_spec("deep_ep") is None else ["deepep", "deepep_micro_batches"]
    for layer in found.values():
        assert list(layer.variants) == ["none", "shared_experts", "micro_batches", *installed, "floor"]


@pytest.mark.gpu(count=2)
def test_the_share_of_the_all_to_alls(tmp_path: Path) -> None:
    variants = "layer.variants=[none,allgather,micro_batches]"
    found = layers(tmp_path, variants, "layer.moe.num_sm=4,16", "layer.moe.micro_batches=4", "profile=none")
    assert [list(layer.variants) for layer in found.values()] == [["none", "allgather", "micro_batches", "floor"]] * 2


@pytest.mark.gpu(count=2)
def test_attention_cut_by_tensor_parallelism(tmp_path: Path) -> None:
    ((_, layer),) = layers(tmp_path, SHARED, "tp_size=2", "layer.moe.routing=random").items()
    assert {"none", "shared_experts", "micro_batches", "floor"} <= set(layer.variants)
