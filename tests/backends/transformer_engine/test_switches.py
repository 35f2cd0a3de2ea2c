from __future__ import annotations

from collections.abc import Mapping

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
SILENT: tuple[Purpose, ...] = ("none", "floor", "tp1")
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
    assert default.keys() == operator_switches(operator, "point", {}).keys()


def test_slots_of_other_operators_switch_nothing_on() -> None:
    assert not on(operator_switches("qkv", "point", {"fc1_fprop": {"method": "ring_exchange"}}))


def test_the_defaults_have_a_name_in_megatron_core_each() -> None:
    assert {name: SWITCH_DEFAULTS[theirs] for name, theirs in MEGATRON_NAMES.items()} == DEFAULTS
