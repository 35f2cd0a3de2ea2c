"""Which of several settings wins: ties, how many were tried, what points of equal settings differ by, and when repeats
are enough. That equal settings have no winner: a small part of the simulation in benchmarks/false_winners.py."""

import math
import random
from collections.abc import Sequence
from random import Random

import pytest

from benchmarks.false_winners import MACHINES, Machine, best_of, proven_of, rate
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.results.gain import NO_GAIN
from overlap_sweep.results.verdict import (
    TYPICAL_SCATTER,
    Choice,
    choose,
    enough_of_pass,
    enough_of_rounds,
    scatter,
    steadied,
)

TYPICAL = TYPICAL_SCATTER["cuda"]


def estimates(*times_us: float, noise_us: float = 2.0) -> list[Estimate]:
    return [Estimate(time_us, noise_us, 21, 20.0) for time_us in times_us]


def chosen(*times_us: float, noise_us: float = 2.0) -> Choice[int]:
    """The first is the reference."""
    known = estimates(*times_us, noise_us=noise_us)
    return choose(range(len(known)), known.__getitem__)


@pytest.mark.parametrize(
    ("times_us", "taken", "fastest", "won"),
    [
        ((100.0, 90.0, 80.0), 2, 2, True),
        # The simplest of those that cannot be told from the fastest.
        ((100.0, 81.0, 80.0), 1, 2, True),
        # It ties with the fastest, and with the reference: what beats the reference is taken.
        ((100.0, 97.5, 95.5), 2, 2, True),
        # Nothing beats the reference.
        ((100.0, 99.0, 98.0), 0, 2, False),
        ((100.0, 120.0, 110.0), 0, 2, False),
        ((100.0,), 0, 0, False),
    ],
)
def test_a_setting_wins_only_by_beating_the_reference(
    times_us: tuple[float, ...], taken: int, fastest: int, won: bool
) -> None:
    choice = chosen(*times_us)
    assert (choice.chosen, choice.fastest, choice.won) == (taken, fastest, won)


@pytest.mark.parametrize(
    ("fastest_us", "sure", "won"),
    [(80.0, True, True), (99.0, False, False), (101.0, False, False), (110.0, True, False)],
)
def test_the_gain_is_stated_with_the_noise_that_decided(fastest_us: float, sure: bool, won: bool) -> None:
    choice = chosen(100.0, fastest_us)
    gain = choice.gain_of_fastest
    assert gain.share == pytest.approx(1 - fastest_us / 100)
    assert (choice.won, gain.faster, gain.sure) == (won, won, sure)
    assert choice.gain == (gain if won else NO_GAIN)


def test_the_more_were_tried_the_surer_the_best_must_be() -> None:
    assert chosen(100.0, 96.5).won
    assert not chosen(100.0, *[100.0] * 38, 96.5).won
    assert chosen(100.0, *[100.0] * 38, 94.0).won


@pytest.mark.parametrize(("count", "apart"), [(1, 0.0), (4, 0.0), (12, 0.0), (40, 0.0), (4, 0.003)])
def test_equal_settings_have_no_winner_and_faster_ones_do(count: int, apart: float) -> None:
    """In 400 trials each; a faster one is so by three times the noise of such a difference."""
    random, equal, found = Random(count), 0, 0
    between = scatter([], TYPICAL) if apart else scatter([], 1e-9)

    def measured(time_us: float, error: float) -> Estimate:
        """Its noise is as uncertain as that of twenty samples."""
        known = Estimate(time_us * (1 + random.gauss(0, apart)) + random.gauss(0, error), 0.0, 21)
        share = (random.gammavariate(7.5, 1.0) / 7.5) ** 0.5
        return between.added_to(known.with_error(error * share, 15.0), 1)

    for _ in range(400):
        settings = [Estimate(100.0, 0.0, 400), *(measured(100.0, 0.3) for _ in range(count))]
        equal += choose(settings, lambda estimate: estimate).won
        three_times = 3 * (settings[1].noise_us ** 2 + settings[0].noise_us ** 2) ** 0.5
        settings[1] = measured(100.0 - three_times, 0.3)
        found += choose(settings, lambda estimate: estimate).chosen is settings[1]
    assert equal / 400 <= 0.05
    assert found / 400 >= 0.95


def repeated(random: Random, share: float, points: int, settings: int = 1) -> list[Sequence[Estimate]]:
    return [
        [Estimate(100.0 * (1 + random.gauss(0, share)), 0.02, 21, 20.0) for _ in range(points)] for _ in range(settings)
    ]


