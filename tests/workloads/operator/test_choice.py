"""Asserts which setting is chosen for each pass, what failures exclude, which TP size pays, and whether times can be
trusted."""

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.results.provenance import slowed_gpus
from overlap_sweep.workloads.operator.answer import CaseAnalysis, baseline_drift, scale, scale_case
from overlap_sweep.workloads.operator.choice import default_sum_us
from overlap_sweep.workloads.operator.result import DefaultTiming, PassTimes
from tests.make_point import default_timing, make_point, operator_config, pass_times
from tests.results.reading import choices, only_case, operators_of

BWD, FWD = (2, "fc1", "bwd"), (2, "fc1", "fwd")
BOTH = "dgrad bulk_sm{0} + wgrad bulk_sm{0}"


def bwd(time_us: float, spread_us: float = 0.0, default: DefaultTiming | None = None) -> PassTimes:
    return pass_times(time_us, none_us=200.0, floor_us=150.0, spread_us=spread_us, default=default)


def bulk(directory: Path, num_sm: int, times: PassTimes | None = None, phase: str = "all", **result: Any) -> None:
    make_point("operator", directory, operator_config(2, "fc1", phase, "bulk", num_sm=num_sm), bwd=times, **result)


def forward(
    directory: Path, time_us: float, method: str = "ring_exchange", operator: str = "fc1", **knobs: Any
) -> None:
    make_point("operator", directory, operator_config(2, operator, "fprop", method, **knobs), fwd=pass_times(time_us))


def names(directory: Path) -> list[str]:
    return [candidate.name for candidate in choices(directory)[BWD].candidates]


def test_fastest_setting_wins(tmp_path: Path) -> None:
    forward(tmp_path, 80.0, aggregate=False)
    forward(tmp_path, 70.0, aggregate=True)
    choice = choices(tmp_path)[FWD]
    assert choice.chosen.settings == {"fc1_fprop": {"method": "ring_exchange", "aggregate": True}}
    assert (choice.chosen.time_us, choice.none.time_us, choice.floor_us) == (70.0, 100.0, 50.0)
    assert choice.reason == "fastest of 3 settings, no overlap included; not repeated"


def test_drift_between_points_does_not_decide(tmp_path: Path) -> None:
    # sm8 looks slower by the clock, but the machine was: 180/240 of no overlap, against 160/200.
    bulk(tmp_path, 4, pass_times(160.0, none_us=200.0, floor_us=100.0))
    bulk(tmp_path, 8, pass_times(180.0, none_us=240.0, floor_us=120.0))
    chosen = choices(tmp_path)[BWD].chosen
    assert chosen.settings["fc1_dgrad"]["num_sm"] == 8
    assert chosen.time_us == pytest.approx(220.0 * 180 / 240)


def test_tie_inside_the_noise_goes_to_the_smaller_setting(tmp_path: Path) -> None:
    for num_sm, time_us in ((16, 158.0), (8, 160.0), (2, 159.0), (1, 190.0)):
        bulk(tmp_path, num_sm, bwd(time_us, spread_us=2.0))
    choice = choices(tmp_path)[BWD]
    assert choice.chosen.name == BOTH.format(2)
    assert f"within the noise of the fastest, {BOTH.format(16)} (noise " in choice.reason


def test_tie_goes_to_the_simpler_method_and_to_no_aggregate(tmp_path: Path) -> None:
    forward(tmp_path, 80.0, "pipeline", "fc2", num_sm=4, num_splits=4)
    forward(tmp_path, 80.0, "ring_exchange", "fc2", num_sm=4)
    assert choices(tmp_path)[2, "fc2", "fwd"].chosen.name == "ring_sm4"
    forward(tmp_path, 80.0, aggregate=True)
    forward(tmp_path, 80.0, aggregate=False)
    assert choices(tmp_path)[FWD].chosen.name == "ring_agg0"


@pytest.mark.parametrize(
    ("time_us", "reason"),
    [
        (198.0, f"the fastest overlap, {BOTH.format(4)}, is not measurably different from no overlap"),
        (260.0, f"the fastest overlap, {BOTH.format(4)}, is 30% slower than no overlap (21 to 39%)"),
    ],
)
def test_none_wins_ties_and_against_harmful_overlaps(tmp_path: Path, time_us: float, reason: str) -> None:
    bulk(tmp_path, 4, bwd(time_us, spread_us=3.0))
    choice = choices(tmp_path)[BWD]
    assert choice.chosen is choice.none
    assert choice.reason.startswith(reason)


def test_none_needs_no_point_of_its_own_and_is_pooled_when_it_has_some(tmp_path: Path) -> None:
    bulk(tmp_path, 4, bwd(180.0))
    assert choices(tmp_path)[BWD].none.estimate.repeats == 5
    make_point("operator", tmp_path, operator_config(), bwd=bwd(200.0))
    choice = choices(tmp_path)[BWD]
    assert choice.none.estimate.repeats == 10
    assert choice.tried_slots == {"fc1_dgrad", "fc1_wgrad"}


