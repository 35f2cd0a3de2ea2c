"""Layers of the torch backend: what is refused without a process, and what real ones measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import space
from overlap_sweep.backends import transformer_engine
from overlap_sweep.backends.torch import overlap
from overlap_sweep.ranks import Ranks
from overlap_sweep.run_directory import VariantTimes
from overlap_sweep.workloads import layer
from tests.points import layer_point
from tests.processes import run_ranks


def written(directory: Path, text: str) -> str:
    (directory / "cfg.yaml").write_text(text)
    return f"file:{directory}/cfg.yaml"


def torch_point(**changes: Any) -> dict[str, Any]:
    return layer.complete(
        layer_point(**{"backend": "torch", "precision": "fp32", "runtime": {"device": "cpu"}, **changes})
    )


def refusal_on_torch(variant: str, **changes: Any) -> str | None:
    of_layer = {"variants": [variant], **changes.pop("layer", {})}
    return layer.refusal(torch_point(**changes, layer=of_layer))


@pytest.mark.parametrize(
    ("device", "missing", "chosen"),
    [("cpu", None, "torch"), ("cuda", "it is not there", "torch"), ("cuda", None, "transformer_engine")],
)
def test_auto_is_chosen_as_for_operators(
    monkeypatch: pytest.MonkeyPatch, device: str, missing: str | None, chosen: str
) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: missing)
    completed = torch_point(backend="auto", runtime={"device": device}, precision="bf16")
    assert completed["backend"] == chosen
    assert list(completed["layer"]["configurations"]) == (["default"] if chosen == "transformer_engine" else [])
    assert layer.refusal(completed) is None


@pytest.mark.parametrize("kind", space.LAYER_KINDS)
@pytest.mark.parametrize("preset", ["bulk", "ring_exchange", "pipeline", "split", "rs_dgrad"])
def test_torch_runs_every_preset_that_sets_a_slot_of_the_kind(kind: str, preset: str) -> None:
    reason = refusal_on_torch(preset, layer={"kind": kind})
    if kind == "linear" and preset == "bulk":
        assert reason == "bulk: it overlaps nothing in layer=linear"
    elif kind == "linear" and preset == "rs_dgrad":
        assert "no slot of this layer is set and switched on" in str(reason)
    else:
        assert reason is None


NO_DEFAULT = "backend=torch has no default overlap of its own, and no slot of this layer is set and switched on"


@pytest.mark.parametrize("tp_size", [2, 3, 6])
def test_on_torch_nothing_overlaps_by_default(tp_size: int) -> None:
    sizes = {"num_attention_heads": 12, "num_kv_heads": 6, "hidden_size": 384, "ffn_hidden_size": 768}
    changes: dict[str, Any] = {"tp_size": tp_size, "model": sizes, "workload": {"tokens": 96}}
    assert refusal_on_torch("default", **changes) == f"default: {NO_DEFAULT}"
    assert refusal_on_torch("ring_exchange", **changes) is None


def test_on_torch_a_variant_that_cannot_run_is_left_out_where_another_can() -> None:
    mixed = torch_point(layer={"variants": ["none", "default", "atomic", "bulk"]})
    assert layer.refusal(mixed) is None
    assert list(layer.overlap_configs(mixed)) == ["bulk"]
    assert refusal_on_torch("atomic") == "atomic: qkv_fprop: backend=torch has no atomic_gemm on cpu"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fc1_fprop: {method: ring_exchange, num_sm: 64}", None),
        ("fc1_fprop: {method: ring_exchange, use_ce: 0}", "fc1_fprop: backend=torch has no use_ce on cpu"),
        ("fc1_dgrad: {method: bulk, set_sm_margin: 1}", "fc1_dgrad: backend=torch has no set_sm_margin on cpu"),
        ("fc1_dgrad: {method: bulk, cga_size: 2}", "fc1_dgrad: backend=torch has no cga_size on cpu"),
        ("fc1_dgrad: {method: bulk, comm_priority: 0}", "fc1_dgrad: backend=torch has no comm_priority"),
        ("fc1_dgrad: {method: bulk, use_ce: 1}", None),
        ("fc1_fprop: {num_sm: 4}", "fc1_fprop is given no method, and backend=torch has no default to take one from"),
        ("fc1_fprop: {method: pipeline}", "fc1_fprop takes ring_exchange, not pipeline"),
        ("fc1_dgrad: {method: ring_exchange}", None),
        ("fc1_dgrad: {method: pipeline}\nfc1_wgrad: {method: bulk}", "fc1_wgrad cannot be configured beside fc1_dgrad"),
        (
            "# tp_comm_overlap_rs_dgrad: false\nfc1_dgrad: {method: pipeline}",
            "the switches let fc1_dgrad overlap by bulk alone, not by pipeline",
        ),
        (
            "# tp_comm_overlap_rs_dgrad: true\nfc1_dgrad: {method: bulk}",
            "the switches let fc1_dgrad overlap by pipeline or ring_exchange alone, not by bulk",
        ),
        ("# tp_comm_overlap_disable_fc1: true\nfc2_fprop: {method: pipeline}", None),
        ("# tp_comm_overlap_disable_fc1: true\nfc1_fprop: {method: ring_exchange}", NO_DEFAULT),
        ("# tp_comm_overlap_ag: false\nfc1_fprop: {method: ring_exchange, use_ce: 1}", NO_DEFAULT),
        ("{}", NO_DEFAULT),
        ("# tp_comm_overlap: false\nfc2_fprop: {method: pipeline}", "it overlaps nothing in layer=transformer_layer"),
    ],
)
def test_what_torch_takes_of_a_file(tmp_path: Path, text: str, reason: str | None) -> None:
    variant = written(tmp_path, text)
    refused = refusal_on_torch(variant)
    assert refused is None if reason is None else str(refused).startswith(f"{variant}: {reason}")


def test_on_gpus_torch_has_clusters(tmp_path: Path) -> None:
    variant = written(tmp_path, "fc1_dgrad: {method: bulk, cga_size: 2}")
    assert refusal_on_torch(variant, runtime={"device": "cuda"}) is None


def test_only_the_slots_of_the_kind_matter_to_torch(tmp_path: Path) -> None:
    variant = written(tmp_path, "fc1_fprop: {method: ring_exchange, use_ce: 1}\nproj_fprop: {method: pipeline}\n")
    assert refusal_on_torch(variant, layer={"kind": "multihead_attention"}) is None
    assert "no use_ce" in str(refusal_on_torch(variant))


def test_on_torch_one_rank_has_nothing_to_overlap() -> None:
    assert "tp_size=1 communicates nothing that could overlap" in str(refusal_on_torch("bulk", tp_size=1))
    assert layer.refusal(torch_point(tp_size=1)) is None


def measured(ranks: Ranks, directory: Path, given: dict[str, Any]) -> dict[str, Any]:
    return layer.run(given, directory, ranks)


def test_replicas_that_train_compute_what_none_does(tmp_path: Path) -> None:
    given = torch_point(layer={"variants": ["none", "ring_exchange", "bulk"], "num_replicas": 2, "training": True})
    first, *others = run_ranks(4, measured, tmp_path, {**given, "profile": "best"})
    variants: dict[str, VariantTimes] = first["variants"]
    assert list(variants) == ["none", "ring_exchange", "bulk", "floor"]
    assert set(variants["bulk"].settings) == {"qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad"}
    for times in variants.values():
        assert list(times.times) == ["fwd", "bwd", "step", "all"]
        assert all(timing.median_us > 0 for timing in times.times.values())
    for name in ("ring_exchange", "bulk"):
        assert max(variants[name].relative_error.values()) < 1e-4
        assert "attention.block.qkv.weight_grad" in variants[name].relative_error
    assert variants["none"].relative_error == {}
    assert "trace_none_rank3.json.gz" in first["traces"]
    assert all((tmp_path / trace).stat().st_size > 0 for trace in first["traces"])
    assert all(other["variants"] == variants for other in others)


def measured_out_of_order(ranks: Ranks, directory: Path, given: dict[str, Any]) -> dict[str, Any]:
    """With a ring exchange that hands out its chunks in another order."""
    ring = overlap._ring_gather
    overlap._ring_gather = lambda *arguments: ring(*arguments).flip(0)
    try:
        return layer.run(given, directory, ranks)
    finally:
        overlap._ring_gather = ring


def test_what_computes_wrong_numbers_is_not_measured(tmp_path: Path) -> None:
    given = torch_point(layer={"variants": ["none", "ring_exchange", "bulk"]})
    for found in run_ranks(2, measured_out_of_order, tmp_path, given):
        assert list(found["variants"]) == ["none", "bulk", "floor"]
        (warning,) = found["warnings"]
        assert warning.startswith("ring_exchange computes wrong numbers and was not measured: ")
        assert found["objective_us"] == min(found["variants"][name].times["all"].median_us for name in ("none", "bulk"))
