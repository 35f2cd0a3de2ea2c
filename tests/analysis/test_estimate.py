"""Medians and their noise, and how much of a training step's communication is hidden."""

from __future__ import annotations

import math
from random import Random

import pytest

from overlap_sweep.analysis.estimate import (
    CONFIDENCE,
    Estimate,
    Interval,
    distinct,
    median_interval,
    normalised,
    notch_us,
    pooled_none,
)
from overlap_sweep.analysis.step_hidden import Hidden, hidden
from tests.make_point import default_timing, timing, timing_of


def test_notch_is_that_of_mcgill_tukey_and_larsen() -> None:
    # Quartiles 2 and 4 of five samples: an interquartile range of 2.
    assert notch_us([1, 2, 3, 4, 5]) == pytest.approx(1.57 * 2 / math.sqrt(5))


def test_noises_add_in_quadrature() -> None:
    assert not Estimate(105.0, 4.0, 9).differs_from(Estimate(100.0, 3.0, 9))
    assert Estimate(105.1, 4.0, 9).differs_from(Estimate(100.0, 3.0, 9))


def test_a_time_is_relative_to_the_none_time_beside_it() -> None:
    none = pooled_none([timing(100.0), timing(100.0), timing(200.0)])
    assert none.time_us == 100.0
    # The machine was half as fast when this point was measured: 160 beside 200 is 80 beside 100.
    assert normalised([(timing(160.0), timing(200.0))], none).time_us == pytest.approx(80.0)


def test_noise_of_the_baseline_is_noise_of_the_comparison() -> None:
    none = pooled_none([timing(100.0)])
    quiet = normalised([(timing(80.0), timing(100.0))], none)
    noisy = normalised([(timing(80.0), timing(100.0, spread_us=10.0))], none)
    assert quiet.noise_us == 0.0
    assert noisy.noise_us == pytest.approx(80.0 * notch_us(timing(100.0, 10.0).samples_us) / 100.0)


def test_a_measurement_that_several_points_carry_counts_once() -> None:
    early, late = default_timing(90.0, minute=1), default_timing(90.0, minute=2)
    assert distinct([late, early, default_timing(90.0, minute=2), early]) == [early, late]
    # Two operators can be measured in the same second.
    assert len(distinct([early, default_timing(95.0, minute=1)])) == 2


@pytest.mark.parametrize(
    ("n", "low", "high", "coverage"),
    [
        # Order statistics and coverages of the tables of the sign test's confidence interval.
        (6, 1, 6, 0.96875),
        (9, 2, 8, 0.9609),
        (21, 6, 16, 0.9734),
        (30, 10, 21, 0.9572),
    ],
)
def test_interval_of_a_median_is_that_of_the_sign_test(n: int, low: int, high: int, coverage: float) -> None:
    interval = median_interval([float(rank) for rank in reversed(range(1, n + 1))])
    assert (interval.low, interval.high) == (low, high)
    assert interval.coverage == pytest.approx(coverage, abs=5e-5)


@pytest.mark.parametrize(("n", "coverage"), [(2, 0.5), (3, 0.75), (5, 0.9375)])
def test_with_too_few_values_it_is_all_of_them_and_says_what_that_covers(n: int, coverage: float) -> None:
    assert median_interval(range(n)) == Interval(0, n - 1, coverage)


def test_it_covers_the_median_as_often_as_it_says() -> None:
    random = Random(1)
    covered = 0
    for _ in range(2000):
        interval = median_interval([random.expovariate(1.0) for _ in range(12)])
        covered += not interval.excludes(math.log(2))
    assert interval.coverage >= CONFIDENCE
    assert covered / 2000 == pytest.approx(interval.coverage, abs=0.02)


def hidden_of(point_us: list[float], none_us: list[float], floor_us: list[float]) -> Hidden | None:
    return hidden({"point": timing_of(point_us), "none": timing_of(none_us), "floor": timing_of(floor_us)})


def test_the_hidden_fraction_pairs_samples_and_has_the_noise_of_both_differences() -> None:
    # What drifts from round to round is in all three.
    assert hidden_of([11, 21, 31], [13, 23, 33], [9, 19, 29]) == (0.5, 0.0)
    noise = 1.57 * 1.0 / 3**0.5 / 4
    assert hidden_of([11, 13, 12], [13, 13, 13], [9, 9, 9]) == (0.25, pytest.approx(noise))
    assert Hidden(0.25, 0.99).known
    assert not Hidden(0.25, 1.0).known
    # Without communication there is nothing to hide.
    assert hidden_of([9, 9, 9], [9, 9, 9], [9, 9, 9]) is None
