from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlap_sweep.trace.intervals import (
    Intervals,
    Measure,
    contains,
    intersect,
    length,
    merge,
    rows_without_overlap,
    subtract,
)

HORIZON = 40

some_intervals = st.lists(st.tuples(st.integers(0, HORIZON), st.integers(0, HORIZON)).map(sorted), max_size=12).map(
    lambda pairs: np.array(pairs, np.int64).reshape(-1, 2)
)


def moments(intervals: Intervals) -> set[int]:
    """The unit steps that some interval covers, one by one."""
    return {step for start, end in intervals for step in range(start, end)}


def assert_union(union: Intervals) -> None:
    assert union.dtype == np.int64
    assert union.shape[1:] == (2,)
    assert (union[:, 0] < union[:, 1]).all()
    assert (union[1:, 0] > union[:-1, 1]).all()


@given(some_intervals)
def test_merge(a: Intervals) -> None:
    union = merge(a)
    assert_union(union)
    assert moments(union) == moments(a)
    assert length(union) == len(moments(a))


@given(some_intervals, some_intervals)
def test_intersect_and_subtract(a: Intervals, b: Intervals) -> None:
    both, only_a = intersect(merge(a), merge(b)), subtract(merge(a), merge(b))
    assert_union(both)
    assert_union(only_a)
    assert moments(both) == moments(a) & moments(b)
    assert moments(only_a) == moments(a) - moments(b)


@given(some_intervals, st.lists(st.integers(-1, HORIZON + 1)))
def test_contains(a: Intervals, asked: list[int]) -> None:
    assert contains(merge(a), np.array(asked, np.int64)).tolist() == [moment in moments(a) for moment in asked]


@given(some_intervals, st.integers(-5, HORIZON + 5), st.integers(-5, HORIZON + 5))
def test_between_two_moments(a: Intervals, start: int, end: int) -> None:
    measure = Measure(a)
    assert measure.between(start, end) == len(moments(a) & set(range(start, end)))
    assert float(measure.until(end)) == len({moment for moment in moments(a) if moment < end})


@given(some_intervals)
def test_rows_without_overlap(a: Intervals) -> None:
    spans = sorted(map(tuple, a.tolist()))
    rows = rows_without_overlap(spans)
    assert sorted(number for row in rows for number in row) == list(range(len(spans)))
    for row in rows:
        assert all(spans[one][1] <= spans[other][0] for one, other in pairwise(row))


def test_a_row_is_the_first_that_is_free() -> None:
    # The second waits for nothing, the third fits behind the first, which ends as it starts.
    assert rows_without_overlap([(0, 4), (1, 2), (4, 6), (5, 7), (6, 8)]) == [[0, 2, 4], [1, 3]]
    assert rows_without_overlap([]) == []


def test_nanoseconds_beyond_2_to_the_53_stay_exact() -> None:
    late = 2**60
    a, b = np.array([[late, late + 3]]), np.array([[late + 2, late + 5]])
    assert intersect(a, b).tolist() == [[late + 2, late + 3]]
    assert subtract(a, b).tolist() == [[late, late + 2]]
