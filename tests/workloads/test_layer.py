from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import space, workloads
from overlap_sweep.backends import transformer_engine
from overlap_sweep.errors import UserError
from overlap_sweep.workloads import layer
from overlap_sweep.workloads.layer_variants import PRESETS
from tests.points import layer_point


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: None)
    monkeypatch.setattr(transformer_engine, "cuda_major", lambda: 12)


def written(directory: Path, text: str) -> str:
    (directory / "cfg.yaml").write_text(text)
    return f"file:{directory}/cfg.yaml"


def point(**changes: Any) -> dict[str, Any]:
    return layer.complete(layer_point(**changes))


def refusal_of(variant: str, **changes: Any) -> str | None:
    of_layer = {"variants": [variant], **changes.pop("layer", {})}
    return layer.refusal(point(**changes, layer=of_layer))


def test_it_is_the_workload_of_its_name() -> None:
    assert workloads.load("layer") is layer


@pytest.mark.parametrize("kind", space.LAYER_KINDS)
@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "atomic"])
def test_every_kind_runs_every_preset_that_overlaps_in_it(kind: str, preset: str) -> None:
    reason = "bulk: it overlaps nothing in layer=linear" if (kind, preset) == ("linear", "bulk") else None
    assert refusal_of(preset, layer={"kind": kind}) == reason


def test_a_variant_that_cannot_run_is_left_out_where_another_can() -> None:
    mixed = point(precision="bf16", layer={"variants": ["none", "atomic", "default"]})
    assert layer.refusal(mixed) is None
    assert list(layer.overlap_configs(mixed)) == ["default"]
    none_left = point(precision="bf16", layer={"variants": ["none", "atomic"]})
    assert str(layer.refusal(none_left)).startswith("atomic: Transformer Engine: atomic GEMM")
    assert layer.refusal(point(layer={"comm_overlap": False})) is None


@pytest.mark.parametrize("tp_size", [3, 16])
def test_userbuffers_have_kernels_for_2_4_and_8_ranks(tp_size: int) -> None:
    sizes = {"hidden_size": 768, "ffn_hidden_size": 1536, "num_attention_heads": 48, "num_kv_heads": 48, "head_dim": 16}
    reason = layer.refusal(point(tp_size=tp_size, model=sizes, workload={"tokens": 768}))
    assert reason == f"default: userbuffers have no kernels for tp_size={tp_size}; they are for 2, 4 and 8 ranks"


def test_userbuffers_take_32_sms(tmp_path: Path) -> None:
    assert refusal_of("bulk", num_sm=32) is None
    assert "num_sm=33 is more than the 32 that userbuffers take" in str(refusal_of("bulk", num_sm=33))
    variant = written(tmp_path, "fc1_fprop: {num_sm: 33}\n")
    assert refusal_of(variant) == f"{variant}: fc1_fprop: num_sm=33 is more than the 32 that userbuffers take"


@pytest.mark.parametrize("kind", space.LAYER_KINDS)
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
def test_every_kind_runs_in_fp8(kind: str, precision: str) -> None:
    assert refusal_of("default", layer={"kind": kind}, precision=precision) is None
    assert refusal_of("atomic", layer={"kind": kind}, precision=precision) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "megatron"}, "backend=megatron has no whole layers; torch, transformer_engine, symm_mem have"),
        ({"backend": "torch", "precision": "fp8_current"}, "backend=torch has no precision=fp8_current; it has fp32, "),
        ({"runtime": {"device": "cpu"}}, "backend=transformer_engine needs GPUs; backend=torch runs on cpu"),
        (
            {"precision": "fp32"},
            "backend=transformer_engine has no precision=fp32; it has bf16, fp8_delayed, fp8_current",
        ),
        (
            {"layer": {"micro_batch_size": 3}},
            "128 tokens are no layer.micro_batch_size=3 sequences that divide by tp_size=2",
        ),
        (
            {"layer": {"micro_batch_size": 128}},
            "128 tokens are no layer.micro_batch_size=128 sequences that divide by tp_size=2",
        ),
        ({"tp_size": 8}, "qkv: 4 key-value heads do not divide by tp_size=8"),
        (
            {"precision": "fp8_delayed", "workload": {"tokens": 120}},
            "FP8 GEMMs need rows that divide by 8, and a rank has 60 tokens",
        ),
    ],
)
def test_what_cannot_run_at_all(changes: dict[str, Any], reason: str) -> None:
    assert str(layer.refusal(point(**changes))).startswith(reason)


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: "it is not there")
    assert layer.refusal(point()) == "it is not there"


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("layernorm_mlp", False), ("linear", False), ("layernorm_linear", True), ("transformer_layer", True)],
)
def test_only_the_operators_of_the_kind_have_to_divide(kind: str, refused: bool) -> None:
    reason = layer.refusal(point(tp_size=8, layer={"kind": kind}))
    assert reason == ("qkv: 4 key-value heads do not divide by tp_size=8" if refused else None)


def test_one_rank_has_nothing_to_overlap() -> None:
    reason = "default: tp_size=1 communicates nothing that could overlap; give layer.comm_overlap=false"
    assert layer.refusal(point(tp_size=1)) == reason
    assert layer.refusal(point(tp_size=1, layer={"comm_overlap": False})) is None


