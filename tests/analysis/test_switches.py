from __future__ import annotations

import pytest

from overlap_sweep.analysis.choice import Candidate, PassChoice
from overlap_sweep.analysis.estimate import Estimate
from overlap_sweep.analysis.switches import DEFAULTS, Plan, methods_allowed, plan
from overlap_sweep.overlap_cfg import OverlapConfig

Times = dict[str, float]


def choice(operator: str, pass_name: str, candidates: Times) -> PassChoice:
    """Candidates by a word for their setting: `none`, `ring`, or for a backward pass `bulk+bulk`, `-+bulk`, `ring`."""
    made = []
    for word, time_us in candidates.items():
        phases = ("fprop",) if pass_name == "fwd" else ("dgrad", "wgrad")
        methods = [{"ring": "ring_exchange"}.get(part, part) for part in word.split("+")]
        settings = {
            f"{operator}_{phase}": {"method": method}
            for phase, method in zip(phases, methods, strict=False)
            if method not in ("none", "-")
        }
        made.append(Candidate(settings, Estimate(time_us, 0.0, 5), (), None))
    best = min(made, key=lambda candidate: candidate.time_us)
    return PassChoice(2, operator, pass_name, tuple(made), best, "fastest", 0.0, None, None)


def switched(found: Plan) -> dict[str, bool]:
    return {advice.name: advice.value for advice in found.switches}


def final(found: Plan) -> list[str]:
    return [candidate.name for candidate in found.finals]


RS_DGRAD_OF_QKV = {"tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_fc1": True}
"""Switched on, it holds for fc1 too, whose dgrad is not set up for it."""


def test_defaults_overlap_as_transformer_engine_does() -> None:
    assert {slot: " or ".join(sorted(methods)) for slot, methods in methods_allowed(DEFAULTS).items()} == {
        **dict.fromkeys(("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"), "ring_exchange"),
        **dict.fromkeys(("proj_fprop", "fc2_fprop"), "pipeline or ring_exchange"),
        **dict.fromkeys(("qkv_dgrad", "fc1_dgrad", "qkv_wgrad", "fc1_wgrad"), "bulk"),
    }


def test_nothing_to_switch_when_overlaps_win() -> None:
    found = plan([choice("fc1", "fwd", {"none": 10, "ring": 8}), choice("fc1", "bwd", {"none": 20, "bulk+bulk": 15})])
    assert found.switches == []
    assert found.overruled == []


@pytest.mark.parametrize(
    ("operator", "pass_name", "candidates", "switches"),
    [
        ("fc1", "fwd", {"none": 8, "ring": 10}, {"tp_comm_overlap_disable_fc1": True}),
        ("qkv", "fwd", {"none": 8, "ring": 10}, {"tp_comm_overlap_disable_qkv": True}),
        ("fc2", "fwd", {"none": 8, "pipeline": 10}, {"tp_comm_overlap_rs": False}),
        ("proj", "bwd", {"none": 8, "ring": 10}, {"tp_comm_overlap_ag": False}),
        ("fc1", "bwd", {"none": 20, "bulk": 15, "bulk+bulk": 18}, {"tp_comm_bulk_wgrad": False}),
        ("fc1", "bwd", {"none": 20, "-+bulk": 15, "bulk+bulk": 18}, {"tp_comm_bulk_dgrad": False}),
        ("qkv", "bwd", {"none": 8, "bulk+bulk": 9}, {"tp_comm_bulk_dgrad": False, "tp_comm_bulk_wgrad": False}),
        ("qkv", "bwd", {"none": 9, "bulk+bulk": 8, "ring": 7}, RS_DGRAD_OF_QKV),
    ],
)
def test_the_switch_that_a_choice_needs(
    operator: str, pass_name: str, candidates: Times, switches: dict[str, bool]
) -> None:
    found = plan([choice(operator, pass_name, candidates)])
    assert switched(found) == switches
    assert found.overruled == []


def test_the_reason_names_slots_that_are_touched_unmeasured() -> None:
    (advice,) = plan([choice("fc2", "fwd", {"none": 8, "ring": 10})]).switches
    assert advice.reason == "no overlap for fc2_fprop; proj_fprop not measured, but changed by it too"
    assert advice.flag == "--disable-tp-comm-overlap-rs"


