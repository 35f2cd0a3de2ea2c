"""Layers: what a point is completed to, and what real processes of torch measure.

What is refused under each backend, and which variants are left out, is in tests/golden/expected/refusals; what
variants configure, in tests/golden/overlaps.txt.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlap_sweep.backends import installed
from overlap_sweep.backends.torch import overlap
from overlap_sweep.measure import Ranks
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.results.identity import point_key
from overlap_sweep.results.registry import decoded_point
from overlap_sweep.workloads import layer
from overlap_sweep.workloads.layer import run as layer_run
from overlap_sweep.workloads.layer.config import Resolved
from overlap_sweep.workloads.layer.result import VariantTimes
from tests.make_point import layer_point
from tests.processes import run_ranks

ON_TORCH: dict[str, Any] = {"backend": "torch", "precision": "fp32", "runtime": {"device": "cpu"}}


@pytest.fixture(autouse=True)
def library_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "missing", lambda *_: None)


def point(**changes: Any) -> Any:
    return decoded_point(layer.complete(layer_point(**changes)))


def torch_point(**changes: Any) -> Any:
    return point(**{**ON_TORCH, **changes})


def test_a_layer_from_before_its_switches_is_that_without_them() -> None:
    recorded = layer.complete(layer_point())
    fields = {option: value for option, value in recorded["layer"].items() if not option.startswith(("ub_", "moe"))}
    earlier = {**recorded, "layer": {**fields, "ub_overlap_rs_dgrad": False}}
    assert point_key(decoded_point(earlier)) == point_key(decoded_point(recorded))


def test_a_file_is_read_with_its_switches_also_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = {"fc1_dgrad": {"method": "pipeline", "num_sm": 4}}
    path = tmp_path / "cfg.yaml"
    path.write_text("#   tp_comm_overlap_disable_qkv: true\n" + yaml.safe_dump(slots))
    changed = {"tp_comm_overlap_disable_qkv": True, "tp_comm_overlap_rs_dgrad": True}
    config = OverlapConfig(slots, {**SWITCH_DEFAULTS, **changed})
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (f"file:{path}", "file:~/cfg.yaml"):
        given = layer_point(layer={"variants": ["none", name]})
        assert [*layer.configurations(given).values()] == [config]
    alone = layer_point(layer={"tp_comm_overlap_cfg": str(path)})
    assert layer.names(alone) == ["none", f"file:{path}", "floor"]
    assert layer.configurations(alone) == {f"file:{path}": config}


@pytest.mark.parametrize(("margin", "refused"), [("0", False), ("false", False), ("1", True)])
def test_a_file_may_say_that_what_the_backend_has_not_is_off(tmp_path: Path, margin: str, refused: bool) -> None:
    """0 is how the reference's files say it."""
    path = tmp_path / "tuned.yaml"
    path.write_text(f"fc1_dgrad:\n  method: bulk\n  num_sm: 4\n  set_sm_margin: {margin}\n")
    reason = layer.refusal(torch_point(layer={"variants": [f"file:{path}"]}))
    assert (reason is not None and "fc1_dgrad: backend=torch has no set_sm_margin on cpu" in reason) == refused
    assert refused or reason is None


def test_a_layer_whose_operators_the_model_has_not_is_refused_and_the_others_run() -> None:
    lacking = {"instead": dict.fromkeys(("fc1", "fc2"), "it has experts instead")}
    unsized = {"ffn_hidden_size": None, "gated_mlp": None, **lacking}
    reasons = {
        kind: layer.refusal(torch_point(model=unsized, layer={"kind": kind, "variants": ["none"]}))
        for kind in ("transformer_layer", "layernorm_mlp", "multihead_attention")
    }
    said = "fc1: it has experts instead; give model.ffn_hidden_size and model.gated_mlp"
    assert reasons == {"transformer_layer": said, "layernorm_mlp": said, "multihead_attention": None}


