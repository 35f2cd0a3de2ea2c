"""From the values of the knobs to the candidates of each pass, and what a search sees of them: arms, ladders, flips."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from overlap_sweep.backends import installed
from overlap_sweep.overlap import space
from overlap_sweep.search.cell import NONE, Candidate, distance
from overlap_sweep.search.tasks import candidates
from tests.make_point import gpu_point, operator_point
from tests.search.surfaces import cell, method_of, num_sm, one_slot, pair, pairs, settings

KNOBS: dict[str, Sequence[Any]] = {**dict.fromkeys(space.KNOBS, (None,)), "num_sm": (1, 16)}
BULK = settings("bulk", num_sm=(1, 2, 4), set_sm_margin=(False, True))
PIPELINE = settings("pipeline", num_sm=(2, 4), num_splits=(2, 4))
ONE, TWO = settings("bulk", num_sm=(1, 2))
PAIRS = pairs([ONE, TWO])


@pytest.fixture(autouse=True)
def with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "missing", lambda *_: None)


def found(
    point: Mapping[str, Any], methods: Sequence[str] = space.METHODS[1:], phase: str = "all", **knobs: Sequence[Any]
) -> tuple[dict[str, list[Candidate]], Counter[str]]:
    return candidates(point, {**KNOBS, "method": methods, "phase": (phase,), **knobs})


RINGS = ["ring_agg0_sm1", "ring_agg1_sm1", "ring_agg0_sm16", "ring_agg1_sm16"]
PIPELINES = [f"pipeline_sm{n}_split{splits}" for n in (1, 16) for splits in (2, 4)]
BULKS = [
    *("dgrad bulk_sm1 + wgrad bulk_sm1", "dgrad bulk_sm1 + wgrad bulk_sm16", "dgrad bulk_sm1"),
    *("dgrad bulk_sm16 + wgrad bulk_sm1", "dgrad bulk_sm16 + wgrad bulk_sm16", "dgrad bulk_sm16"),
]
LIKE_FC1 = {"fwd": RINGS, "bwd": [*BULKS, "ring_sm1", "ring_sm16", *PIPELINES, "wgrad bulk_sm1", "wgrad bulk_sm16"]}
LIKE_FC2 = {"fwd": ["ring_sm1", "ring_sm16", *PIPELINES], "bwd": RINGS}


@pytest.mark.parametrize(
    ("operator", "expected"), [("fc1", LIKE_FC1), ("qkv", LIKE_FC1), ("proj", LIKE_FC2), ("fc2", LIKE_FC2)]
)
def test_every_slot_gets_the_methods_and_knobs_that_it_takes(operator: str, expected: dict[str, list[str]]) -> None:
    """Backward is a product, both slots before one of them. wgrad has nothing beside a dgrad that scatters, which is
    no refusal worth a word: no one asked for it."""
    point = operator_point(operator=operator)
    of_pass, refused = found(point, num_splits=(2, 4), aggregate=(False, True))
    assert {name: list(map(str, of_each)) for name, of_each in of_pass.items()} == expected
    assert not refused


def test_priorities_and_the_first_gemm_are_searched_where_there_are_several_values() -> None:
    fc2 = gpu_point(operator="fc2", model={"bias": False})
    firsts = {"methods": ["pipeline"], "num_splits": (4,), "pipeline_rs_overlap_first_gemm": (False, True)}
    of_pass, _ = found(fc2, phase="fprop", **firsts, num_sm=(4,))
    # false is the library's own choice, thus the setting of a search without the knob.
    assert list(map(str, of_pass["fwd"])) == ["pipeline_sm4_split4", "pipeline_sm4_split4_first1"]
    of_pass, refused = found(fc2, ["ring_exchange"], "fprop", num_sm=(1,), comm_priority=(None, 0, -1))
    assert list(map(str, of_pass["fwd"])) == ["ring_sm1", "ring_sm1_commprio-1"]
    assert [reason[:42] for reason in refused] == ["Transformer Engine replaces comm_priority="]


def test_of_cublasmp_only_num_sm_is_searched() -> None:
    point = gpu_point(operator="fc2", with_cublasmp=True)
    of_pass, refused = found(point, phase="fprop", use_ce=(True, False), num_splits=(2, 4), set_sm_margin=(True, False))
    assert [one.settings for one in of_pass["fwd"]] == [
        {"fc2_fprop": {"method": "ring_exchange", "num_sm": num_sm}} for num_sm in (1, 16)
    ]
    assert list(refused.values()) == [2]
    assert "cuBLASMp's pipeline is NVLink multicast" in next(iter(refused))


@pytest.mark.parametrize("phase", space.PHASES)
def test_a_single_phase_leaves_the_others_without_overlap(phase: str) -> None:
    of_pass, _ = found(operator_point(), phase=phase)
    assert {slot for of_each in of_pass.values() for c in of_each for slot in c.settings} == {f"fc1_{phase}"}


def test_only_knobs_that_the_backend_has_are_varied_and_what_is_left_open_is_what_it_gives_them() -> None:
    knobs = {"set_sm_margin": (False, True), "use_ce": (False,), "cga_size": (1, 2)}
    of_pass, refused = found(operator_point(), methods=["bulk"], phase="dgrad", **knobs)
    assert list(map(str, of_pass["bwd"])) == ["dgrad bulk_sm1", "dgrad bulk_sm16"]
    of_pass, _ = found(gpu_point(), methods=["bulk"], phase="dgrad", **knobs)
    assert len(of_pass["bwd"]) == 2 * 2 * 2
    assert not refused
    of_pass, _ = found(gpu_point(), methods=["bulk"], phase="dgrad")
    usual = {"method": "bulk", **space.USERBUFFERS_DEFAULTS["bulk"]}
    assert [c.settings["fc1_dgrad"] for c in of_pass["bwd"]] == [{**usual, "num_sm": n} for n in (1, 16)]


def test_copy_engines_make_one_of_all_num_sm_and_every_candidate_occurs_once() -> None:
    of_pass, _ = found(gpu_point(), num_sm=(1, 4, 16), use_ce=(True, False, True), num_splits=(4, 4))
    given = [c.settings["fc1_fprop"] for c in of_pass["fwd"]]
    assert [(setting["use_ce"], setting["num_sm"]) for setting in given] == [
        *((True, 1), (False, 1), (False, 4), (False, 16))
    ]
    assert len(of_pass["bwd"]) == len(set(of_pass["bwd"]))


def test_refusals_are_counted_by_their_reason() -> None:
    of_pass, refused = found(gpu_point(operator="fc2"), methods=["pipeline"], num_splits=(4, 3), num_sm=(1, 16, 40))
    assert list(map(str, of_pass["fwd"])) == ["pipeline_sm1_split4", "pipeline_sm16_split4"]
    assert refused == {
        "fc2_fprop: 256 columns cannot be split into num_splits=3 equal parts": 3,
        "fc2_fprop: num_sm=40 is more than the 32 that userbuffers support": 1,
    }


def test_a_candidate_is_what_its_slots_are_given_in_whatever_order_it_was_said() -> None:
    said = Candidate.of({"fc1_wgrad": {"num_sm": 2, "method": "bulk"}, "fc1_dgrad": {"method": "bulk", "num_sm": 4}})
    other = pair({"method": "bulk", "num_sm": 4}, {"num_sm": 2, "method": "bulk"})
    assert (said, hash(said)) == (other, hash(other))
    assert str(said) == "dgrad bulk_sm4 + wgrad bulk_sm2"
    assert (str(NONE), Candidate.of({})) == ("none", NONE)


def test_an_arm_is_everything_but_num_sm() -> None:
    candidates = one_slot(BULK, "fc1_dgrad")
    margins = {c.arm: c.settings["fc1_dgrad"]["set_sm_margin"] for c in candidates}
    assert sorted(margins.values()) == [False, True]
    assert all(margins[c.arm] == c.settings["fc1_dgrad"]["set_sm_margin"] for c in candidates)
    # A slot that is left out makes another arm.
    assert len({c.arm for c in (pair(ONE, ONE), pair(ONE, None), pair(None, ONE))}) == 3
    assert sorted(Counter(c.arm for c in PAIRS).values()) == [2, 2, 4]


@pytest.mark.parametrize(("slot", "other"), [("fc1_dgrad", "fc1_wgrad"), ("fc1_wgrad", "fc1_dgrad")])
def test_a_ladder_goes_along_one_slot_and_keeps_the_other(slot: str, other: str) -> None:
    ladder = cell(reversed(PAIRS)).ladder(pair(TWO, TWO), slot)
    assert [(num_sm(c, slot), num_sm(c, other)) for c in ladder] == [(1, 2), (2, 2)]
    # With holes it has what there is.
    ladder = cell(c for c in PAIRS if c not in (pair(ONE, TWO), pair(TWO, ONE))).ladder(pair(TWO, TWO), slot)
    assert [num_sm(c, slot) for c in ladder] == [2]


def test_flips_change_one_knob_and_leave_num_sm_open() -> None:
    candidates = one_slot(PIPELINE, "fc2_fprop")
    _, two_by_four, four_by_two, four_by_four = candidates
    assert cell(candidates).flips(four_by_two) == {("fc2_fprop", "num_splits"): {4: [two_by_four, four_by_four]}}


def test_one_of_two_slots_may_be_flipped_to_none_where_the_rest_is_a_candidate() -> None:
    without_dgrad = {("fc1_dgrad", "method"): {"none": [pair(None, ONE)]}}
    without_wgrad = {("fc1_wgrad", "method"): {"none": [pair(ONE, None)]}}
    found = cell(PAIRS)
    assert found.flips(pair(ONE, ONE)) == {**without_dgrad, **without_wgrad}
    # The last slot is not dropped: `none` is measured beside every candidate.
    assert found.flips(pair(ONE, None)) == {}
    assert cell([pair(ONE, ONE), pair(None, ONE)]).flips(pair(ONE, ONE)) == without_dgrad


def test_groups_are_what_can_be_reached_from_each_other_by_changing_one_knob_at_a_time() -> None:
    """Nothing leads from one method to another, or from two slots to one of them."""
    ring = settings("ring_exchange", num_sm=(1, 2), use_ce=(False,))
    groups = cell(one_slot([*PIPELINE, *ring], "fc2_fprop")).groups
    assert [list(map(method_of, group)) for group in groups] == [["pipeline"] * 4, ["ring_exchange"] * 2]
    slots = [["+".join(c.settings) for c in group] for group in cell(PAIRS).groups]
    assert slots == [["fc1_dgrad+fc1_wgrad"] * 4, ["fc1_dgrad"] * 2, ["fc1_wgrad"] * 2]
    # With holes what nothing leads to is a group of its own.
    here, _, above, _ = one_slot(PIPELINE)
    apart = one_slot(settings("pipeline", num_sm=(4,), num_splits=(4,), set_sm_margin=(True,)))[0]
    assert cell([here, apart, above]).groups == [[here, above], [apart]]


def test_distance_counts_octaves_of_num_sm_over_the_slots() -> None:
    one, four, eight = settings("bulk", num_sm=(1, 4, 8))
    assert distance(pair(one, four), pair(four, eight)) == 3.0
    assert distance(pair(one, None), pair(one, eight)) == 0.0
    assert distance(NONE, pair(one, None)) == 0.0
    assert distance(*one_slot([{"method": "ring_exchange"}, {"method": "ring_exchange", "num_sm": 4}])) == 0.0