def test_the_same_setting_measured_twice_is_one_candidate(tmp_path: Path) -> None:
    for time_us in (150.0, 170.0):
        bulk(tmp_path, 4, bwd(time_us))
    chosen = choices(tmp_path)[BWD].chosen
    assert (len(chosen.points), chosen.estimate.repeats, chosen.time_us) == (2, 10, 160.0)


def test_backward_is_chosen_as_a_pair(tmp_path: Path) -> None:
    # dgrad alone is the best by far; together with wgrad's bulk it is spoilt.
    bulk(tmp_path, 4, bwd(160.0), "dgrad")
    bulk(tmp_path, 4, bwd(180.0))
    # Slots that were measured one at a time are not paired.
    bulk(tmp_path, 8, bwd(190.0), "wgrad")
    assert choices(tmp_path)[BWD].chosen.settings == {"fc1_dgrad": {"method": "bulk", "num_sm": 4}}


def test_a_default_that_several_points_carry_counts_once_and_is_summed_where_all_were_measured(tmp_path: Path) -> None:
    first, second = default_timing(180.0, 200.0, minute=0), default_timing(190.0, 200.0, minute=5)
    for num_sm, default in ((1, first), (2, first), (4, first), (8, second)):
        bulk(tmp_path, num_sm, bwd(150.0, default=default))
    found = choices(tmp_path)
    default = found[BWD].default
    assert default
    assert (default.repeats, default.time_us) == (10, pytest.approx(185.0))
    sums = [default_sum_us(some) for some in ([found[BWD]], list(found.values()), [])]
    assert sums == [default.time_us, None, None]


def test_launch_bound_failed_and_skipped_points_are_no_candidates(tmp_path: Path) -> None:
    bulk(tmp_path, 1, bwd(100.0), launch_bound=True)
    bulk(tmp_path, 2, status="failed", error="boom")
    make_point("operator", tmp_path, operator_config(method="pipeline", num_sm=2), status="skipped", error="senseless")
    bulk(tmp_path, 4, bwd(190.0))
    assert names(tmp_path) == ["none", BOTH.format(4)]


def test_the_default_is_compared_through_the_none_beside_it(tmp_path: Path) -> None:
    # Twice as slow a moment: 180 of 400 there is 90 of 200 here.
    bulk(tmp_path, 4, bwd(150.0, default=default_timing(180.0, none_us=400.0)))
    choice = choices(tmp_path)[BWD]
    assert choice.default
    assert choice.default.time_us == pytest.approx(90.0)
    assert names(tmp_path) == ["none", BOTH.format(4)]
    assert choice.chosen.time_us == 150.0
    assert choices(tmp_path)[FWD].default is None


@pytest.mark.parametrize(
    ("default_us", "spread_us", "wins"),
    [
        (120.0, 2.0, True),
        (149.0, 2.0, False),
        # Without noise of their own, what points are known to differ by decides.
        (148.0, 0.0, True),
        (149.0, 0.0, False),
    ],
)
def test_a_default_that_beats_all_that_was_tried_is_known(
    tmp_path: Path, default_us: float, spread_us: float, wins: bool
) -> None:
    bulk(tmp_path, 4, bwd(150.0, spread_us, default_timing(default_us, 200.0, spread_us=spread_us)))
    assert choices(tmp_path)[BWD].default_wins is wins


def case_of(directory: Path) -> CaseAnalysis:
    (case,) = operators_of(directory).cases
    return case


def ring(num_sm: int, **knobs: Any) -> dict[str, Any]:
    return operator_config(method="ring_exchange", phase="fprop", num_sm=num_sm, **knobs)


def wrong(directory: Path, point: dict[str, Any], tensor: str = "output") -> None:
    make_point("operator", directory, point, status="failed", error="wrong numbers", relative_error={tensor: 1.4})


@pytest.mark.parametrize(("tensor", "use_ce"), [("output", True), ("input_grad", False)])
def test_what_is_wrong_at_one_num_sm_is_not_chosen_at_another(tmp_path: Path, tensor: str, use_ce: bool) -> None:
    """Wrong gradients say nothing of the forward pass."""
    make_point("operator", tmp_path, ring(4, use_ce=False), fwd=pass_times(60.0))
    make_point("operator", tmp_path, ring(1, use_ce=True), fwd=pass_times(80.0))
    wrong(tmp_path, ring(8, use_ce=False), tensor)
    assert case_of(tmp_path).plans[2].choices[0].chosen.settings["fc1_fprop"]["use_ce"] == use_ce


