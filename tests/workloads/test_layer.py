"""Layers: what is refused without a process under each backend, and what real ones of torch measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep import space
from overlap_sweep.backends import transformer_engine
from overlap_sweep.backends.torch import overlap
from overlap_sweep.errors import UserError
from overlap_sweep.ranks import Ranks
from overlap_sweep.run_directory import VariantTimes
from overlap_sweep.workloads import layer
from overlap_sweep.workloads.layer_variants import PRESETS
from tests.points import layer_point
from tests.processes import run_ranks

ON_TORCH: dict[str, Any] = {"backend": "torch", "precision": "fp32", "runtime": {"device": "cpu"}}
FP8 = {"precision": "fp8_delayed"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: None)
    monkeypatch.setattr(transformer_engine, "cuda_major", lambda: 12)


def point(**changes: Any) -> dict[str, Any]:
    return layer.complete(layer_point(**changes))


def torch_point(**changes: Any) -> dict[str, Any]:
    return point(**{**ON_TORCH, **changes})


def refusal_of(variant: str, **changes: Any) -> str | None:
    """Without the variant's name."""
    of_layer = {"variants": [variant], **changes.pop("layer", {})}
    reason = layer.refusal(point(**changes, layer=of_layer))
    return reason.removeprefix(f"{variant}: ") if reason else reason


def assert_refused(refused: str | None, reason: str | None) -> None:
    """With these words; None: not at all."""
    assert refused is None if reason is None else reason in str(refused), refused


@pytest.mark.parametrize("kind", space.LAYER_KINDS)
@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "atomic"])
def test_every_kind_runs_every_preset_that_overlaps_in_it(kind: str, preset: str) -> None:
    reason = "it overlaps nothing in layer=linear" if (kind, preset) == ("linear", "bulk") else None
    assert refusal_of(preset, layer={"kind": kind}) == reason
    if preset == "default" or (kind, preset) == ("linear", "rs_dgrad"):
        reason = NO_DEFAULT
    assert refusal_of(preset, layer={"kind": kind}, **ON_TORCH) == reason


NO_DEFAULT = "backend=torch has no default overlap of its own, and no slot of this layer is set and switched on"


def test_a_variant_that_cannot_run_is_left_out_where_another_can() -> None:
    mixed = point(layer={"variants": ["none", "atomic", "default"]})
    on_torch = torch_point(layer={"variants": ["none", "default", "atomic", "bulk"]})
    assert (layer.refusal(mixed), layer.refusal(on_torch)) == (None, None)
    assert (list(layer.overlap_configs(mixed)), list(layer.overlap_configs(on_torch))) == (["default"], ["bulk"])
    none_left = point(layer={"variants": ["none", "atomic"]})
    assert str(layer.refusal(none_left)).startswith("atomic: Transformer Engine: atomic GEMM")
    assert layer.refusal(point(layer={"comm_overlap": False})) is None


@pytest.mark.parametrize("kind", space.LAYER_KINDS)
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
def test_every_kind_runs_in_fp8(kind: str, precision: str) -> None:
    for variant in ("default", "atomic"):
        assert refusal_of(variant, layer={"kind": kind}, precision=precision) is None


MANY_HEADS = {"hidden_size": 768, "ffn_hidden_size": 1536, "num_attention_heads": 48, "num_kv_heads": 48}
DIVIDED_BY_6 = {"num_attention_heads": 12, "num_kv_heads": 6, "hidden_size": 384, "ffn_hidden_size": 768}
SEQUENCES = "sequences that divide by tp_size=2"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"backend": "megatron"}, "backend=megatron has no whole layers; torch, transformer_engine, symm_mem have"),
        ({"backend": "torch", "precision": "fp8_current"}, "backend=torch has no precision=fp8_current; it has fp32, "),
        ({"backend": "symm_mem"}, None),
        ({"backend": "symm_mem", "runtime": {"device": "cpu"}}, "symm_mem copies from GPU to GPU"),
        ({"runtime": {"device": "cpu"}}, "backend=transformer_engine needs GPUs; backend=torch runs on cpu"),
        ({"precision": "fp32"}, "backend=transformer_engine has no precision=fp32; it has bf16, fp8_delayed, fp8_c"),
        *(
            ({"layer": {"micro_batch_size": size}}, f"128 tokens are no layer.micro_batch_size={size} {SEQUENCES}")
            for size in (3, 128)
        ),
        ({**FP8, "workload": {"tokens": 120}}, "FP8 GEMMs need rows that divide by 8, and a rank has 60 tokens"),
        # Only the operators of the kind have to divide.
        *(
            ({"tp_size": 8, "layer": {"kind": kind}}, "qkv: 4 key-value heads do not divide by tp_size=8")
            for kind in ("transformer_layer", "layernorm_linear")
        ),
        *(({"tp_size": 8, "layer": {"kind": kind}}, None) for kind in ("layernorm_mlp", "linear")),
        ({"tp_size": 1}, "default: tp_size=1 communicates nothing that could overlap; give layer.comm_overlap=false"),
        ({"tp_size": 1, "layer": {"comm_overlap": False}}, None),
        (ON_TORCH | {"tp_size": 1}, None),
        (ON_TORCH | {"tp_size": 1, "layer": {"variants": ["bulk"]}}, "bulk: tp_size=1 communicates nothing that could"),
        *(
            (
                {"tp_size": size, "model": {**MANY_HEADS, "head_dim": 16}, "workload": {"tokens": 768}},
                f"default: userbuffers have no kernels for tp_size={size}; they are for 2, 4 and 8 ranks",
            )
            for size in (3, 16)
        ),
        # On torch nothing overlaps by default, and all sizes can.
        *(
            (
                {**ON_TORCH, "tp_size": size, "model": DIVIDED_BY_6, "workload": {"tokens": 96}, "layer": layer_},
                reason,
            )
            for size in (2, 3, 6)
            for layer_, reason in (
                ({"variants": ["default"]}, f"default: {NO_DEFAULT}"),
                ({"variants": ["ring_exchange"]}, None),
            )
        ),
    ],
)
def test_what_cannot_run_at_all(changes: dict[str, Any], reason: str | None) -> None:
    assert_refused(layer.refusal(point(**changes)), reason)


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: "it is not there")
    assert layer.refusal(point()) == "it is not there"


