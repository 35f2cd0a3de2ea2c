from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from overlap_sweep import models, space
from overlap_sweep.backends import transformer_engine
from tests.points import gpu_point

FP8 = "fp8_delayed"
REAL_MISSING, REAL_CUDA_MAJOR = transformer_engine.missing, transformer_engine.cuda_major


@pytest.fixture(autouse=True)
def cuda_12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: None)
    monkeypatch.setattr(transformer_engine, "cuda_major", lambda: 12)


def test_what_makes_sense_is_not_refused() -> None:
    assert transformer_engine.refusal(gpu_point()) is None
    assert transformer_engine.refusal(gpu_point(precision=FP8)) is None


def test_a_missing_library_comes_before_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: "it is not there")
    assert transformer_engine.refusal(gpu_point(runtime={"device": "cpu"})) == "it is not there"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"runtime": {"device": "cpu"}}, "backend=transformer_engine needs GPUs; backend=torch runs on cpu"),
        (
            {"precision": "fp32"},
            "backend=transformer_engine has no precision=fp32; it has bf16, fp8_delayed, fp8_current",
        ),
        (
            {"precision": "fp16"},
            "backend=transformer_engine has no precision=fp16; it has bf16, fp8_delayed, fp8_current",
        ),
    ],
)
def test_devices_and_precisions(changes: dict[str, Any], reason: str) -> None:
    assert transformer_engine.refusal(gpu_point(**changes)) == reason


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": {"ffn_hidden_size": 36}}, "divide by 16, and a rank has 36 outputs"),
        ({"model": {"ffn_hidden_size": 72}, "operator": "fc2", "method": "none"}, "divide by 16, and a rank has 36 in"),
        ({"model": {"hidden_size": 250}}, "divide by 16, and a rank has 250 inputs"),
        ({"workload": {"tokens": 120}}, "rows that divide by 8, and a rank has 60 tokens"),
    ],
)
def test_sizes_that_fp8_gemms_do_not_take(precision: str, changes: dict[str, Any], says: str) -> None:
    assert says in str(transformer_engine.refusal(gpu_point(precision=precision, **changes)))
    assert transformer_engine.refusal(gpu_point(precision="bf16", **changes)) is None


RING = {"method": "ring_exchange", "atomic_gemm": True}


def test_atomic_gemms_are_for_fp8() -> None:
    expected = "Transformer Engine: atomic GEMM overlap is supported for FP8 GEMMs only"
    assert transformer_engine.refusal(gpu_point(**RING)) == expected
    assert transformer_engine.refusal(gpu_point(**{**RING, "atomic_gemm": False})) is None


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
@pytest.mark.parametrize(("cuda", "refused"), [(None, False), (12, False), (13, True), (14, True)])
def test_atomic_gemms_end_with_cuda_12(
    monkeypatch: pytest.MonkeyPatch, precision: str, cuda: int | None, refused: bool
) -> None:
    monkeypatch.setattr(transformer_engine, "cuda_major", lambda: cuda)
    reason = transformer_engine.refusal(gpu_point(precision=precision, **RING))
    # The words of Transformer Engine's own error.
    words = f"Transformer Engine: atomic GEMM requires CUDA >=12.2.0 and <13.0.0, and this is CUDA {cuda}"
    assert reason == (words if refused else None)


def test_a_method_without_atomic_gemms_ignores_the_knob() -> None:
    assert transformer_engine.refusal(gpu_point(method="bulk", atomic_gemm=True)) is None


SCATTER = {"operator": "fc2", "phase": "fprop", "method": "pipeline", "fp8_buf": True}
GATHER = {"operator": "fc2", "phase": "dgrad", "method": "ring_exchange", "fp8_buf": True}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({**SCATTER, "precision": "bf16"}, "fp8_buf needs an FP8 precision"),
        ({**SCATTER, "precision": "fp8_current"}, "a reduce-scatter in FP8 needs delayed scaling"),
        ({**SCATTER, "precision": "fp8_delayed"}, None),
        ({**SCATTER, "method": "ring_exchange", "precision": "fp8_current"}, "needs delayed scaling"),
        ({**SCATTER, "fp8_buf": False, "precision": "bf16"}, None),
        ({**GATHER, "precision": "fp8_current"}, None),
        ({**GATHER, "precision": "fp8_delayed"}, None),
    ],
)
def test_reduce_scatters_in_fp8(changes: dict[str, Any], says: str | None) -> None:
    reason = transformer_engine.refusal(gpu_point(**changes))
    assert reason is None if says is None else says in str(reason)