def test_a_slot_of_which_every_overlap_failed_is_switched_off(tmp_path: Path) -> None:
    make_point("operator", tmp_path, fwd=pass_times(100.0))
    wrong(tmp_path, ring(1))
    case = case_of(tmp_path)
    assert case.plans[2].choices[0].tried_slots == {"fc1_fprop"}
    assert case.config(2).switches["tp_comm_overlap_disable_fc1"] or not case.config(2).switches["tp_comm_overlap"]


def test_a_setting_that_crashed_once_is_not_chosen(tmp_path: Path) -> None:
    make_point("operator", tmp_path, ring(4), fwd=pass_times(60.0))
    make_point("operator", tmp_path, ring(8), fwd=pass_times(80.0))
    make_point("operator", tmp_path, ring(4, repetition=1), status="failed", error="illegal memory access")
    assert case_of(tmp_path).plans[2].choices[0].chosen.settings["fc1_fprop"]["num_sm"] == 8


def test_the_largest_tp_size_that_scales_is_optimal() -> None:
    result = scale({1: 2000.0, 2: 1100.0, 4: 600.0, 8: 400.0}, tolerance=0.2)
    assert result.optimal_tp_size == 4
    assert result.scaling_ratios == {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.6}
    assert result.scaling_efficient == {1: True, 2: True, 4: True, 8: False}
    # Without tensor parallelism where nothing scales; undecided without a baseline.
    assert scale({1: 100.0, 2: 90.0, 4: 80.0}, tolerance=0.2).optimal_tp_size == 1
    undecided = scale({2: 90.0, 4: 80.0}, tolerance=0.2)
    assert (undecided.optimal_tp_size, undecided.reason) == (None, "no TP=1 baseline was measured.")


@pytest.mark.parametrize("own_points", [True, False])
def test_scaling_uses_the_chosen_settings_and_its_own_baseline(tmp_path: Path, own_points: bool) -> None:
    tp1 = None if own_points else 1000.0
    for tp_size, time_us in ((2, 550.0), (4, 300.0), (8, 200.0)):
        times = pass_times(time_us, none_us=2 * time_us, tp1_us=tp1)
        point = operator_config(tp_size, "fc2", method="ring_exchange", num_sm=1)
        make_point("operator", tmp_path, point, fwd=times, bwd=times)
    if own_points:
        alone = pass_times(1000.0, none_us=1000.0, floor_us=1000.0)
        make_point("operator", tmp_path, operator_config(1, "fc2"), fwd=alone, bwd=alone)
    scaling = scale_case(list(choices(tmp_path).values()), tolerance=0.2)
    assert scaling.results["fc2"].e2e_times == pytest.approx({1: 2000.0, 2: 1100.0, 4: 600.0, 8: 400.0})
    assert scaling.optimal_tp_size == scaling.results["fc2"].optimal_tp_size == 4


def test_the_whole_is_judged_by_the_operators_measured_everywhere(tmp_path: Path) -> None:
    for operator, tp_size, time_us in (("fc1", 2, 500.0), ("fc1", 4, 400.0), ("proj", 4, 250.0)):
        times = pass_times(time_us, none_us=time_us, tp1_us=1000.0)
        make_point("operator", tmp_path, operator_config(tp_size, operator), fwd=times, bwd=times)
    scaling = scale_case(list(choices(tmp_path).values()), tolerance=0.2)
    assert {operator: result.optimal_tp_size for operator, result in scaling.results.items()} == {"proj": 4, "fc1": 2}
    assert scaling.optimal_tp_size == 2
    assert scaling.reason == (
        "fc1: 2,000.0 us at TP=1; 1,000.0 us at TP=2, 1.00x the ideal time (efficient); "
        "800.0 us at TP=4, 1.60x the ideal time (not efficient)."
    )


def test_times_without_overlap_drift_in_the_order_of_measuring(tmp_path: Path) -> None:
    # Written in another order than measured; what was measured once does not drift.
    for measured, none_us in enumerate((110.0, 100.0, 100.0, 110.0)):
        started = f"2026-11-20T21:0{(3, 1, 2, 4)[measured]}:00+00:00"
        make_point("operator", tmp_path, fwd=pass_times(90.0, none_us), started=started)
        found = baseline_drift(only_case(tmp_path))
        assert bool(found) == (measured > 0)
    assert found == {"fc1 fwd, TP=2": pytest.approx(0.1), "fc1 bwd, TP=2": 0.0}


def test_who_was_slowed_down(tmp_path: Path) -> None:
    # The power cap, 0x04, and idling, 0x01, do not count as throttling.
    for name, before, after in (("cool", 0, 0x04), ("hot", 0x01, 0x44)):
        moments = {"before": before, "after": after}
        conditions = {moment: {"gpus": [{"throttle_reasons": reasons}]} for moment, reasons in moments.items()}
        make_point("operator", tmp_path, name=name, conditions=conditions)
    assert slowed_gpus(only_case(tmp_path)) == [
        "GPUs were throttled (hardware thermal slowdown) in 1 point, first in hot: times may be too long."
    ]