def test_scatter_is_what_is_typical_until_repetitions_say_otherwise() -> None:
    random = Random(1)
    unknown = scatter([[one] for one in estimates(100.0, 90.0)], TYPICAL)
    assert (unknown.share, unknown.freedom) == (TYPICAL, math.inf)
    noisy = scatter(repeated(random, 0.03, points=40), TYPICAL)
    assert noisy.share == pytest.approx(0.03, rel=0.3)
    assert noisy.freedom == 39 + 4
    calm = scatter(repeated(random, 1e-5, points=5, settings=40), TYPICAL)
    assert calm.share < 0.2 * TYPICAL
    # Two points say little.
    assert scatter(repeated(random, 1e-5, points=2), TYPICAL).share > 0.5 * TYPICAL


def test_what_every_point_measures_beside_its_setting_shows_that_points_differ_by_more() -> None:
    random = Random(1)
    unrepeated = [[one] for one in estimates(100.0, 90.0)]
    (moved,), (calm,) = repeated(random, 0.02, points=30), repeated(random, 1e-5, points=30)
    assert scatter(unrepeated, TYPICAL, [moved, calm]).share == pytest.approx(0.02, rel=0.3)
    assert scatter(unrepeated, TYPICAL, [calm]).share == TYPICAL


def test_the_noise_within_points_is_not_taken_for_noise_between_them() -> None:
    random = Random(1)
    within = [[Estimate(random.gauss(100, 1.0), 1.96, 21) for _ in range(4)] for _ in range(60)]
    assert scatter(within, 1e-6).share < 0.006


def test_a_noise_that_is_far_too_small_by_chance_leans_on_the_others() -> None:
    *others, lucky = steadied([*estimates(*[100.0] * 9), Estimate(100.0, 0.05, 21, 8.0)])
    assert lucky.error_us > 0.5 * others[0].error_us
    assert lucky.freedom > 8.0
    # What has none is exact, and stays so.
    exact, *_ = steadied([Estimate(100.0, 0.0, 9), *estimates(90.0, 80.0)])
    assert exact.noise_us == 0.0


# When repeats are enough.


def drawn(median_us: float, deviation: float, count: int = 6, seed: int = 0) -> list[float]:
    numbers = random.Random(seed)
    return [median_us * numbers.gauss(1.0, deviation) for _ in range(count)]


@pytest.mark.parametrize(
    ("ratio", "deviation", "best", "enough"),
    [
        # Steady enough, whether it is the best or not.
        (0.9, 0.001, 0.9, True),
        (0.9, 0.001, 1.0, True),
        # Noisy, and it could be the best.
        (0.9, 0.03, 0.9, False),
        (0.9, 0.03, 0.89, False),
        # Noisy, and it cannot.
        (1.5, 0.03, 0.9, True),
    ],
)
def test_a_pass_is_settled_by_little_noise_or_by_a_much_better_setting(
    ratio: float, deviation: float, best: float, enough: bool
) -> None:
    point_us, none_us = drawn(1000.0 * ratio, deviation), drawn(1000.0, deviation, seed=1)
    assert enough_of_pass(point_us, none_us, 0.01, best) == enough


def test_the_noise_of_no_overlap_counts_too() -> None:
    assert not enough_of_pass(drawn(900.0, 0.0001), drawn(1000.0, 0.05), 0.01, 0.9)


def test_drift_of_all_variants_alike_does_not_cost_rounds() -> None:
    drift = [1.0, 1.1, 1.2, 1.1, 1.0, 0.9]
    reference = [1000.0 * factor for factor in drift]
    others = [[900.0 * factor for factor in drift], [950.0 * factor for factor in drift]]
    assert enough_of_rounds(others, reference, 0.001)
    assert not enough_of_rounds([*others, drawn(900.0, 0.05)], reference, 0.001)


def test_a_reference_alone_is_measured_to_the_end() -> None:
    assert not enough_of_rounds([], drawn(1000.0, 0.0), 0.5)


# How often equal settings of a job have a winner, and that a faster one is found.


TRIALS = 80
MOST = 0.05 + 2 * (0.05 * 0.95 / TRIALS) ** 0.5
"""5 %, and two standard errors of as many trials."""


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize(("settings", "repetitions", "steps"), [(2, 3, 4), (5, 2, 8)])
def test_equal_settings_have_no_winner(machine: Machine, settings: int, repetitions: int, steps: int) -> None:
    assert rate(best_of, machine, [0.0] * settings, repetitions, steps, TRIALS) <= MOST


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_a_search_proves_none_of_them(machine: Machine) -> None:
    assert rate(proven_of, machine, [0.0] * 2, 2, 4, 60) <= MOST


def test_two_runs_of_two_settings_have_no_winner_and_ten_percent_are_found_in_three() -> None:
    quiet = MACHINES[0]
    assert rate(best_of, quiet, [0.0, 0.5], 2, 20, 20) == 0.0
    assert rate(best_of, quiet, [0.0, 0.1], 3, 8, 60) >= 0.95
    assert rate(best_of, quiet, [0.0, 0.1, 0.0, 0.0, 0.0], 3, 8, 40) >= 0.95
