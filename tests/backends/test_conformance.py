"""What every backend offers, without its library, and which one `auto` is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from overlap_sweep import backends, space, workloads
from overlap_sweep.backends import symm_mem, transformer_engine
from overlap_sweep.errors import UserError
from tests.points import gpu_point, kernel_point, operator_point

FUNCTIONS = ("refusal", "default_knobs", "knobs", "has_default", "parameter_shapes", "prepare", "build", "close")
METHODS_OF = {"symm_mem": symm_mem.METHODS}
"""Of the backends that do not have them all."""


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_every_backend_loads_without_its_library_and_has_all_functions(name: str) -> None:
    module = backends.load(name)
    assert all(callable(getattr(module, function)) for function in FUNCTIONS)


@pytest.mark.parametrize("name", backends.LAYERS)
def test_layers_load_without_their_library_and_have_all_that_is_asked_of_them(name: str) -> None:
    module = backends.load_layers(name)
    assert isinstance(module.HAS_DEFAULT, bool)
    assert all(callable(getattr(module, function)) for function in ("refusal", "build", "attention"))


@pytest.mark.parametrize("name", backends.KERNELS)
def test_kernels_load_without_their_library_and_have_all_functions(name: str) -> None:
    module = backends.load_kernels(name)
    assert all(callable(getattr(module, function)) for function in backends._KERNEL_FUNCTIONS)


def test_the_launchers_process_needs_no_torch() -> None:
    loads = (
        "from overlap_sweep import backends, workloads",
        "[backends.load(name) for name in backends.BACKENDS]",
        "[backends.load_layers(name) for name in backends.LAYERS]",
        "[backends.load_kernels(name) for name in backends.KERNELS]",
        "[workloads.load(name) for name in workloads.WORKLOADS]",
    )
    code = f"import sys; {'; '.join(loads)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize("name", backends.BACKENDS)
@pytest.mark.parametrize("method", space.METHODS)
def test_the_default_knobs_are_knobs_of_the_method_that_it_has(name: str, method: str) -> None:
    known = {
        knob
        for operator in space.OPERATORS
        for phase in space.PHASES
        if method in space.methods_of(operator, phase)
        for knob in space.knobs_of(operator, phase, method)
    }
    module = backends.load(name)
    given = set(module.default_knobs(method))
    assert given <= known & set(module.knobs(gpu_point(backend=name)))
    if name in ("transformer_engine", "megatron"):
        # What the library would not take from the slot's own default, which may be that of another method.
        assert {"cga_size", "set_sm_margin"} & known <= given


@pytest.mark.parametrize("name", backends.BACKENDS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_refused_does_not_depend_on_how_often_it_is_asked(name: str, device: str) -> None:
    module, point = backends.load(name), gpu_point(backend=name, runtime={"device": device}, precision="bf16")
    before = repr(point)
    assert module.refusal(point) == module.refusal(point)
    assert repr(point) == before
    if device == "cpu":
        assert (module.refusal(point) is None) == (name == "torch")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("backend", ["torch", "symm_mem"])
def test_what_can_run_is_not_refused(backend: str, precision: str) -> None:
    for tp_size in (2, 4, 8):
        for method in ("none", *METHODS_OF.get(backend, space.METHODS)):
            operator = "fc2" if method == "pipeline" else "fc1"
            changes = {"backend": backend, "operator": operator, "method": method, "precision": precision, "num_sm": 4}
            point = gpu_point(tp_size=tp_size, **changes)
            assert workloads.load("operator").refusal(workloads.load("operator").complete(point)) is None


@pytest.mark.parametrize(
    ("device", "missing", "chosen"),
    [
        ("cpu", None, "torch"),
        ("cpu", "not installed", "torch"),
        ("cuda", "not installed", "torch"),
        ("cuda", None, "transformer_engine"),
    ],
)
def test_auto_is_transformer_engine_where_it_can_run_in_every_workload(
    monkeypatch: pytest.MonkeyPatch, device: str, missing: str | None, chosen: str
) -> None:
    monkeypatch.setattr(transformer_engine, "missing", lambda: missing)
    assert backends.choose(device) == chosen
    asked = {"backend": "auto", "precision": "bf16", "runtime": {"device": device}}
    for name, point in (("operator", operator_point(**asked)), ("kernel", kernel_point(**asked))):
        assert workloads.load(name).complete(point)["backend"] == chosen


def test_an_unknown_backend_is_told_the_known_ones() -> None:
    with pytest.raises(UserError, match="choose one of auto, torch, transformer_engine, megatron"):
        backends.load("magic")


def test_async_tp_is_every_gather_and_scatter_that_a_gemm_can_be_fused_with() -> None:
    assert set(symm_mem.ASYNC_TP) == {
        *("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"),
        *("proj_fprop", "fc2_fprop", "qkv_dgrad", "fc1_dgrad"),
    }
    assert symm_mem.has_default(gpu_point(backend="symm_mem"))
    assert not symm_mem.has_default(gpu_point(backend="symm_mem", tp_size=1, method="none"))
