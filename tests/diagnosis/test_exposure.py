"""The length of a union between two moments."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.diagnosis.exposure import Measure

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=6)


@given(spans, st.integers(-5, 45), st.integers(-5, 45))
def test_between_two_moments_against_counting(drawn: list[tuple[int, int]], start: int, end: int) -> None:
    measure = Measure(np.array([(at, at + took) for at, took in drawn], np.int64).reshape(-1, 2))
    covered = {moment for at, took in drawn for moment in range(at, at + took)}
    assert measure.between(start, end) == len(covered & set(range(start, end)))
    assert float(measure.until(end)) == len({moment for moment in covered if moment < end})
