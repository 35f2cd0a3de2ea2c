"""When repeats are enough: data in, yes or no out."""

import random

import pytest

from overlap_sweep.results.verdict import enough_of_pass, enough_of_rounds


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