# fc2 puts out 256 columns, and fc1's dgrad as many; their GEMMs read 512 and 1024.
PIPELINED = {"fc2_fprop": {"operator": "fc2", "phase": "fprop"}, "fc1_dgrad": {"operator": "fc1", "phase": "dgrad"}}


@pytest.mark.parametrize("slot", PIPELINED)
@pytest.mark.parametrize(
    ("precision", "num_splits", "fits"),
    [
        ("bf16", 1, True),
        ("bf16", 4, True),
        ("bf16", 32, True),
        ("bf16", 3, False),
        ("bf16", 512, False),
        ("fp8_delayed", 16, True),
        ("fp8_delayed", 32, False),
    ],
)
def test_splits_have_to_be_equal_parts(slot: str, precision: str, num_splits: int, fits: bool) -> None:
    point = gpu_point(**PIPELINED[slot], method="pipeline", num_splits=num_splits, precision=precision)
    reason = transformer_engine.refusal(point)
    if fits:
        assert reason is None
    else:
        assert f"{slot}: 256 columns cannot be cut into num_splits={num_splits} equal parts" in str(reason)
        assert ("of a multiple of 16" in str(reason)) == (precision != "bf16")


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


@pytest.mark.parametrize("method", space.METHODS)
def test_the_default_knobs_are_knobs_of_the_method(method: str) -> None:
    known = {
        knob
        for operator in space.OPERATORS
        for phase in space.PHASES
        if method in space.methods_of(operator, phase)
        for knob in space.knobs_of(operator, phase, method)
    }
    given = transformer_engine.default_knobs(method)
    assert set(given) <= known
    # What the library would not take from the slot's own default, which may be that of another method.
    assert {"cga_size", "set_sm_margin"} & known <= set(given)


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


def test_there_is_a_default_overlap_where_there_is_something_to_overlap() -> None:
    assert transformer_engine.has_default(gpu_point(tp_size=2))
    assert not transformer_engine.has_default(gpu_point(tp_size=1))


@pytest.mark.parametrize(
    ("operator", "model", "names"),
    [
        ("fc1", {"bias": False, "normalization": "RMSNorm"}, {"weight", "layer_norm_weight"}),
        (
            "qkv",
            {"bias": True, "normalization": "LayerNorm"},
            {"weight", "bias", "layer_norm_weight", "layer_norm_bias"},
        ),
        ("fc2", {"bias": False, "normalization": "LayerNorm"}, {"weight"}),
        ("proj", {"bias": True, "normalization": "RMSNorm"}, {"weight", "bias"}),
    ],
)
def test_parameters_of_every_operator(operator: str, model: dict[str, Any], names: set[str]) -> None:
    point = gpu_point(operator=operator, model=model)
    shape = models.linear_shape(point["model"], operator, 128, 2)
    shapes = transformer_engine.parameter_shapes(point, shape)
    assert set(shapes) == names
    assert shapes["weight"] == shape.weight_shape
    assert shapes.get("bias", (shape.weight_shape[0],)) == (shape.weight_shape[0],)
    assert shapes.get("layer_norm_weight", (256,)) == (256,)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_sm": 33}, "num_sm=33 is more than the 32 that userbuffers take"),
        ({"tp_size": 3}, "userbuffers have no kernels for bulk on tp_size=3; they are for 2, 4 and 8 ranks"),
        (
            {"tp_size": 6, "operator": "fc2", "method": "pipeline"},
            "userbuffers have no kernels for pipeline on tp_size=6",
        ),
        (
            {"tp_size": 3, "phase": "fprop", "method": "ring_exchange", "aggregate": True},
            "aggregate joins the chunks of two neighbours, and tp_size=3 is odd",
        ),
        ({"num_sm": 32}, None),
        ({"tp_size": 3, "phase": "fprop", "method": "ring_exchange", "aggregate": False}, None),
        ({"tp_size": 6, "phase": "fprop", "method": "ring_exchange", "aggregate": True}, None),
    ],
)
def test_what_the_kernels_of_userbuffers_are_made_for(changes: dict[str, Any], reason: str | None) -> None:
    refused = transformer_engine.refusal(gpu_point(**{"workload": {"tokens": 96}, **changes}))
    assert refused is None if reason is None else reason in str(refused)


@pytest.mark.parametrize(("tp_size", "expected"), [(1, False), (2, True), (3, False), (4, True), (6, False), (8, True)])
def test_the_librarys_default_has_bulk_and_pipeline(tp_size: int, expected: bool) -> None:
    assert transformer_engine.has_default(gpu_point(tp_size=tp_size)) is expected