@pytest.mark.parametrize("cuda", [None, 12, 13])
def test_atomic_gemms_run_up_to_cuda_12(monkeypatch: pytest.MonkeyPatch, cuda: int | None) -> None:
    assert refusal_of("atomic") == "Transformer Engine: atomic GEMM overlap is supported for FP8 GEMMs only"
    monkeypatch.setattr(transformer_engine, "cuda_major", lambda: cuda)
    refused = "Transformer Engine: atomic GEMM requires CUDA >=12.2.0 and <13.0.0, and this is CUDA 13"
    assert refusal_of("atomic", **FP8) == (refused if cuda == 13 else None)
    assert refusal_of("default", **FP8) is None


ATTENTION, MLP = {"layer": {"kind": "multihead_attention"}}, {"layer": {"kind": "layernorm_mlp"}}
LINEAR = {"layer": {"kind": "layernorm_linear"}}
FC1_ALONE = "Transformer Engine's layers cannot switch off fc1's overlap alone, as tp_comm_overlap_disable_fc1 asks"
ALIKE = "tp_comm_overlap_rs_dgrad holds for qkv and fc1 alike, and qkv_dgrad is not set to"
ALL_OFF = "# tp_comm_overlap_ag: false\n# tp_comm_overlap_rs: false\n# tp_comm_bulk_dgrad: false\n"
ON_A_GPU = ON_TORCH | {"runtime": {"device": "cuda"}}


