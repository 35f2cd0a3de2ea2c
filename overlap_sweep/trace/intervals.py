"""Exact interval algebra on half-open integer intervals.

Intervals are int64 arrays [n, 2] of (start, end) with start <= end. A *union* is what `merge` returns: sorted,
disjoint, not touching, without empty intervals. All but `merge`, `Measure` and `rows_without_overlap` take unions.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]


class Timed(Protocol):
    """What has a start and an end."""

    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...


def intervals_of(timed: Iterable[Timed]) -> Intervals:
    return np.array([(one.start_ns, one.end_ns) for one in timed], np.int64).reshape(-1, 2)


def no_intervals() -> Intervals:
    return np.empty((0, 2), np.int64)


def merge(intervals: Intervals) -> Intervals:
    """Returns the union of any intervals [n, 2], in any order, overlapping or not."""
    intervals = intervals[intervals[:, 0] < intervals[:, 1]]
    if not len(intervals):
        return no_intervals()
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    opens = np.concatenate(([True], intervals[1:, 0] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return np.stack((intervals[opens, 0], reach[closes]), axis=1)


def length(union: Intervals) -> int:
    return int((union[:, 1] - union[:, 0]).sum())


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Returns the intersection of both unions."""
    return _where(a, b, cover=3)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Returns union `a` without union `b`."""
    return _where(a, b, cover=1)


def within(union: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """Returns the part of the union between two moments."""
    first, beyond = np.searchsorted(union[:, 1], start_ns, side="right"), np.searchsorted(union[:, 0], end_ns)
    return np.clip(union[first:beyond], start_ns, end_ns)


class Measure:
    """The length of a union of intervals between any two moments."""

    def __init__(self, intervals: Intervals) -> None:
        union = merge(intervals)
        self.union = union
        self._origin = int(union[0, 0]) if len(union) else 0
        self._moments = (union - self._origin).reshape(-1).astype(np.float64)
        self._bounds = array("d", self._moments.tobytes())
        lengths = np.cumsum(union[:, 1] - union[:, 0])
        self._covered = np.repeat(np.concatenate(([0], lengths)), 2)[1:-1].astype(np.float64)

    def until(self, moment_ns: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """Returns the length before the moments, in nanoseconds."""
        if not len(self._moments):
            return np.zeros(np.shape(moment_ns))
        return np.interp(np.asarray(moment_ns) - self._origin, self._moments, self._covered)

    def within(self, intervals: Intervals) -> NDArray[np.float64]:
        """Returns the length within each of the intervals, in nanoseconds."""
        return self.until(intervals[:, 1]) - self.until(intervals[:, 0])

    def between(self, start_ns: int, end_ns: int) -> float:
        return self._until_one(end_ns) - self._until_one(start_ns) if end_ns > start_ns else 0.0

    def _until_one(self, moment_ns: int) -> float:
        """Returns the same as `until`, for one moment in a tenth of the time."""
        since_ns = moment_ns - self._origin
        place = bisect_right(self._bounds, since_ns)
        if not place:
            return 0.0
        inside_ns = since_ns - self._bounds[place - 1] if place % 2 else 0.0
        return float(self._covered[place - 1]) + inside_ns


def contains(union: Intervals, moments: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns a mask of the moments [m] that lie in the union; an interval's end is outside."""
    if not len(union):
        return np.zeros(len(moments), bool)
    index = np.searchsorted(union[:, 0], moments, side="right") - 1
    return np.where(index >= 0, moments < union[index, 1], False)


def rows_without_overlap(spans: Iterable[tuple[float, float]]) -> list[list[int]]:
    """Returns the indices of (start, end) spans, sorted by start, row by row: each is in the first free row."""
    rows: list[list[int]] = []
    ends: list[float] = []
    for number, (start, end) in enumerate(spans):
        row = next((row for row, until in enumerate(ends) if until <= start), len(rows))
        if row == len(rows):
            rows.append([])
            ends.append(end)
        rows[row].append(number)
        ends[row] = end
    return rows


def _where(a: Intervals, b: Intervals, cover: int) -> Intervals:
    """Returns where the unions, `a` counting 1 and `b` counting 2, add up to `cover`."""
    moments = np.concatenate((a[:, 0], a[:, 1], b[:, 0], b[:, 1]))
    steps = np.repeat([1, -1, 2, -2], [len(a), len(a), len(b), len(b)])
    order = np.argsort(moments, kind="stable")
    moments, covered = moments[order], np.cumsum(steps[order])
    pieces = np.flatnonzero(covered[:-1] == cover)
    return merge(np.stack((moments[pieces], moments[pieces + 1]), axis=1))


def places_by_value(column: NDArray[np.integer]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yields each distinct integer of the column, ascending, with its positions, ascending."""
    order = np.argsort(column, kind="stable")
    values, first = np.unique(column[order], return_index=True)
    return zip(values.tolist(), np.split(order, first[1:]), strict=False)
