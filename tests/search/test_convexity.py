"""What two measurements say of a third, when time is convex in 1 / num_sm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.search.bisect import least_us
from tests.search.surfaces import LADDER, exposed, hyperbola

SHAPES = st.one_of(
    st.builds(hyperbola, st.sampled_from(LADDER), st.floats(0.0, 1.0), st.floats(0.2, 1.0)),
    st.builds(exposed, st.floats(100.0, 1000.0), st.floats(1.0, 40.0)),
    st.builds(lambda a, b: lambda n: a + b / n, st.floats(100.0, 1000.0), st.floats(0.0, 5000.0)),
)


def test_beyond_two_measurements_the_line_through_them_is_the_bound() -> None:
    # 1 / 4 is as far beyond 1 / 8 as that is from 0; and 1 / 16 half as far on the other side.
    assert least_us(32, {8: 140.0, 16: 120.0}) == pytest.approx(110.0)
    assert least_us(4, {8: 120.0, 16: 100.0}) == pytest.approx(160.0)


def test_between_measurements_the_lines_through_those_on_either_side_are() -> None:
    falling, rising = {4: 200.0, 8: 150.0}, {16: 160.0, 32: 180.0}
    assert least_us(12, falling) == pytest.approx(150.0 - 50.0 / 3)
    assert least_us(12, rising) == pytest.approx(160.0 - 20.0 * 2 / 3)
    assert least_us(12, {**falling, **rising}) == pytest.approx(160.0 - 20.0 * 2 / 3)


def test_the_nearest_measurements_count() -> None:
    assert least_us(1, {2: 100.0, 4: 90.0, 8: 200.0}) == least_us(1, {2: 100.0, 4: 90.0})


@pytest.mark.parametrize("times_us", [{}, {8: 100.0}, {4: 100.0, 16: 120.0}])
def test_fewer_than_two_on_a_side_say_nothing(times_us: dict[int, float]) -> None:
    assert least_us(8 if 4 in times_us else 4, times_us) == 0.0


@given(SHAPES, st.sets(st.sampled_from(LADDER), min_size=2), st.sampled_from(LADDER))
def test_no_shape_of_time_is_below_its_bound(shape: Callable[[int], float], measured: set[int], n: int) -> None:
    times_us = {m: shape(m) for m in measured if m != n}
    assert least_us(n, times_us) <= shape(n) * (1 + 1e-9)
