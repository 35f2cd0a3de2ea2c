"""What backends that overlap by userbuffers refuse, and what they say of themselves without their library."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from overlap_sweep import backends, models
from overlap_sweep.backends import megatron, transformer_engine
from tests.points import gpu_point

FP8, FP8_CURRENT = {"precision": "fp8_delayed"}, {"precision": "fp8_current"}
REAL_MISSING, REAL_CUDA_MAJOR = transformer_engine.missing, transformer_engine.cuda_major


@pytest.fixture(autouse=True)
def cuda_12(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "transformer_engine", "megatron.core")
    monkeypatch.setattr(transformer_engine, "cuda_major", lambda: 12)


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Have exactly these be there."""
    reasons = {name: f"{name} is not installed" for name in {"transformer_engine", "megatron.core"} - set(packages)}
    for module in (transformer_engine, megatron):
        monkeypatch.setattr(module, "missing", lambda package="transformer_engine": reasons.get(package))


@pytest.mark.parametrize(
    ("packages", "lacking"),
    [
        ((), {"transformer_engine": "transformer_engine", "megatron": "transformer_engine"}),
        (("megatron.core",), {"transformer_engine": "transformer_engine", "megatron": "transformer_engine"}),
        (("transformer_engine",), {"megatron": "megatron.core"}),
        (("transformer_engine", "megatron.core"), {}),
    ],
)
def test_a_missing_library_comes_before_everything_else(
    monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], lacking: dict[str, str]
) -> None:
    install(monkeypatch, *packages)
    for backend in ("transformer_engine", "megatron"):
        module, at_all = backends.load(backend), gpu_point(backend=backend)
        reason = f"{lacking[backend]} is not installed" if backend in lacking else None
        assert module.refusal(at_all) == reason
        if reason:
            assert module.refusal({**at_all, "runtime": {"device": "cpu"}}) == reason


RING = {"method": "ring_exchange", "atomic_gemm": True}
SCATTER = {"operator": "fc2", "phase": "fprop", "method": "pipeline", "fp8_buf": True}
GATHER = {"operator": "fc2", "phase": "dgrad", "method": "ring_exchange", "fp8_buf": True}
PAIRS = {"phase": "fprop", "method": "ring_exchange", "aggregate": True, "workload": {"tokens": 96}}
OF_96 = {"workload": {"tokens": 96}}
NARROW = {"model": {"ffn_hidden_size": 36}}
# fc2 puts out 256 columns, and fc1's dgrad as many; their GEMMs read 512 and 1024.
FC2_PIPELINE = {"operator": "fc2", "phase": "fprop", "method": "pipeline"}
FC1_PIPELINE = {"operator": "fc1", "phase": "dgrad", "method": "pipeline"}


@pytest.mark.parametrize("backend", ["transformer_engine", "megatron"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        (FP8, None),
        ({"runtime": {"device": "cpu"}}, " needs GPUs; backend=torch runs on cpu"),
        ({"precision": "fp32"}, " has no precision=fp32; it has bf16, fp8_delayed, fp8_current"),
        ({"precision": "fp16"}, " has no precision=fp16; it has bf16, fp8_delayed, fp8_current"),
        # Sizes that FP8 GEMMs do not take.
        *(
            ({**precision, **changes}, reason if precision else None)
            for precision in (FP8, FP8_CURRENT, {})
            for changes, reason in (
                (NARROW, "divide by 16, and a rank has 36 outputs"),
                ({"model": {"ffn_hidden_size": 72}, "operator": "fc2", "method": "none"}, "divide by 16, and a rank"),
                ({"model": {"hidden_size": 250}}, "divide by 16, and a rank has 250 inputs"),
                ({"workload": {"tokens": 120}}, "rows that divide by 8, and a rank has 60 tokens"),
            )
        ),
        # Atomic GEMMs.
        (RING, "atomic GEMM overlap is supported for FP8 GEMMs only"),
        ({**RING, "atomic_gemm": False}, None),
        ({**RING, **FP8}, None),
        ({"method": "bulk", "atomic_gemm": True}, None),
        # Reduce-scatters in FP8.
        (SCATTER, "fp8_buf needs an FP8 precision"),
        ({**SCATTER, **FP8_CURRENT}, "a reduce-scatter in FP8 needs delayed scaling"),
        ({**SCATTER, **FP8}, None),
        ({**SCATTER, **FP8_CURRENT, "method": "ring_exchange"}, "needs delayed scaling"),
        ({**SCATTER, "fp8_buf": False}, None),
        ({**GATHER, **FP8_CURRENT}, None),
        ({**GATHER, **FP8}, None),
        # Splits, which have to be equal parts.
        *(
            ({**slot, **precision, "num_splits": splits}, reason)
            for slot in (FC2_PIPELINE, FC1_PIPELINE)
            for precision, splits, reason in (
                ({}, 1, None),
                ({}, 4, None),
                ({}, 32, None),
                ({}, 3, f"{slot['operator']}_{slot['phase']}: 256 columns cannot be cut into num_splits=3 equal parts"),
                ({}, 512, "256 columns cannot be cut into num_splits=512 equal parts"),
                (FP8, 16, None),
                (FP8, 32, "256 columns cannot be cut into num_splits=32 equal parts of a multiple of 16"),
            )
        ),
        # What the kernels of userbuffers are made for.
        ({"num_sm": 33}, "num_sm=33 is more than the 32 that userbuffers take"),
        ({"num_sm": 32}, None),
        ({**OF_96, "tp_size": 3}, "no kernels for bulk on tp_size=3; they are for 2, 4 and 8 ranks"),
        ({**OF_96, **FC2_PIPELINE, "tp_size": 6}, "no kernels for pipeline on tp_size=6"),
        ({**PAIRS, "tp_size": 3}, "joins the chunks of two neighbours, and tp_size=3 is odd"),
        ({**PAIRS, "tp_size": 3, "aggregate": False}, None),
        ({**PAIRS, "tp_size": 6}, None),
    ],
)
def test_what_userbuffers_cannot_do_is_refused(backend: str, changes: dict[str, Any], reason: str | None) -> None:
    refused = backends.load(backend).refusal(gpu_point(**{**changes, "backend": backend}))
    if reason is None:
        assert refused is None
    else:
        assert reason in str(refused)
        # Only FP8 needs such parts.
        assert ("of a multiple of 16" in str(refused)) == reason.endswith("of a multiple of 16")


