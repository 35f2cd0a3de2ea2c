from __future__ import annotations

import pytest

from overlap_sweep import space
from overlap_sweep.analysis.switches import methods_allowed
from overlap_sweep.backends import Purpose
from overlap_sweep.backends.transformer_engine.switches import DEFAULTS, MEGATRON_NAMES, operator_switches
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS
from tests.points import gpu_point

# The argument of te.LayerNormLinear (qkv, fc1) or te.Linear (proj, fc2) that has the slot overlapped.
SWITCH = {
    ("qkv_fprop", "ring_exchange"): "ub_overlap_ag",
    ("qkv_dgrad", "bulk"): "ub_bulk_dgrad",
    ("qkv_dgrad", "ring_exchange"): "ub_overlap_rs_dgrad",
    ("qkv_dgrad", "pipeline"): "ub_overlap_rs_dgrad",
    ("qkv_wgrad", "bulk"): "ub_bulk_wgrad",
    ("proj_fprop", "ring_exchange"): "ub_overlap_rs",
    ("proj_fprop", "pipeline"): "ub_overlap_rs",
    ("proj_dgrad", "ring_exchange"): "ub_overlap_ag",
    ("fc1_fprop", "ring_exchange"): "ub_overlap_ag",
    ("fc1_dgrad", "bulk"): "ub_bulk_dgrad",
    ("fc1_dgrad", "ring_exchange"): "ub_overlap_rs_dgrad",
    ("fc1_dgrad", "pipeline"): "ub_overlap_rs_dgrad",
    ("fc1_wgrad", "bulk"): "ub_bulk_wgrad",
    ("fc2_fprop", "ring_exchange"): "ub_overlap_rs",
    ("fc2_fprop", "pipeline"): "ub_overlap_rs",
    ("fc2_dgrad", "ring_exchange"): "ub_overlap_ag",
}
CASES = [pytest.param(*case, id="-".join(case)) for case in SWITCH]


def test_no_slot_and_no_method_is_left_out() -> None:
    pairs = {
        (space.slot(operator, phase), method)
        for operator in space.OPERATORS
        for phase in space.PHASES
        for method in space.methods_of(operator, phase)
    }
    assert pairs == set(SWITCH)


@pytest.mark.parametrize(("slot", "method"), CASES)
def test_a_slots_switch_goes_on_for_exactly_its_own_slot(slot: str, method: str) -> None:
    operator, phase = slot.split("_")
    settings = space.settings(gpu_point(operator=operator, phase=phase, method=method))
    assert set(settings) == {slot}
    switches = operator_switches(operator, "point", settings)
    assert {name for name, on in switches.items() if on} == {SWITCH[slot, method]}


@pytest.mark.parametrize(("slot", "method"), CASES)
def test_what_is_switched_on_is_what_the_analysis_says_of_the_switches(slot: str, method: str) -> None:
    operator, _ = slot.split("_")
    switches = operator_switches(operator, "point", {slot: {"method": method}})
    named = {MEGATRON_NAMES[name]: on for name, on in switches.items()}
    off = {**dict.fromkeys(SWITCH_DEFAULTS, False), "tp_comm_overlap": True}
    allowed = methods_allowed({**off, **named})
    of_operator = {name: methods for name, methods in allowed.items() if name.startswith(operator)}
    assert [name for name, methods in of_operator.items() if methods] == [slot]
    assert method in of_operator[slot]


@pytest.mark.parametrize("operator", space.OPERATORS)
@pytest.mark.parametrize("method", space.METHODS)
def test_a_method_everywhere_switches_all_its_slots_on(operator: str, method: str) -> None:
    settings = space.settings(gpu_point(operator=operator, method=method))
    switches = operator_switches(operator, "point", settings)
    expected = {SWITCH[slot, method] for slot in settings}
    assert {name for name, on in switches.items() if on} == expected


def test_slots_of_other_operators_switch_nothing_on() -> None:
    switches = operator_switches("qkv", "point", {"fc1_fprop": {"method": "ring_exchange"}})
    assert not any(switches.values())


@pytest.mark.parametrize("operator", space.OPERATORS)
def test_the_default_is_megatron_cores(operator: str) -> None:
    switches = operator_switches(operator, "default", {})
    assert switches == {name: SWITCH_DEFAULTS[MEGATRON_NAMES[name]] for name in switches}
    expected = {
        "ub_overlap_ag",
        *(["ub_bulk_dgrad", "ub_bulk_wgrad"] if operator in ("qkv", "fc1") else ["ub_overlap_rs"]),
    }
    assert {name for name, on in switches.items() if on} == expected


def test_the_defaults_have_a_name_in_megatron_core_each() -> None:
    assert {name: SWITCH_DEFAULTS[theirs] for name, theirs in MEGATRON_NAMES.items()} == DEFAULTS


@pytest.mark.parametrize("operator", space.OPERATORS)
@pytest.mark.parametrize("purpose", ["none", "floor", "tp1"])
def test_what_is_not_to_overlap_has_every_switch_off(operator: str, purpose: Purpose) -> None:
    settings = space.settings(gpu_point(operator=operator, method="ring_exchange"))
    switches = operator_switches(operator, purpose, settings)
    assert switches
    assert not any(switches.values())


@pytest.mark.parametrize("operator", space.OPERATORS)
def test_every_purpose_gives_the_layer_the_same_arguments(operator: str) -> None:
    purposes: tuple[Purpose, ...] = ("point", "default", "none", "floor", "tp1")
    assert len({tuple(sorted(operator_switches(operator, purpose, {}))) for purpose in purposes}) == 1