def test_a_variant_that_cannot_run_is_left_out_where_another_can() -> None:
    mixed = point(layer={"variants": ["none", "atomic", "default", "rs_dgrad"]})
    assert layer.refusal(mixed) is None
    given = layer.overlap_configs(mixed)
    assert list(given) == ["default", "rs_dgrad"]
    assert given["default"].slots == {}
    methods = {slot: setting["method"] for slot, setting in given["rs_dgrad"].slots.items()}
    assert methods == {"qkv_dgrad": "ring_exchange", "fc1_dgrad": "ring_exchange"}


@pytest.mark.parametrize(
    ("given", "precision", "allowed"),
    [
        (None, "bf16", 5e-2),
        (None, "fp8_delayed", 0.2),
        (None, "nvfp4", 0.2),
        (0.0, "bf16", 0.0),
        (0.01, "fp8_delayed", 0.01),
        (None, "fp32", 1e-4),
    ],
)
def test_tolerance(given: float | None, precision: str, allowed: float) -> None:
    assert layer.tolerance(point(precision=precision, workload={"tolerance": given})) == allowed


def test_a_file_is_read_once_and_recorded(tmp_path: Path) -> None:
    (tmp_path / "cfg.yaml").write_text("fc2_fprop: {method: pipeline, num_splits: 4}\n")
    variant = f"file:{tmp_path}/cfg.yaml"
    completed = point(backend="auto", layer={"variants": [variant]})
    (tmp_path / "cfg.yaml").unlink()
    assert completed.backend == "transformer_engine"
    assert layer.overlap_configs(completed)[variant].slots == {"fc2_fprop": {"method": "pipeline", "num_splits": 4}}
    assert layer.refusal(completed) is None


def measured(ranks: Ranks, directory: Path, given: Resolved) -> dict[str, Any]:
    return layer_run.run(given, directory, ranks)


def test_replicas_that_train_compute_what_none_does(tmp_path: Path) -> None:
    given = torch_point(layer={"variants": ["none", "ring_exchange", "bulk"], "num_replicas": 2, "training": True})
    first, *others = run_ranks(4, measured, tmp_path, replace(given, profile="best"), keep="cpu")
    variants: dict[str, VariantTimes] = first["measured"].variants
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
    assert all(other["measured"].variants == variants for other in others)


def measured_out_of_order(ranks: Ranks, directory: Path, given: Resolved) -> dict[str, Any]:
    """With a ring exchange that hands out its chunks in another order."""
    ring = overlap.Collectives._ring_gather
    overlap.Collectives._ring_gather = lambda *arguments: ring(*arguments).flip(0)
    try:
        return layer_run.run(given, directory, ranks)
    finally:
        overlap.Collectives._ring_gather = ring


def test_a_preset_under_other_switches_overlaps_less_and_computes_the_same(tmp_path: Path) -> None:
    less = "ring_exchange ub_overlap_ag=false"
    given = torch_point(layer={"variants": ["none", "ring_exchange", less], "kind": "layernorm_mlp"})
    first, _ = run_ranks(2, measured, tmp_path, replace(given, profile="none"), keep="cpu")
    variants: dict[str, VariantTimes] = first["measured"].variants
    assert list(variants) == ["none", "ring_exchange", less, "floor"]
    switches = {name: times.switches["tp_comm_overlap_ag"] for name, times in variants.items() if times.switches}
    assert switches == {"ring_exchange": True, less: False}
    assert max(variants[less].relative_error.values()) < 1e-4


def test_what_computes_wrong_numbers_is_not_measured(tmp_path: Path) -> None:
    given = torch_point(layer={"variants": ["none", "ring_exchange", "bulk"]})
    for found in run_ranks(2, measured_out_of_order, tmp_path, given, keep="cpu"):
        assert list(found["measured"].variants) == ["none", "bulk", "floor"]
        (warning,) = found["warnings"]
        assert warning.startswith("ring_exchange computes wrong numbers and was not measured: ")
        assert found["objective_us"] == min(
            found["measured"].variants[name].times["all"].median_us for name in ("none", "bulk")
        )