@pytest.mark.parametrize("precision", [FP8, FP8_CURRENT])
@pytest.mark.parametrize(("cuda", "refused"), [(None, False), (12, False), (13, True), (14, True)])
def test_atomic_gemms_end_with_cuda_12(
    monkeypatch: pytest.MonkeyPatch, precision: dict[str, Any], cuda: int | None, refused: bool
) -> None:
    monkeypatch.setattr(transformer_engine, "cuda_major", lambda: cuda)
    reason = transformer_engine.refusal(gpu_point(**precision, **RING))
    # The words of Transformer Engine's own error.
    words = f"Transformer Engine: atomic GEMM requires CUDA >=12.2.0 and <13.0.0, and this is CUDA {cuda}"
    assert reason == (words if refused else None)


def test_the_cuda_that_it_was_built_for_is_told_by_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed, major in (("transformer-engine-cu12", 12), ("transformer-engine-cu13", 13), ("numpy", None)):

        def version(package: str, installed: str = installed) -> str:
            if package != installed:
                raise PackageNotFoundError(package)
            return "2.20.2"

        monkeypatch.setattr(transformer_engine, "version", version)
        assert REAL_CUDA_MAJOR.__wrapped__() == major


def test_a_package_that_is_not_there_is_told_with_how_to_install_it() -> None:
    assert REAL_MISSING("no_such_package") == (
        "no_such_package is not installed; pip install -c constraints-gpu.txt -e '.[gpu]'"
    )
    assert REAL_MISSING("torch") is None


# Transformer Engine 2.20, module/base.py, get_default_config.
@pytest.mark.parametrize(
    ("method", "cga_size", "set_sm_margin"), [("bulk", 2, True), ("pipeline", 2, True), ("ring_exchange", 1, False)]
)
def test_the_default_knobs_are_the_librarys(method: str, cga_size: int, set_sm_margin: bool) -> None:
    given = transformer_engine.default_knobs(method)
    assert (given["cga_size"], given["set_sm_margin"]) == (cga_size, set_sm_margin)
    assert given.get("use_ce", True)
    assert given.get("num_splits", 4) == 4
    assert not given.get("aggregate", False)


@pytest.mark.parametrize(
    ("operator", "model", "names"),
    [
        ("fc1", {"bias": False, "normalization": "RMSNorm"}, {"layer_norm_weight"}),
        ("qkv", {"bias": True, "normalization": "LayerNorm"}, {"bias", "layer_norm_weight", "layer_norm_bias"}),
        ("fc2", {"bias": False, "normalization": "LayerNorm"}, set()),
        ("proj", {"bias": True, "normalization": "RMSNorm"}, {"bias"}),
    ],
)
def test_parameters_of_every_operator(operator: str, model: dict[str, Any], names: set[str]) -> None:
    point = gpu_point(operator=operator, model=model)
    shape = models.linear_shape(point["model"], operator, 128, 2)
    shapes = transformer_engine.parameter_shapes(point, shape)
    assert set(shapes) == {"weight", *names}
    assert shapes["weight"] == shape.weight_shape
    assert shapes.get("bias", (shape.weight_shape[0],)) == (shape.weight_shape[0],)
    assert shapes.get("layer_norm_weight", (256,)) == (256,)


def test_the_librarys_default_has_bulk_and_pipeline() -> None:
    has_default = {size: transformer_engine.has_default(gpu_point(tp_size=size)) for size in (1, 2, 3, 4, 6, 8)}
    assert has_default == {1: False, 2: True, 3: False, 4: True, 6: False, 8: True}
