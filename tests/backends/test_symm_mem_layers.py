"""Whole layers of backend=symm_mem against the unsharded layer, and which slots overlap under which switches."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from overlap_sweep import space, workloads
from overlap_sweep.backends import symm_mem
from overlap_sweep.backends.symm_mem import layers
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.ranks import Ranks
from overlap_sweep.workloads import layer_variants
from tests.backends import symm_mem_on_cpu
from tests.backends.test_torch_layers import GPT, LLAMA, NONE, TOKENS, errors_of_layer
from tests.points import layer_point
from tests.processes import run_ranks

RING, BULK = {"method": "ring_exchange"}, {"method": "bulk"}
ASYNC_TP = OverlapConfig()
BULK_ALONE = OverlapConfig(
    dict.fromkeys(("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"), BULK),
    {**SWITCH_DEFAULTS, "tp_comm_overlap_ag": False, "tp_comm_overlap_rs": False},
)
FUSED = ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]


def small_point(kind: str = "transformer_layer", **changes: Any) -> dict[str, Any]:
    shape = {"model": LLAMA, "workload": {"tokens": TOKENS}, "layer": {"kind": kind, "micro_batch_size": 2}}
    return layer_point(backend="symm_mem", precision="fp32", **{**shape, **changes})


CASES = {
    **{f"{kind} async TP": (small_point(kind), ASYNC_TP) for kind in space.LAYER_KINDS},
    "gpt async TP": (small_point(model=GPT), ASYNC_TP),
    "none": (small_point(), NONE),
    "bulk": (small_point(), BULK_ALONE),
}


def errors_of_cases(ranks: Ranks, seed: int) -> dict[str, tuple[dict[str, float], list[str]]]:
    symm_mem_on_cpu.stand_in()
    found = {}
    for name, (point, config) in CASES.items():
        symm_mem_on_cpu.called.clear()
        found[name] = errors_of_layer(ranks, layers, point, config, seed), list(symm_mem_on_cpu.called)
    return found


def test_equals_the_unsharded_layer() -> None:
    for of_rank in run_ranks(2, errors_of_cases, secrets.randbits(40)):
        for name, (errors, _) in of_rank.items():
            assert {"output", "input"} < set(errors)
            assert max(errors.values()) < 1e-4, (name, errors)
        called = {name: of_case[1] for name, of_case in of_rank.items()}
        assert called["none"] == []
        assert set(called["bulk"]) == {"_low_contention_all_gather", "_low_contention_reduce_scatter"}
        # Forward gathers for qkv and fc1, and scatters after proj and fc2; backward the same in the opposite order.
        assert called["transformer_layer async TP"] == called["gpt async TP"] == [*FUSED, *FUSED, *FUSED, *FUSED]


def test_the_default_is_async_tp_on_every_slot() -> None:
    point = small_point()
    assert layer_variants.names(point) == ["none", "default", "floor"]
    (config,) = layer_variants.configurations(point).values()
    assert layers.slots(config, space.OPERATORS) == symm_mem.ASYNC_TP
    assert set(layers.slots(config, ["fc1", "fc2"])) == {"fc1_fprop", "fc1_dgrad", "fc2_fprop", "fc2_dgrad"}


def switched(**switches: bool) -> dict[str, bool]:
    return {**SWITCH_DEFAULTS, **{f"tp_comm_{name}": on for name, on in switches.items()}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OverlapConfig({}, switched(overlap=False)), {}),
        (
            OverlapConfig({}, switched(overlap_ag=False, bulk_dgrad=False)),
            {"proj_fprop": "ring_exchange", "fc2_fprop": "ring_exchange"},
        ),
        (
            OverlapConfig({"fc1_dgrad": BULK, "fc1_wgrad": BULK}, switched(overlap_ag=False, overlap_rs=False)),
            {"qkv_dgrad": "ring_exchange", "fc1_dgrad": "bulk", "fc1_wgrad": "bulk"},
        ),
        (
            OverlapConfig({"fc1_fprop": RING}, switched(overlap_rs=False, bulk_dgrad=False)),
            dict.fromkeys(("fc1_fprop", "qkv_fprop", "proj_dgrad", "fc2_dgrad"), "ring_exchange"),
        ),
    ],
)
def test_switches_turn_off_what_they_turn_off_in_megatron(config: OverlapConfig, expected: dict[str, str]) -> None:
    assert {slot: s["method"] for slot, s in layers.slots(config, space.OPERATORS).items()} == expected


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (OverlapConfig({}, switched(overlap_ag=False, overlap_rs=False, bulk_dgrad=False)), "leave no slot of this"),
        (OverlapConfig({"fc2_fprop": {"method": "pipeline"}}), "fc2_fprop: backend=symm_mem has no pipeline"),
        (OverlapConfig({"fc1_fprop": {**RING, "use_ce": True}}), "fc1_fprop: backend=symm_mem has no use_ce"),
        (OverlapConfig({"fc1_fprop": {"num_sm": 4}}), "fc1_fprop is given no method"),
        (OverlapConfig({"fc1_dgrad": RING}), "the switches let fc1_dgrad overlap by bulk alone, not by ring_exchange"),
        (OverlapConfig({"fc1_wgrad": BULK}), "fc1_wgrad cannot be configured beside fc1_dgrad by ring_exchange"),
    ],
)
def test_what_a_layer_cannot_overlap_is_refused(config: OverlapConfig, reason: str) -> None:
    assert reason in str(layers.refusal(small_point(), config, tuple(space.OPERATORS)))


def test_a_num_sm_in_a_file_changes_nothing() -> None:
    config = OverlapConfig({"fc1_fprop": {**RING, "num_sm": 4}})
    assert layers.refusal(small_point(), config, tuple(space.OPERATORS)) is None


def test_a_layer_needs_gpus() -> None:
    layer = workloads.load("layer")
    assert layer.refusal(layer.complete(small_point())) is None
    refused = layer.refusal(layer.complete(small_point(runtime={"device": "cpu"})))
    assert refused == "backend=symm_mem copies from GPU to GPU, and runtime.device is cpu"
