"""What an iteration's time went to: by class of kernel, by kernel, and by stream."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from overlap_sweep.trace.activity import KINDS, Activity
from overlap_sweep.trace.grouping import places_by_value
from overlap_sweep.trace.intervals import Intervals, merge
from overlap_sweep.trace.overlap import phases_of

Grouping = Literal["class", "kernel", "stream"]


class PartRow(msgspec.Struct, kw_only=True):
    """A part of one iteration and phase of one trace. Microseconds, exact to the nanosecond."""

    file: str
    rank: int | None
    iteration: int
    phase: str
    by: Grouping
    kind: str
    """gemm, comm, wait, compute or memory; of a stream all that it has, joined by `+`."""
    library: str
    """Whose kernels; of a stream all of them, joined by `+`."""
    name: str
    """Of a kernel as it is in the trace; of a stream its process and number; of a class its kind and library."""
    num_events: int
    busy_us: float
    """The union of its spans: what runs twice at a time counts once."""
    total_us: float
    """The sum of its spans."""
    alone_us: float
    """The part of busy in which no other part of this grouping runs."""


class _Group(NamedTuple):
    kind: str
    library: str
    name: str


def breakdown(activity: Activity, file: str, rank: int | None) -> list[PartRow]:
    """For every iteration and phase its parts in each grouping, the longest busy first."""
    rows: list[PartRow] = []
    intervals = activity.events.intervals
    for iteration, phase, chosen in phases_of(activity):
        for by in get_args(Grouping):
            groups, group = _GROUPINGS[by](activity, chosen)
            busy_ns, total_ns, alone_ns = measure_groups(intervals[chosen], group, len(groups))
            num_events = np.bincount(group, minlength=len(groups))
            for i in np.lexsort((np.arange(len(groups)), -busy_ns)):
                rows.append(
                    PartRow(
                        file=file,
                        rank=rank,
                        iteration=iteration,
                        phase=phase,
                        by=by,
                        **groups[i]._asdict(),
                        num_events=int(num_events[i]),
                        busy_us=int(busy_ns[i]) / 1000,
                        total_us=int(total_ns[i]) / 1000,
                        alone_us=int(alone_ns[i]) / 1000,
                    )
                )
    return rows


def measure_groups(
    intervals: Intervals, group: NDArray[np.intp], num_groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per group [num_groups] the length of its union, the sum of its lengths, and how long it runs without any other.

    `intervals` [n, 2] in nanoseconds, `group` [n] from 0 to num_groups - 1.
    """
    total = np.zeros(num_groups, np.int64)
    np.add.at(total, group, intervals[:, 1] - intervals[:, 0])
    # Shifted apart, the groups merge in one go without touching each other.
    origin = intervals.min()
    stride = int(intervals.max()) - int(origin) + 1
    if stride * num_groups < 2**63:
        moments, shifted = None, intervals - origin
    else:
        # Ranks leave room for shifting, however far apart the moments of a damaged trace are.
        moments, ranks = np.unique(intervals, return_inverse=True)
        stride, shifted = len(moments), ranks.reshape(intervals.shape)
    unions = merge(shifted + (group * stride)[:, None])
    of_union = unions[:, 0] // stride
    unions = unions - (of_union * stride)[:, None]
    if moments is not None:
        unions = moments[unions]
    busy = np.zeros(num_groups, np.int64)
    np.add.at(busy, of_union, unions[:, 1] - unions[:, 0])
    return busy, total, _alone(unions, of_union, num_groups)


def _alone(unions: Intervals, group: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    moments = np.concatenate((unions[:, 0], unions[:, 1]))
    steps = np.repeat([1, -1], len(unions))
    order = np.argsort(moments, kind="stable")
    moments, steps, group = moments[order], steps[order], np.tile(group, 2)[order]
    running = np.cumsum(steps)[:-1]
    # Where one runs, the sum of the numbers of those that run is its number.
    which = np.cumsum(steps * group)[:-1]
    alone = np.zeros(num_groups, np.int64)
    np.add.at(alone, which[running == 1], np.diff(moments)[running == 1])
    return alone


def _by_class(activity: Activity, chosen: NDArray[np.intp]) -> tuple[list[_Group], NDArray[np.intp]]:
    labels, label = np.unique(activity.events.label[chosen], return_inverse=True)
    classes = [activity.classes[int(number)] for number in labels]
    groups = {kernel_class: _Group(*kernel_class, " ".join(reversed(kernel_class))) for kernel_class in classes}
    place = {kernel_class: i for i, kernel_class in enumerate(groups)}
    return list(groups.values()), np.array([place[kernel_class] for kernel_class in classes], np.intp)[label]


def _by_kernel(activity: Activity, chosen: NDArray[np.intp]) -> tuple[list[_Group], NDArray[np.intp]]:
    labels, label = np.unique(activity.events.label[chosen], return_inverse=True)
    groups = [_Group(*activity.classes[int(number)], activity.labels[number][1]) for number in labels]
    return groups, label


def _by_stream(activity: Activity, chosen: NDArray[np.intp]) -> tuple[list[_Group], NDArray[np.intp]]:
    lanes, lane = np.unique(activity.events.lane[chosen], return_inverse=True)
    groups = []
    for number, (_, on_lane) in zip(lanes, places_by_value(lane), strict=True):
        classes = [activity.classes[int(label)] for label in np.unique(activity.events.label[chosen[on_lane]])]
        kinds = [kind for kind in KINDS if any(kernel_class.kind == kind for kernel_class in classes)]
        libraries = sorted({kernel_class.library for kernel_class in classes})
        groups.append(_Group("+".join(kinds), "+".join(libraries), " ".join(activity.lanes[number])))
    return groups, lane


_GROUPINGS = {"class": _by_class, "kernel": _by_kernel, "stream": _by_stream}