@pytest.mark.parametrize(
    ("changes", "text", "reason"),
    [
        ({}, "fc1_fprop: {num_sm: 33}", "fc1_fprop: num_sm=33 is more than the 32 that userbuffers take"),
        ({}, "# tp_comm_overlap_disable_fc1: true\n{}", FC1_ALONE),
        # A layer without fc1 does not mind that it is off.
        (ATTENTION, "# tp_comm_overlap_disable_fc1: true\n{}", None),
        ({}, "# tp_comm_overlap_disable_qkv: true\n{}", None),
        ({}, "fc1_dgrad: {method: ring_exchange}", ALIKE),
        (MLP, "fc1_dgrad: {method: ring_exchange}", None),
        (ATTENTION, "qkv_dgrad: {method: ring_exchange}", None),
        (LINEAR, "qkv_dgrad: {method: ring_exchange}", None),
        ({}, "fc2_fprop: {method: pipeline, num_splits: 3}", "fc2_fprop: 256 columns cannot be cut into num_splits=3"),
        (ATTENTION, "fc2_fprop: {method: pipeline, num_splits: 3}", None),
        # A file's knobs are its own and not the point's.
        ({"num_splits": 3, "atomic_gemm": True}, "fc2_fprop: {method: pipeline, num_splits: 4}", None),
        (ON_TORCH, "fc1_fprop: {method: ring_exchange, num_sm: 64}", None),
        (ON_TORCH, "fc1_fprop: {method: ring_exchange, use_ce: 0}", "fc1_fprop: backend=torch has no use_ce on cpu"),
        (ON_TORCH, "fc1_dgrad: {method: bulk, set_sm_margin: 1}", "fc1_dgrad: backend=torch has no set_sm_margin on"),
        (ON_TORCH, "fc1_dgrad: {method: bulk, cga_size: 2}", "fc1_dgrad: backend=torch has no cga_size on cpu"),
        (ON_A_GPU, "fc1_dgrad: {method: bulk, cga_size: 2}", None),
        (ON_TORCH, "fc1_dgrad: {method: bulk, comm_priority: 0}", "fc1_dgrad: backend=torch has no comm_priority"),
        (ON_TORCH, "fc1_dgrad: {method: bulk, use_ce: 1}", None),
        (ON_TORCH, "fc1_fprop: {num_sm: 4}", "fc1_fprop is given no method, and backend=torch has no default to take"),
        (ON_TORCH, "fc1_fprop: {method: pipeline}", "fc1_fprop takes ring_exchange, not pipeline"),
        (ON_TORCH, "fc1_dgrad: {method: ring_exchange}", None),
        (ON_TORCH, "fc1_dgrad: {method: pipeline}\nfc1_wgrad: {method: bulk}", "fc1_wgrad cannot be configured"),
        (ON_TORCH, "# tp_comm_overlap_rs_dgrad: false\nfc1_dgrad: {method: pipeline}", "the switches let fc1_dgrad"),
        (ON_TORCH, "# tp_comm_overlap_rs_dgrad: true\nfc1_dgrad: {method: bulk}", "the switches let fc1_dgrad"),
        (ON_TORCH, "# tp_comm_overlap_disable_fc1: true\nfc2_fprop: {method: pipeline}", None),
        (ON_TORCH, "# tp_comm_overlap_disable_fc1: true\nfc1_fprop: {method: ring_exchange}", NO_DEFAULT),
        (ON_TORCH, "# tp_comm_overlap_ag: false\nfc1_fprop: {method: ring_exchange, use_ce: 1}", NO_DEFAULT),
        (ON_TORCH, "{}", NO_DEFAULT),
        (ON_TORCH, "# tp_comm_overlap: false\nfc2_fprop: {method: pipeline}", "it overlaps nothing in layer=trans"),
        *(
            ({"backend": "symm_mem"}, text, reason)
            for text, reason in (
                ("{}", None),
                (f"{ALL_OFF}{{}}", "leave no slot of this"),
                ("fc2_fprop: {method: pipeline}", "fc2_fprop: backend=symm_mem has no pipeline"),
                ("fc1_fprop: {method: ring_exchange, use_ce: true}", "fc1_fprop: backend=symm_mem has no use_ce"),
                ("fc1_fprop: {num_sm: 4}", "fc1_fprop is given no method"),
                (
                    "# tp_comm_overlap_rs_dgrad: false\nfc1_dgrad: {method: ring_exchange}",
                    "fc1_dgrad overlap by bulk",
                ),
                ("fc1_wgrad: {method: bulk}", "cannot be configured beside fc1_dgrad by ring_exchange"),
                # It changes nothing.
                ("fc1_fprop: {method: ring_exchange, num_sm: 4}", None),
            )
        ),
        # Only the slots of the kind matter.
        (ON_TORCH | ATTENTION, "fc1_fprop: {method: ring_exchange, use_ce: 1}\nproj_fprop: {method: pipeline}", None),
    ],
)
def test_what_backends_take_of_a_file(tmp_path: Path, changes: dict[str, Any], text: str, reason: str | None) -> None:
    (tmp_path / "cfg.yaml").write_text(f"{text}\n")
    assert_refused(refusal_of(f"file:{tmp_path}/cfg.yaml", **changes), reason)


def test_userbuffers_take_32_sms_and_torch_no_atomic_gemm() -> None:
    assert refusal_of("bulk", num_sm=32) is None
    assert "num_sm=33 is more than the 32 that userbuffers take" in str(refusal_of("bulk", num_sm=33))
    assert refusal_of("atomic", **ON_TORCH) == "qkv_fprop: backend=torch has no atomic_gemm on cpu"


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
    (tmp_path / "cfg.yaml").write_text("fc2_fprop: {method: pipeline, num_splits: 4}\n")
    variant = f"file:{tmp_path}/cfg.yaml"
    completed = point(backend="auto", layer={"variants": [variant]})
    (tmp_path / "cfg.yaml").unlink()
    assert completed["backend"] == "transformer_engine"
    assert layer.overlap_configs(completed)[variant].slots == {"fc2_fprop": {"method": "pipeline", "num_splits": 4}}
    assert layer.refusal(completed) is None


@pytest.mark.parametrize(
    ("device", "missing", "chosen"),
    [("cpu", None, "torch"), ("cuda", "it is not there", "torch"), ("cuda", None, "transformer_engine")],
)
def test_auto_overlaps_what_the_chosen_backend_does_by_default(
    monkeypatch: pytest.MonkeyPatch, device: str, missing: str | None, chosen: str
) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: missing)
    completed = point(backend="auto", runtime={"device": device})
    assert completed["backend"] == chosen
    assert list(completed["layer"]["configurations"]) == (["default"] if chosen == "transformer_engine" else [])
    assert layer.refusal(completed) is None


def measured(ranks: Ranks, directory: Path, given: dict[str, Any]) -> dict[str, Any]:
    return layer.run(given, directory, ranks)


def test_replicas_that_train_compute_what_none_does(tmp_path: Path) -> None:
    given = torch_point(layer={"variants": ["none", "ring_exchange", "bulk"], "num_replicas": 2, "training": True})
    first, *others = run_ranks(4, measured, tmp_path, {**given, "profile": "best"}, keep="cpu")
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
    for found in run_ranks(2, measured_out_of_order, tmp_path, given, keep="cpu"):
        assert list(found["variants"]) == ["none", "bulk", "floor"]
        (warning,) = found["warnings"]
        assert warning.startswith("ring_exchange computes wrong numbers and was not measured: ")
        assert found["objective_us"] == min(found["variants"][name].times["all"].median_us for name in ("none", "bulk"))
