from collections.abc import Mapping

import pytest

from overlap_sweep.overlap.overlap_cfg import OverlapConfig, methods_allowed
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice
from overlap_sweep.workloads.operator.switches import DEFAULTS, LAYERS_ALIKE, Plan, plan, unmeasured_slots

Times = dict[str, float]
Choices = dict[str, Times]
"""By operator and pass, `fc1 bwd`, the times of its candidates."""


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


def planned(choices: Choices, unmeasured: str = "default", layers: Mapping[str, int] = LAYERS_ALIKE) -> Plan:
    return plan([choice(*name.split(), times) for name, times in choices.items()], unmeasured, layers)


def switched(found: Plan) -> dict[str, bool]:
    return {advice.name: advice.value for advice in found.switches}


def names(found: Plan) -> list[str]:
    return [candidate.name for candidate in found.finals]


RS_DGRAD = {"tp_comm_overlap_rs_dgrad": True}
RS_DGRAD_OF_QKV = {**RS_DGRAD, "tp_comm_overlap_disable_fc1": True}
"""Switched on, it holds for fc1 too, whose dgrad is not set up for it."""
NO_FC1, NO_QKV = ({f"tp_comm_overlap_disable_{operator}": True} for operator in ("fc1", "qkv"))
NO_AG = {"tp_comm_overlap_ag": False}
NO_BULK_DGRAD, NO_BULK_WGRAD = ({f"tp_comm_bulk_{phase}": False} for phase in ("dgrad", "wgrad"))
PAIR = "dgrad bulk + wgrad bulk"
SLOWER, SLOWER_BY_1 = {"none": 8, "ring": 10}, {"none": 8, "ring": 9}
FASTER = {"none": 8, "ring": 5}
SLOWER_BULK = {"none": 8, "bulk+bulk": 9}
NOTHING_PAYS: Choices = {
    **{f"{operator} fwd": SLOWER for operator in ("qkv", "proj", "fc1", "fc2")},
    **{f"{operator} bwd": SLOWER for operator in ("proj", "fc2")},
    **{f"{operator} bwd": SLOWER_BULK for operator in ("qkv", "fc1")},
}


def test_defaults_overlap_as_transformer_engine_does() -> None:
    assert {slot: " or ".join(sorted(methods)) for slot, methods in methods_allowed(DEFAULTS).items()} == {
        **dict.fromkeys(("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"), "ring_exchange"),
        **dict.fromkeys(("proj_fprop", "fc2_fprop"), "pipeline or ring_exchange"),
        **dict.fromkeys(("qkv_dgrad", "fc1_dgrad", "qkv_wgrad", "fc1_wgrad"), "bulk"),
    }


@pytest.mark.parametrize(
    ("choices", "switches", "finals"),
    [
        # Nothing to switch when overlaps win.
        ({"fc1 fwd": {"none": 10, "ring": 8}, "fc1 bwd": {"none": 20, "bulk+bulk": 15}}, {}, ["ring", PAIR]),
        ({"fc1 fwd": SLOWER}, NO_FC1, ["none"]),
        ({"qkv fwd": SLOWER}, NO_QKV, ["none"]),
        ({"fc2 fwd": {"none": 8, "pipeline": 10}}, {"tp_comm_overlap_rs": False}, ["none"]),
        ({"proj bwd": SLOWER}, NO_AG, ["none"]),
        ({"fc1 bwd": {"none": 20, "bulk": 15, "bulk+bulk": 18}}, NO_BULK_WGRAD, ["dgrad bulk"]),
        ({"fc1 bwd": {"none": 20, "-+bulk": 15, "bulk+bulk": 18}}, NO_BULK_DGRAD, ["wgrad bulk"]),
        ({"qkv bwd": SLOWER_BULK}, {**NO_BULK_DGRAD, **NO_BULK_WGRAD}, ["none"]),
        ({"qkv bwd": {"none": 9, "bulk+bulk": 8, "ring": 7}}, RS_DGRAD_OF_QKV, ["ring"]),
        # One operator's own switch leaves the others overlapped.
        ({"fc1 fwd": SLOWER, "qkv fwd": FASTER, "fc2 bwd": FASTER}, NO_FC1, ["none", "ring", "ring"]),
        # rs_dgrad would hold for both, unless qkv, whose forward pass wants no overlap anyway, is disabled.
        (
            {"qkv fwd": SLOWER_BY_1, "qkv bwd": {"none": 20, "bulk+bulk": 15}, "fc1 bwd": {"none": 20, "ring": 15}},
            {**RS_DGRAD, **NO_QKV},
            ["none", PAIR, "ring"],
        ),
        (NOTHING_PAYS, {"tp_comm_overlap": False}, ["none"] * 8),
        # A shared switch goes to the cheaper sum: off loses 1 at fc2, on would lose 4 at proj; and the other way round.
        ({"proj bwd": {"none": 8, "ring": 12}, "fc2 bwd": {"none": 8, "ring": 7}}, NO_AG, ["none", "none"]),
        ({"proj bwd": {"none": 8, "ring": 9}, "fc2 bwd": {"none": 8, "ring": 3}}, {}, ["ring", "ring"]),
        # A dgrad that scatters excludes the other operator's bulk.
        (
            {
                "qkv fwd": {"none": 18, "ring": 9},
                "qkv bwd": {"none": 20, "bulk+bulk": 15, "ring": 16},
                "fc1 bwd": {"none": 20, "ring": 12, "bulk+bulk": 19},
            },
            RS_DGRAD,
            ["ring", "ring", "ring"],
        ),
    ],
)
def test_the_switch_that_a_choice_needs(choices: Choices, switches: dict[str, bool], finals: list[str]) -> None:
    found = planned(choices)
    assert switched(found) == switches
    assert names(found) == finals
    assert len(found.overruled) == sum(
        one.chosen.name != final for one, final in zip(found.choices, finals, strict=True)
    )


