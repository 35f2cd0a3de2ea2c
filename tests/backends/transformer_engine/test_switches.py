"""What backends that overlap by userbuffers say of themselves without their library: switches, defaults, parameters.

What they refuse is in tests/golden/expected/refusals.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from overlap_sweep.backends import Purpose, installed, transformer_engine
from overlap_sweep.overlap import models, space
from overlap_sweep.overlap.overlap_cfg import MEGATRON_NAMES, SWITCH_DEFAULTS, methods_allowed, operator_switches
from tests.make_point import gpu_point

COLUMN_FPROP, ROW_FPROP = ("qkv_fprop", "fc1_fprop"), ("proj_fprop", "fc2_fprop")
COLUMN_DGRAD, ROW_DGRAD = ("qkv_dgrad", "fc1_dgrad"), ("proj_dgrad", "fc2_dgrad")
# The argument of te.LayerNormLinear (qkv, fc1) or te.Linear (proj, fc2) that has the slot overlapped.
SWITCH = {
    **dict.fromkeys(product(COLUMN_FPROP + ROW_DGRAD, ["ring_exchange"]), "ub_overlap_ag"),
    **dict.fromkeys(product(ROW_FPROP, ["ring_exchange", "pipeline"]), "ub_overlap_rs"),
    **dict.fromkeys(product(COLUMN_DGRAD, ["ring_exchange", "pipeline"]), "ub_overlap_rs_dgrad"),
    **dict.fromkeys(product(COLUMN_DGRAD, ["bulk"]), "ub_bulk_dgrad"),
    **dict.fromkeys(product(("qkv_wgrad", "fc1_wgrad"), ["bulk"]), "ub_bulk_wgrad"),
}
SILENT: tuple[Purpose, ...] = ("none", "floor", "tp1")


def test_no_slot_and_no_method_is_left_out() -> None:
    assert {(slot, method) for slot, methods in space.SLOTS.items() for method in methods} == set(SWITCH)


@pytest.mark.parametrize(("slot", "method"), [pytest.param(*case, id="-".join(case)) for case in SWITCH])
def test_a_slots_switch_goes_on_for_exactly_its_own_slot_as_the_analysis_says(slot: str, method: str) -> None:
    operator, phase = slot.split("_")
    settings = space.settings(gpu_point(operator=operator, phase=phase, method=method))
    assert set(settings) == {slot}
    switches = operator_switches(operator, "point", settings)
    assert on(switches) == {SWITCH[slot, method]}
    named = {MEGATRON_NAMES[name]: is_on for name, is_on in switches.items()}
    allowed = methods_allowed({**dict.fromkeys(SWITCH_DEFAULTS, False), "tp_comm_overlap": True, **named})
    of_operator = {name: methods for name, methods in allowed.items() if name.startswith(operator)}
    assert [name for name, methods in of_operator.items() if methods] == [slot]
    assert method in of_operator[slot]


def on(switches: Mapping[str, bool]) -> set[str]:
    return {name for name, is_on in switches.items() if is_on}


@pytest.mark.parametrize("operator", space.OPERATORS)
def test_the_switches_of_an_operator(operator: str) -> None:
    for method in space.METHODS:
        settings = space.settings(gpu_point(operator=operator, method=method))
        assert on(operator_switches(operator, "point", settings)) == {SWITCH[slot, method] for slot in settings}
        # What is not to overlap has every switch off, and every purpose gives the layer the same arguments.
        for purpose in SILENT:
            switches = operator_switches(operator, purpose, settings)
            assert not on(switches)
            assert switches.keys() == operator_switches(operator, "point", settings).keys() != set()
    default = operator_switches(operator, "default", {})
    assert default == {name: SWITCH_DEFAULTS[MEGATRON_NAMES[name]] for name in default}
    bulk = ["ub_bulk_dgrad", "ub_bulk_wgrad"] if operator in ("qkv", "fc1") else ["ub_overlap_rs"]
    assert on(default) == {"ub_overlap_ag", *bulk}
    # Slots of other operators switch nothing on.
    others = operator_switches(operator, "point", {"other_fprop": {"method": "ring_exchange"}})
    assert others == dict.fromkeys(default, False)


def test_the_cuda_that_it_was_built_for_is_known_by_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, major in (("transformer-engine-cu12", 12), ("transformer-engine-cu13", 13), ("numpy", None)):
        found = {package: "2.20.2"}
        monkeypatch.setattr(installed, "installed_version", found.get)
        assert installed.cuda_major.__wrapped__() == major


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


def test_the_librarys_default_has_bulk_and_pipeline() -> None:
    has_default = {size: transformer_engine.has_default(gpu_point(tp_size=size)) for size in (1, 2, 3, 4, 6, 8)}
    assert has_default == {1: False, 2: True, 3: False, 4: True, 6: False, 8: True}


def test_a_default_that_a_precision_cannot_overlap_is_none() -> None:
    def has_default(precision: str, tokens: int = 2048) -> bool:
        return transformer_engine.has_default(gpu_point(precision=precision, workload={"tokens": tokens}))

    assert {name for name in transformer_engine.PRECISIONS if not has_default(name)} == {"fp8_block", "nvfp4"}
    # Of 64 tokens on a rank, userbuffers make no chunks in MXFP8.
    assert not has_default("mxfp8", tokens=128)


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
    shape = models.linear_shape(point.model, operator, 128, 2)
    shapes = transformer_engine.parameter_shapes(point, shape)
    assert set(shapes) == {"weight", *names}
    assert shapes["weight"] == shape.weight_shape
    assert shapes.get("bias", (shape.weight_shape[0],)) == (shape.weight_shape[0],)
    assert shapes.get("layer_norm_weight", (256,)) == (256,)


@pytest.mark.parametrize(
    ("package", "version", "says"),
    [
        ("transformer_engine", "2.9.0+70f53666.nv25.11", "transformer-engine 2.9.0+70f53666.nv25.11 is too old"),
        ("transformer_engine", "2.20.2", None),
        ("megatron.core", "0.15.0rc8", "megatron-core 0.15.0rc8 is too old; overlap_sweep requires 0.16 or later"),
        ("megatron.core", "0.16.0", None),
        ("megatron.core", "1.0", None),
    ],
)
def test_a_library_that_is_too_old_is_named(
    package: str, version: str, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "missing", lambda _package: None)
    monkeypatch.setattr(installed, "installed_version", lambda _distribution: version)
    reason = installed.unusable(package)
    assert reason is None if says is None else says in (reason or "")
