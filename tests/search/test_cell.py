"""What a search sees of its candidates: arms, ladders, flips, groups."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_sweep.search.cell import NONE, Candidate, distance
from tests.search.surfaces import cell, method_of, num_sm, one_slot, pair, pairs, settings

BULK = settings("bulk", num_sm=(1, 2, 4), set_sm_margin=(False, True))
PIPELINE = settings("pipeline", num_sm=(2, 4), num_splits=(2, 4))
ONE, TWO = settings("bulk", num_sm=(1, 2))
PAIRS = pairs([ONE, TWO])


def only(candidates: list[Candidate], **knobs: Any) -> Candidate:
    """Of one slot: the one with these knobs."""
    (found,) = [c for c in candidates if knobs.items() <= next(iter(c.settings.values())).items()]
    return found


def test_a_candidate_is_what_its_slots_are_given_in_whatever_order_it_was_said() -> None:
    said = Candidate.of({"fc1_wgrad": {"num_sm": 2, "method": "bulk"}, "fc1_dgrad": {"method": "bulk", "num_sm": 4}})
    assert said == pair({"method": "bulk", "num_sm": 4}, {"method": "bulk", "num_sm": 2})
    assert hash(said) == hash(pair({"num_sm": 4, "method": "bulk"}, {"method": "bulk", "num_sm": 2}))
    assert said.family == (("fc1_dgrad", "bulk"), ("fc1_wgrad", "bulk"))
    assert str(said) == "dgrad bulk_sm4 + wgrad bulk_sm2"
    assert (str(NONE), Candidate.of({})) == ("none", NONE)


def test_an_arm_is_everything_but_num_sm() -> None:
    candidates = one_slot(BULK, "fc1_dgrad")
    found = cell(candidates)
    assert [[num_sm(c) for c in arm] for arm in found.arms.values()] == [[1, 2, 4], [1, 2, 4]]
    assert found.arm(candidates[0]) == found.arm(only(candidates, num_sm=4, set_sm_margin=False))
    assert found.arm(candidates[0]) != found.arm(only(candidates, num_sm=1, set_sm_margin=True))


def test_a_slot_that_is_left_out_makes_another_arm() -> None:
    found = cell(PAIRS)
    assert len({found.arm(c) for c in (pair(ONE, ONE), pair(ONE, None), pair(None, ONE))}) == 3
    assert sorted(map(len, found.arms.values())) == [2, 2, 4]


@pytest.mark.parametrize("slot", ["fc1_dgrad", "fc1_wgrad"])
def test_a_ladder_goes_along_one_slot_and_keeps_the_other(slot: str) -> None:
    other = {"fc1_dgrad": "fc1_wgrad", "fc1_wgrad": "fc1_dgrad"}[slot]
    ladder = cell(reversed(PAIRS)).ladder(pair(TWO, TWO), slot)
    assert [num_sm(c, slot) for c in ladder] == [1, 2]
    assert {num_sm(c, other) for c in ladder} == {2}


def test_cga_size_that_follows_num_sm_is_no_knob() -> None:
    following = [{"method": "bulk", "num_sm": n, "cga_size": 2 - n % 2} for n in (1, 2, 3, 4)]
    found = cell(one_slot(following, "fc1_dgrad"))
    assert len(found.arms) == 1
    assert [num_sm(c) for c in found.ladder(found.candidates[2], "fc1_dgrad")] == [1, 2, 3, 4]
    led_to = [c for by in found.flips(found.candidates[0]).values() for others in by.values() for c in others]
    assert {found.arm(c) for c in led_to} <= set(found.arms)


def test_cga_size_of_its_own_is_a_knob_like_others() -> None:
    found = cell(one_slot(settings("bulk", num_sm=(2, 4), cga_size=(1, 2)), "fc1_dgrad"))
    assert len(found.arms) == 2
    flips = found.flips(found.candidates[0])
    assert set(flips) == {("fc1_dgrad", "cga_size")}
    assert [num_sm(c) for c in flips["fc1_dgrad", "cga_size"][2]] == [2, 4]


def test_cga_size_follows_in_all_slots_or_in_none() -> None:
    """A single num_sm with two sizes, and they cannot be told apart by num_sm anywhere."""
    following = [{"method": "bulk", "num_sm": n, "cga_size": 2 - n % 2} for n in (1, 2)]
    found = cell(one_slot([*following, {"method": "bulk", "num_sm": 2, "cga_size": 1}], "fc1_dgrad"))
    assert len(found.arms) == 2


def test_flips_change_one_knob_and_leave_num_sm_open() -> None:
    candidates = one_slot(PIPELINE, "fc2_fprop")
    flips = cell(candidates).flips(only(candidates, num_sm=4, num_splits=2))
    assert set(flips) == {("fc2_fprop", "num_splits")}
    assert flips["fc2_fprop", "num_splits"] == {
        4: [only(candidates, num_sm=2, num_splits=4), only(candidates, num_sm=4, num_splits=4)]
    }


def test_one_of_two_slots_may_be_flipped_to_none_where_the_rest_is_a_candidate() -> None:
    without_dgrad = {("fc1_dgrad", "method"): {"none": [pair(None, ONE)]}}
    without_wgrad = {("fc1_wgrad", "method"): {"none": [pair(ONE, None)]}}
    found = cell(PAIRS)
    assert found.flips(pair(ONE, ONE)) == {**without_dgrad, **without_wgrad}
    # The last slot is not dropped: `none` is measured beside every candidate.
    assert found.flips(pair(ONE, None)) == {}
    assert cell([pair(ONE, ONE), pair(None, ONE)]).flips(pair(ONE, ONE)) == without_dgrad


def test_groups_are_the_methods() -> None:
    """From every candidate of a group the others can be reached; from one method to another nothing leads."""
    ring = settings("ring_exchange", num_sm=(1, 2), use_ce=(False,))
    groups = cell(one_slot([*PIPELINE, *ring], "fc2_fprop")).groups
    assert [{method_of(c) for c in group} for group in groups] == [{"pipeline"}, {"ring_exchange"}]
    assert [len(group) for group in groups] == [4, 2]


def test_two_slots_and_either_of_them_are_groups_of_their_own() -> None:
    groups = cell(PAIRS).groups
    assert [len(group) for group in groups] == [4, 2, 2]
    slots = [{"+".join(c.settings) for c in group} for group in groups]
    assert slots == [{"fc1_dgrad+fc1_wgrad"}, {"fc1_dgrad"}, {"fc1_wgrad"}]


def test_with_holes_what_nothing_leads_to_is_a_group_of_its_own() -> None:
    here, above, apart = one_slot(
        [
            {"method": "pipeline", "num_sm": 2, "num_splits": 2},
            {"method": "pipeline", "num_sm": 4, "num_splits": 2},
            {"method": "pipeline", "num_sm": 4, "num_splits": 4, "set_sm_margin": True},
        ]
    )
    assert cell([here, apart, above]).groups == [[here, above], [apart]]


def test_with_holes_a_ladder_has_what_there_is() -> None:
    ladder = cell(c for c in PAIRS if c != pair(ONE, TWO)).ladder(pair(TWO, TWO), "fc1_dgrad")
    assert [num_sm(c, "fc1_dgrad") for c in ladder] == [2]


def test_every_candidate_is_in_one_arm_and_one_group() -> None:
    found = cell([*PAIRS, *one_slot(PIPELINE, "fc1_dgrad"), *one_slot(BULK, "qkv_dgrad")])
    for parts in (list(found.arms.values()), found.groups):
        assert sorted(str(candidate) for part in parts for candidate in part) == sorted(map(str, found.candidates))


def test_distance_counts_octaves_of_num_sm_over_the_slots() -> None:
    bulk = {n: {"method": "bulk", "num_sm": n} for n in (1, 4, 8)}
    assert distance(pair(bulk[1], bulk[4]), pair(bulk[4], bulk[8])) == 3.0
    assert distance(pair(bulk[1], None), pair(bulk[1], bulk[8])) == 0.0
    assert distance(NONE, pair(bulk[1], None)) == 0.0
    assert distance(*one_slot([{"method": "ring_exchange"}, {"method": "ring_exchange", "num_sm": 4}])) == 0.0
