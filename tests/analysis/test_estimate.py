from __future__ import annotations

import math

import pytest

from overlap_sweep.analysis.estimate import Estimate, normalised, notch_us, pooled_none
from tests.analysis.run_directories import timing


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