@pytest.mark.parametrize("cuda", [None, 12])
def test_atomic_gemms_run_up_to_cuda_12(monkeypatch: pytest.MonkeyPatch, cuda: int | None) -> None:
    monkeypatch.setattr(transformer_engine, "cuda_major", lambda: cuda)
    assert refusal_of("atomic", precision="fp8_delayed") is None


def test_atomic_gemms_are_refused_in_transformer_engines_words(monkeypatch: pytest.MonkeyPatch) -> None:
    bf16 = "atomic: Transformer Engine: atomic GEMM overlap is supported for FP8 GEMMs only"
    assert refusal_of("atomic", precision="bf16") == bf16
    monkeypatch.setattr(transformer_engine, "cuda_major", lambda: 13)
    cuda = "atomic: Transformer Engine: atomic GEMM requires CUDA >=12.2.0 and <13.0.0, and this is CUDA 13"
    assert refusal_of("atomic", precision="fp8_delayed") == cuda
    assert refusal_of("default", precision="fp8_delayed") is None


def test_fc1_cannot_be_switched_off_alone(tmp_path: Path) -> None:
    variant = written(tmp_path, "#   tp_comm_overlap_disable_fc1: true\n{}\n")
    expected = "Transformer Engine's layers cannot switch off fc1's overlap alone, as tp_comm_overlap_disable_fc1 asks"
    assert refusal_of(variant) == f"{variant}: {expected}"


def test_qkv_can(tmp_path: Path) -> None:
    assert refusal_of(written(tmp_path, "#   tp_comm_overlap_disable_qkv: true\n{}\n")) is None


def test_a_layer_without_fc1_does_not_mind_that_it_is_off(tmp_path: Path) -> None:
    variant = written(tmp_path, "#   tp_comm_overlap_disable_fc1: true\n{}\n")
    assert refusal_of(variant, layer={"kind": "multihead_attention"}) is None


def test_a_scattering_dgrad_has_to_be_set_for_qkv_and_fc1_alike(tmp_path: Path) -> None:
    variant = written(tmp_path, "fc1_dgrad: {method: ring_exchange}\n")
    expected = "tp_comm_overlap_rs_dgrad holds for qkv and fc1 alike, and qkv_dgrad is not set to"
    assert str(refusal_of(variant)).startswith(f"{variant}: {expected}")


@pytest.mark.parametrize(
    ("kind", "operator"), [("layernorm_mlp", "fc1"), ("multihead_attention", "qkv"), ("layernorm_linear", "qkv")]
)
def test_in_a_part_of_a_layer_a_scattering_dgrad_has_to_be_set_where_it_is(
    tmp_path: Path, kind: str, operator: str
) -> None:
    variant = written(tmp_path, f"{operator}_dgrad: {{method: ring_exchange}}\n")
    assert refusal_of(variant, layer={"kind": kind}) is None


def test_splits_have_to_be_equal_parts_where_the_layer_has_the_operator(tmp_path: Path) -> None:
    variant = written(tmp_path, "fc2_fprop: {method: pipeline, num_splits: 3}\n")
    assert "256 columns cannot be cut into num_splits=3" in str(refusal_of(variant))
    assert refusal_of(variant, layer={"kind": "multihead_attention"}) is None


def test_a_files_knobs_are_its_own_and_not_the_points(tmp_path: Path) -> None:
    variant = written(tmp_path, "fc2_fprop: {method: pipeline, num_splits: 4}\n")
    assert refusal_of(variant, num_splits=3, atomic_gemm=True) is None


def test_an_unknown_variant_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"layer\.variants: magic is not known"):
        layer.overlap_configs(point(layer={"variants": ["magic"]}))


def test_the_settings_are_the_slots_of_what_overlaps() -> None:
    given = layer.overlap_configs(point(layer={"variants": ["none", "default", "rs_dgrad"]}))
    assert list(given) == ["default", "rs_dgrad"]
    assert given["default"].slots == {}
    methods = {slot: setting["method"] for slot, setting in given["rs_dgrad"].slots.items()}
    assert methods == {"qkv_dgrad": "ring_exchange", "fc1_dgrad": "ring_exchange"}


@pytest.mark.parametrize(
    ("given", "precision", "allowed"),
    [
        (None, "bf16", 5e-2),
        (None, "fp8_delayed", 0.2),
        (None, "fp8_current", 0.2),
        (0.0, "bf16", 0.0),
        (0.01, "fp8_delayed", 0.01),
        (None, "fp32", 1e-4),
        (None, "fp16", 5e-2),
    ],
)
def test_tolerance(given: float | None, precision: str, allowed: float) -> None:
    assert layer.tolerance(point(precision=precision, workload={"tolerance": given})) == allowed


def test_a_file_is_read_once_and_recorded(tmp_path: Path) -> None:
    variant = written(tmp_path, "fc2_fprop: {method: pipeline, num_splits: 4}\n")
    completed = point(backend="auto", layer={"variants": [variant]})
    (tmp_path / "cfg.yaml").unlink()
    assert completed["backend"] == "transformer_engine"
    assert layer.overlap_configs(completed)[variant].slots == {"fc2_fprop": {"method": "pipeline", "num_splits": 4}}
    assert layer.refusal(completed) is None
