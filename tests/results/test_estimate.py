"""Medians and their noise, and how much of a training step's communication is hidden."""

import math
from collections import defaultdict
from random import Random

import pytest

from overlap_sweep.results.estimate import (
    CONFIDENCE,
    Estimate,
    RunNoise,
    correlation,
    estimate,
    gap_noise_us,
    normalised,
    pooled_none,
    student,
)
from overlap_sweep.workloads.fsdp.result import Hidden, hidden
from overlap_sweep.workloads.operator.result import distinct
from tests.make_point import default_timing, timing, timing_of


def correlated(count: int, correlation: float, random: Random) -> list[float]:
    """Samples around 100 with a standard deviation of 1."""
    found, error = [], random.gauss(0, 1)
    for _ in range(count):
        found.append(100 + error)
        error = correlation * error + (1 - correlation**2) ** 0.5 * random.gauss(0, 1)
    return found


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("count", [9, 21, 60])
def test_an_interval_covers_the_truth_however_samples_lean_on_each_other(count: int, correlation: float) -> None:
    random = Random(1)
    found = [estimate(correlated(count, correlation, random)) for _ in range(1000)]
    covered = sum(abs(one.time_us - 100) <= one.noise_us for one in found) / len(found)
    # Nine samples say little of their correlation: then what is typical counts.
    assert covered >= (0.92 if correlation < 0.5 else 0.88)


def test_equal_times_are_told_apart_as_rarely_as_promised_however_many_are_compared() -> None:
    random = Random(1)
    apart = defaultdict(int)
    for _ in range(500):
        reference, *others = (estimate(correlated(21, 0.3, random)) for _ in range(9))
        for pairs in (1, 8):
            apart[pairs] += any(other.differs_from(reference, pairs) for other in others[:pairs])
    assert max(apart.values()) <= (1 - CONFIDENCE) * 1.6 * 500


def test_a_single_sample_tells_nothing() -> None:
    one = estimate([100.0])
    assert math.isnan(one.noise_us)
    assert not one.differs_from(Estimate(1.0, 0.0, 9))


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (math.inf, 1.960)])
def test_quantiles_are_those_of_students_table(freedom: float, quantile: float) -> None:
    assert student(0.05, freedom) == pytest.approx(quantile, rel=5e-3)


@pytest.mark.parametrize(
    ("samples", "expected"), [([5.0] * 9, 0.0), ([1.0, 2.0] * 30, 0.0), ([1.0] * 30 + [2.0] * 30, 0.9)]
)
def test_correlation_is_from_none_to_nine_tenths(samples: list[float], expected: float) -> None:
    assert correlation(samples) == expected


def over_runs(noise: RunNoise, *runs_us: float) -> Estimate:
    return noise.over_runs(Estimate(math.nan, 0.1, 8, 7.0), runs_us)


def test_runs_are_compared_by_students_interval_over_the_runs_of_all_settings() -> None:
    noise = RunNoise(share=0.01, freedom=4)
    one, other = over_runs(noise, 100.0, 101.0, 99.0), over_runs(noise, 90.0, 90.9, 89.1)
    assert (one.time_us, one.runs, one.freedom) == (100.0, 3, 4)
    assert one.noise_us == pytest.approx(2.776 * 1.0 / 3**0.5, rel=0.01)
    # Both have the same four degrees of freedom; runs of another sweep have their own.
    assert gap_noise_us(one, other) == pytest.approx(2.776 * (1.0 + 0.81) ** 0.5 / 3**0.5, rel=0.01)
    elsewhere = over_runs(RunNoise(share=0.011, freedom=4), 90.0, 90.9, 89.1)
    assert gap_noise_us(one, elsewhere) < gap_noise_us(one, other)


def test_a_setting_whose_runs_differ_by_more_than_others_has_more_noise() -> None:
    noise = RunNoise(share=0.01, freedom=10)
    calm, uneven = over_runs(noise, 100.0, 100.1, 99.9), over_runs(noise, 100.0, 110.0, 90.0)
    assert (calm.freedom, uneven.freedom) == (10, 4)
    assert uneven.noise_us > 5 * calm.noise_us


def test_steps_that_vary_within_runs_make_no_narrow_interval_of_runs_that_agree() -> None:
    steps = Estimate(100.0, 7.0, 8, 7.0)
    assert RunNoise(share=1e-4, freedom=4).over_runs(steps, [100.0] * 3).noise_us == 7.0


@pytest.mark.parametrize(
    ("noise", "runs", "known"),
    [
        (RunNoise(math.nan, 0), 1, False),
        (RunNoise(0.01, 2), 2, False),
        (RunNoise(0.01, 4), 3, True),
        (RunNoise(0.01, 4), 1, False),
        (RunNoise(math.nan, 0, expected=RunNoise(0.01, 4)), 1, True),
    ],
)
def test_too_few_runs_tell_nothing_unless_what_they_differ_by_is_known(noise: RunNoise, runs: int, known: bool) -> None:
    one, other = (over_runs(noise, *[time_us] * runs) for time_us in (100.0, 50.0))
    assert one.differs_from(other) == known
    assert math.isnan(gap_noise_us(one, other)) != known


def test_noises_add_in_quadrature() -> None:
    assert not Estimate(104.9, 4.0, 9).differs_from(Estimate(100.0, 3.0, 9))
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
    assert noisy.noise_us == pytest.approx(0.8 * estimate(timing(100.0, 10.0).samples_us).noise_us)


def test_a_measurement_that_several_points_carry_counts_once() -> None:
    early, late = default_timing(90.0, minute=1), default_timing(90.0, minute=2)
    assert distinct([late, early, default_timing(90.0, minute=2), early]) == [early, late]
    # Two operators can be measured in the same second.
    assert len(distinct([early, default_timing(95.0, minute=1)])) == 2


def hidden_of(point_us: list[float], none_us: list[float], floor_us: list[float]) -> Hidden:
    return hidden({"point": timing_of(point_us), "none": timing_of(none_us), "floor": timing_of(floor_us)})


def test_the_hidden_fraction_pairs_samples_and_has_the_noise_of_both_differences() -> None:
    # What drifts from round to round is in all three.
    assert hidden_of([11, 21, 31], [13, 23, 33], [9, 19, 29]) == (0.5, 0.0)
    noise_us = estimate([2.0, 0.0, 1.0]).noise_us
    assert hidden_of([11, 13, 12], [13, 13, 13], [9, 9, 9]) == (0.25, pytest.approx(noise_us / 4))


@pytest.mark.parametrize(("noise", "words"), [(0.08, "37% ± 8%"), (0.49, "37% ± 49%"), (0.5, "-"), (0.8, "-")])
def test_a_hidden_fraction_is_told_with_its_noise_or_not_at_all(noise: float, words: str) -> None:
    assert Hidden(0.37, noise).in_words == words


def test_without_communication_nothing_is_hidden() -> None:
    found = hidden_of([9, 9, 9], [9, 9, 9], [9, 9, 9])
    assert (found.known, found.in_words) == (False, "-")
