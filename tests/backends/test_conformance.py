"""What every backend offers, without its library, and which one `auto` is; see tests/golden for what is refused."""

import subprocess
import sys
from collections.abc import Callable, Collection
from typing import Any

import pytest

from overlap_sweep import backends, workloads
from overlap_sweep.backends import installed, symm_mem
from overlap_sweep.overlap import space
from tests.make_point import gpu_point, kernel_point, operator_point

FUNCTIONS = ("refusal", "default_knobs", "knobs", "has_default", "parameter_shapes", "prepare", "build", "close")


@pytest.mark.parametrize(
    ("load", "names", "functions"),
    [
        (backends.load, backends.BACKENDS, FUNCTIONS),
        (backends.load, backends.LAYERS, ("layer_refusal", "build_layer", "attention")),
        (backends.load_kernels, backends.KERNELS, backends._KERNEL_FUNCTIONS),
    ],
)
def test_every_module_loads_without_its_library_and_has_all_that_is_asked_of_it(
    load: Callable[[str], Any], names: Collection[str], functions: Collection[str]
) -> None:
    for module in map(load, names):
        assert all(callable(getattr(module, function)) for function in functions)
        assert "build_layer" not in functions or isinstance(module.LAYER_HAS_DEFAULT, bool)


def test_the_launchers_process_needs_no_torch() -> None:
    loads = (
        "from overlap_sweep import backends, workloads",
        "[backends.load(name) for name in backends.BACKENDS]",
        "[backends.load_kernels(name) for name in backends.KERNELS]",
        "[workloads.load(name) for name in workloads.names()]",
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
def test_a_point_is_left_as_it_is_and_refused_alike_whenever_it_is_asked(name: str) -> None:
    module, point = backends.load(name), gpu_point(backend=name)
    before = repr(point)
    asked = point, point.operator, space.settings(point)
    assert module.refusal(*asked) == module.refusal(*asked)
    assert repr(point) == before


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
    monkeypatch.setattr(installed, "missing", lambda: missing)
    assert backends.chosen(operator_point(backend="auto", device=device)) == chosen
    asked = {"backend": "auto", "precision": "bf16", "runtime": {"device": device}}
    for name, point in (("operator", operator_point(**asked)), ("kernel", kernel_point(**asked))):
        assert workloads.load(name).complete(point)["backend"] == chosen


def test_async_tp_is_every_gather_and_scatter_that_a_gemm_can_be_fused_with() -> None:
    assert set(symm_mem.ASYNC_TP) == {
        *("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"),
        *("proj_fprop", "fc2_fprop", "qkv_dgrad", "fc1_dgrad"),
    }
    assert symm_mem.has_default(gpu_point(backend="symm_mem"))
    assert not symm_mem.has_default(gpu_point(backend="symm_mem", tp_size=1, method="none"))
