from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap_sweep.analysis.choice import default_sum_us
from overlap_sweep.run_directory import DefaultTiming, PassTimes
from tests.analysis.reading import choices
from tests.make_point import default_timing, make_point, operator_config, pass_times

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
    assert choice.reason == "fastest of 3, none included"


def test_drift_between_points_does_not_decide(tmp_path: Path) -> None:
    # sm8 looks slower by the clock, but the machine was: 180/240 of no overlap, against 160/200.
    bulk(tmp_path, 4, pass_times(160.0, none_us=200.0))
    bulk(tmp_path, 8, pass_times(180.0, none_us=240.0))
    chosen = choices(tmp_path)[BWD].chosen
    assert chosen.settings["fc1_dgrad"]["num_sm"] == 8
    assert chosen.time_us == pytest.approx(220.0 * 180 / 240)


def test_tie_inside_the_noise_goes_to_the_smaller_setting(tmp_path: Path) -> None:
    for num_sm, time_us in ((16, 158.0), (8, 160.0), (2, 159.0), (1, 190.0)):
        bulk(tmp_path, num_sm, bwd(time_us, spread_us=2.0))
    choice = choices(tmp_path)[BWD]
    assert choice.chosen.name == BOTH.format(2)
    assert f"within the noise of the fastest, {BOTH.format(16)} (1.0 us faster" in choice.reason


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
        (198.0, f"the best overlap, {BOTH.format(4)}, is no faster beyond the noise (2.0 us faster"),
        (260.0, f"the best overlap, {BOTH.format(4)}, is 30.0% slower"),
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
    assert choices(tmp_path)[BWD].chosen.settings == {"fc1_dgrad": {"method": "bulk", "num_sm": 4}}


def test_slots_measured_one_at_a_time_predict_their_pair(tmp_path: Path) -> None:
    bulk(tmp_path, 4, bwd(180.0), "dgrad")
    bulk(tmp_path, 8, bwd(190.0), "wgrad")
    chosen = choices(tmp_path)[BWD].chosen
    assert chosen.name == "dgrad bulk_sm4 + wgrad bulk_sm8"
    assert (chosen.time_us, chosen.measured) == (170.0, False)


def test_no_pair_is_predicted_that_is_invalid_useless_or_measured(tmp_path: Path) -> None:
    def all_measured() -> bool:
        return all(candidate.measured for candidate in choices(tmp_path)[BWD].candidates)

    # A dgrad that scatters its own output leaves wgrad nothing.
    make_point("operator", tmp_path, operator_config(2, "fc1", "dgrad", "ring_exchange", num_sm=1), bwd=bwd(180.0))
    bulk(tmp_path, 8, bwd(190.0), "wgrad")
    # A dgrad that harms alone.
    bulk(tmp_path, 2, bwd(210.0), "dgrad")
    assert choices(tmp_path)[BWD].chosen.name == "ring_sm1"
    assert all_measured()
    bulk(tmp_path, 4, bwd(190.0), "dgrad")
    assert not all_measured()
    bulk(tmp_path, 16, bwd(195.0))
    assert all_measured()


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


def test_a_default_that_several_points_carry_counts_once(tmp_path: Path) -> None:
    first, second = default_timing(180.0, 200.0, minute=0), default_timing(190.0, 200.0, minute=5)
    for num_sm, default in ((1, first), (2, first), (4, first), (8, second)):
        bulk(tmp_path, num_sm, bwd(150.0, default=default))
    default = choices(tmp_path)[BWD].default
    assert default
    assert (default.repeats, default.time_us) == (10, pytest.approx(185.0))


@pytest.mark.parametrize(
    ("default_us", "spread_us", "wins"),
    [
        (120.0, 2.0, True),
        (149.0, 2.0, False),
        (180.0, 2.0, False),
        # Without noise the margin decides.
        (149.0, 0.0, True),
        (149.5, 0.0, False),
    ],
)
def test_a_default_that_beats_all_that_was_tried_is_known(
    tmp_path: Path, default_us: float, spread_us: float, wins: bool
) -> None:
    bulk(tmp_path, 4, bwd(150.0, spread_us, default_timing(default_us, 200.0, spread_us=spread_us)))
    assert choices(tmp_path)[BWD].default_wins is wins


def test_defaults_are_summed_only_where_all_were_measured(tmp_path: Path) -> None:
    bulk(tmp_path, 4, bwd(150.0, default=default_timing(180.0, 200.0)))
    found = choices(tmp_path)
    assert default_sum_us([found[BWD]]) == 180.0
    assert default_sum_us(list(found.values())) is None
    assert default_sum_us([]) is None