def test_of_a_model_without_dense_mlps_only_the_attention_has_switches() -> None:
    attention = {"qkv": 8, "proj": 8}
    # fc1 has no reduce-scatter that must agree, and fc2 no slot that the switch leaves unmeasured.
    found = planned({"qkv bwd": {"none": 9, "bulk+bulk": 8, "ring": 7}}, "off", attention)
    assert (switched(found)["tp_comm_overlap_rs_dgrad"], names(found)) == (True, ["ring"])
    assert not any("fc1" in name for name in switched(found))
    (advice,) = planned({"proj fwd": SLOWER}, "default", attention).switches
    assert advice.reason == "no overlap for proj_fprop"
    assert {one.slot for one in unmeasured_slots(found.config, {"qkv_dgrad"}, attention)} == {
        *("qkv_fprop", "qkv_wgrad", "proj_fprop", "proj_dgrad"),
    }


def test_what_a_switch_loses_counts_in_every_layer_that_has_the_operator() -> None:
    choices = {"proj bwd": {"none": 8, "ring": 7}, "fc2 bwd": {"none": 8, "ring": 12}}
    assert names(planned(choices)) == ["none", "none"]
    # On wins 1 in each of 8 layers, and loses 4 in the dense one.
    layers = {"qkv": 8, "proj": 8, "fc1": 1, "fc2": 1}
    assert names(planned(choices, layers=layers)) == ["ring", "ring"]


def test_the_plan_s_configuration_is_what_runs() -> None:
    found = planned({"fc2 bwd": SLOWER, "fc1 bwd": {"none": 20, "ring": 15}, "fc1 fwd": SLOWER})
    assert found.config.slots == {"fc1_dgrad": {"method": "ring_exchange"}}
    assert found.config.switches == {**DEFAULTS, **switched(found)}
    assert found.config.switches["tp_comm_overlap_rs_dgrad"]
    assert not found.config.switches["tp_comm_overlap_ag"]
    assert planned({"fc1 fwd": SLOWER}).config == OverlapConfig({}, {**DEFAULTS, **NO_FC1})


@pytest.mark.parametrize(
    ("choices", "left_on"),
    [
        # Where nothing that was measured wins nothing is left on, however little was measured.
        ({"fc1 fwd": SLOWER}, set()),
        ({"fc2 fwd": {"none": 8, "pipeline": 10}, "proj bwd": SLOWER}, set()),
        ({"qkv bwd": SLOWER_BULK}, set()),
        (NOTHING_PAYS, set()),
        # A winner keeps its switch, and with it whatever no switch of its own turns off.
        ({"fc1 fwd": FASTER}, {"proj_dgrad", "fc2_dgrad"}),
        ({"fc1 fwd": FASTER, "proj bwd": FASTER}, {"fc2_dgrad"}),
        ({"fc2 fwd": FASTER}, {"proj_fprop"}),
        ({"fc1 bwd": {"none": 20, "bulk": 15}}, {"qkv_dgrad"}),
        # Disabled for qkv, the switch leaves its dgrad to tp_comm_bulk_dgrad, which is off.
        ({"fc1 bwd": {"none": 20, "ring": 15}}, set()),
    ],
)
def test_what_was_not_measured_is_off_unless_a_winner_needs_its_switch(choices: Choices, left_on: set[str]) -> None:
    found = planned(choices, "off")
    assert found.overruled == []
    assert found.config.switches["tp_comm_overlap"] == bool(found.config.slots)
    tried = {slot for one in found.choices for slot in one.tried_slots}
    unmeasured = unmeasured_slots(found.config, tried)
    assert {one.slot for one in unmeasured if one.runs != "off"} == left_on
    assert {one.runs for one in unmeasured if one.slot in left_on} <= {"default"}
    assert {one.slot for one in unmeasured} | tried == set(methods_allowed(DEFAULTS))


def test_what_was_not_measured_keeps_its_default_where_that_is_wanted() -> None:
    found = planned({"fc1 fwd": SLOWER}, "default")
    assert found.config == OverlapConfig({}, {**DEFAULTS, **NO_FC1})
    runs = {one.slot: one.runs for one in unmeasured_slots(found.config, {"fc1_fprop"})}
    assert len(runs) == 9
    assert set(runs.values()) == {"default"}