def test_one_operators_own_switch_leaves_the_others_overlapped() -> None:
    found = plan(
        [
            choice("fc1", "fwd", {"none": 8, "ring": 10}),
            choice("qkv", "fwd", {"none": 8, "ring": 5}),
            choice("fc2", "bwd", {"none": 8, "ring": 5}),
        ]
    )
    assert switched(found) == {"tp_comm_overlap_disable_fc1": True}
    assert final(found) == ["none", "ring", "ring"]


def test_a_shared_switch_goes_to_the_cheaper_sum_off() -> None:
    # Off loses 1 at fc2, on would lose 4 at proj.
    found = plan([choice("proj", "bwd", {"none": 8, "ring": 12}), choice("fc2", "bwd", {"none": 8, "ring": 7})])
    assert switched(found) == {"tp_comm_overlap_ag": False}
    assert final(found) == ["none", "none"]
    assert found.overruled == [
        "TP=2 fc2 bwd: none instead of ring (+1.0 us): the switches hold for several slots at once, "
        "and a combination that allows it costs 3.0 us more in sum."
    ]
    assert found.choices[1].chosen.name == "ring"


def test_a_shared_switch_goes_to_the_cheaper_sum_on() -> None:
    found = plan([choice("proj", "bwd", {"none": 8, "ring": 9}), choice("fc2", "bwd", {"none": 8, "ring": 3})])
    assert found.switches == []
    assert final(found) == ["ring", "ring"]
    assert found.overruled[0].startswith("TP=2 proj bwd: ring instead of none (+1.0 us)")


def test_scattering_dgrad_and_bulk_go_together_by_an_operators_own_switch() -> None:
    # rs_dgrad would hold for both, unless qkv, whose forward pass wants no overlap anyway, is disabled.
    found = plan(
        [
            choice("qkv", "fwd", {"none": 8, "ring": 9}),
            choice("qkv", "bwd", {"none": 20, "bulk+bulk": 15}),
            choice("fc1", "bwd", {"none": 20, "ring": 15}),
        ]
    )
    assert switched(found) == {"tp_comm_overlap_rs_dgrad": True, "tp_comm_overlap_disable_qkv": True}
    assert found.overruled == []


def test_scattering_dgrad_excludes_the_other_operators_bulk() -> None:
    found = plan(
        [
            choice("qkv", "fwd", {"none": 18, "ring": 9}),
            choice("qkv", "bwd", {"none": 20, "bulk+bulk": 15, "ring": 16}),
            choice("fc1", "bwd", {"none": 20, "ring": 12, "bulk+bulk": 19}),
        ]
    )
    assert switched(found) == {"tp_comm_overlap_rs_dgrad": True}
    assert final(found) == ["ring", "ring", "ring"]


def test_everything_off_when_nothing_pays() -> None:
    slower = {"none": 8, "ring": 10}
    found = plan(
        [
            choice("qkv", "fwd", slower),
            choice("qkv", "bwd", {"none": 8, "bulk+bulk": 9}),
            choice("proj", "fwd", slower),
            choice("proj", "bwd", slower),
            choice("fc1", "fwd", slower),
            choice("fc1", "bwd", {"none": 8, "bulk+bulk": 9}),
            choice("fc2", "fwd", slower),
            choice("fc2", "bwd", slower),
        ]
    )
    assert switched(found) == {"tp_comm_overlap": False}


def test_the_plan_s_configuration_is_what_runs() -> None:
    found = plan(
        [
            choice("fc2", "bwd", {"none": 8, "ring": 10}),
            choice("fc1", "bwd", {"none": 20, "ring": 15}),
            choice("fc1", "fwd", {"none": 8, "ring": 10}),
        ]
    )
    assert found.config.slots == {"fc1_dgrad": {"method": "ring_exchange"}}
    assert found.config.switches == {**DEFAULTS, **switched(found)}
    assert found.config.switches["tp_comm_overlap_rs_dgrad"]
    assert not found.config.switches["tp_comm_overlap_ag"]


def test_a_plan_without_any_overlap() -> None:
    found = plan([choice("fc1", "fwd", {"none": 8, "ring": 10})])
    assert found.config == OverlapConfig({}, {**DEFAULTS, "tp_comm_overlap_disable_fc1": True})
