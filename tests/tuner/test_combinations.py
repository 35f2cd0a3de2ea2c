"""What is tried together on the whole layer."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_sweep.analysis.choice import Candidate, PassChoice
from overlap_sweep.analysis.estimate import Estimate
from overlap_sweep.analysis.switches import plan
from overlap_sweep.tuner.combinations import BEST, combinations

Setting = dict[str, Any]
RING, RING4 = {"method": "ring_exchange", "num_sm": 1}, {"method": "ring_exchange", "num_sm": 4}
PIPELINE, PIPELINE8 = {"method": "pipeline", "num_sm": 4}, {"method": "pipeline", "num_sm": 8}


def choice(
    operator: str, phase: str, times_us: list[tuple[Setting | None, float]], predicted: int | None = None
) -> PassChoice:
    """The first candidate is chosen; None is no overlap. That at index `predicted` was not measured."""
    made = [
        Candidate({f"{operator}_{phase}": setting} if setting else {}, Estimate(us, 0.1, 5), (), None, i != predicted)
        for i, (setting, us) in enumerate(times_us)
    ]
    pass_name = "fwd" if phase == "fprop" else "bwd"
    measured: dict[str, Any] = {"floor_us": 10.0, "tp1_us": None, "default": None}
    chosen: dict[str, Any] = {"attempted": frozenset(), "chosen": made[0], "reason": "fastest"}
    return PassChoice(4, operator, pass_name, tuple(made), **chosen, **measured)


def fc2(*more: tuple[Setting | None, float]) -> PassChoice:
    return choice("fc2", "fprop", [(RING, 80.0), *more, (None, 100.0)])


def labels(choices: list[PassChoice], limit: int = 9, within: float = 0.03) -> list[str]:
    return list(combinations(choices, limit, within))


def test_the_first_is_the_plan_of_the_choices() -> None:
    choices = [fc2((PIPELINE, 80.5)), choice("proj", "fprop", [(PIPELINE, 50.0), (None, 60.0)])]
    found = combinations(choices, 4, 0.03)
    assert next(iter(found)) == BEST
    assert found[BEST] == plan(choices).config
    assert found[BEST].slots == {"fc2_fprop": RING, "proj_fprop": PIPELINE}


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 9])
def test_another_method_comes_before_other_knobs_and_the_cheapest_first_up_to_a_limit(limit: int) -> None:
    proj = choice("proj", "fprop", [(PIPELINE, 50.0), (RING, 50.5), (PIPELINE8, 50.3), (None, 60.0)])
    methods = ["proj fwd by ring_sm1", "fc2 fwd by pipeline_sm4"]
    knobs = ["fc2 fwd by ring_sm4", "proj fwd by pipeline_sm8"]
    assert labels([fc2((RING4, 80.1), (PIPELINE, 81.5)), proj], limit) == [BEST, *methods, *knobs][:limit]


def test_of_each_kind_there_is_the_best_one_only() -> None:
    found = labels([fc2((PIPELINE, 80.4), (PIPELINE8, 80.2), (RING4, 80.3))])
    assert found == [BEST, "fc2 fwd by pipeline_sm8", "fc2 fwd by ring_sm4"]


@pytest.mark.parametrize(("within", "tried"), [(0.0, 1), (0.004, 1), (0.006, 2), (0.02, 3)])
def test_what_costs_too_much_alone_is_not_tried(within: float, tried: int) -> None:
    assert len(labels([fc2((PIPELINE, 80.4), (RING4, 81.2))], within=within)) == tried


def test_no_overlap_may_be_the_alternative() -> None:
    found = combinations([choice("fc2", "fprop", [(RING, 99.0), (None, 100.0)])], 4, 0.03)
    assert list(found) == [BEST, "fc2 fwd by none"]
    assert not found["fc2 fwd by none"].slots


def test_a_prediction_is_not_tried() -> None:
    assert labels([choice("fc2", "fprop", [(RING, 80.0), (PIPELINE, 80.1), (None, 100.0)], predicted=1)]) == [BEST]


def test_what_the_switches_overrule_is_not_tried_twice() -> None:
    """One switch holds for both, so that leaving out either overlap alone comes out as leaving out none."""
    choices = [
        choice("fc2", "fprop", [(RING, 80.0), (None, 80.5)]),
        choice("proj", "fprop", [(RING, 50.0), (None, 50.5)]),
    ]
    assert labels(choices) == [BEST]


def test_every_configuration_is_what_the_switches_allow() -> None:
    scatter = {"method": "ring_exchange", "num_sm": 2}
    bulk = choice("fc1", "dgrad", [({"method": "bulk", "num_sm": 4}, 100.0), (scatter, 101.0), (None, 130.0)])
    for config in combinations([bulk, fc2((PIPELINE, 80.4))], 9, 0.05).values():
        rings = config.slots["fc1_dgrad"]["method"] == "ring_exchange"
        assert config.switches["tp_comm_overlap_rs_dgrad"] == rings
