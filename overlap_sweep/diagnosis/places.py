"""Finds the modules, annotations and operators that were running on a thread at a moment."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.trace.columns import Events, Trace, concatenated
from overlap_sweep.trace.intervals import Intervals, contains, merge, places_by_value
from overlap_sweep.trace.kineto import MODULE

_NO_PLACE = re.compile(r"ProfilerStep#|(nccl|gloo|mpi|ucc|rccl|xccl):|## |PyTorch Profiler|Optimizer\.zero_grad")
_BACKWARD = "autograd::engine::evaluate_function: "
_NO_FUNCTION = re.compile(r"aten::|c10d::|_c10d_functional::|record_param_comms")
_OPERATOR = re.compile(r"aten::|c10d::")
_COLLECTIVE = re.compile(r"c10d::|nccl:|record_param_comms")


def is_no_place(name: str) -> bool:
    """Returns whether an annotation says nothing of where the program is, such as a step's or a backend's."""
    return _NO_PLACE.match(name) is not None


class Places:
    """The named ranges of a trace's host threads."""

    def __init__(self, trace: Trace, launches: Events) -> None:
        """`launches`: of computation."""
        names = [name for _, name in trace.labels]
        category = [category for category, _ in trace.labels]
        is_annotation = np.array(
            [category[i] == "user_annotation" and not is_no_place(name) for i, name in enumerate(names)], bool
        )
        is_backward = np.array([name.startswith(_BACKWARD) for name in names], bool)
        is_function = np.array([not _NO_FUNCTION.match(name) for name in names], bool) & ~is_backward
        is_operator = np.array([_OPERATOR.match(name) is not None for name in names], bool)
        is_call = np.array([name.startswith("c10d::") for name in names], bool)
        host = trace.host
        self._names = names
        annotations = host[is_annotation[host.label]]
        self._named = Nested(concatenated(annotations, trace.modules))
        self._functions = Nested(host[is_backward[host.label] | (trace.forward & is_function[host.label])])
        self._nodes = Nested(host[is_backward[host.label]])
        backward = host[is_backward[host.label]]
        self._backward = backward[np.argsort(backward.start_ns, kind="stable")]
        begun_ns = np.sort(host.start_ns[trace.forward & ~is_call[host.label]])
        # Not what checkpoints compute again.
        self._forward_ns = begun_ns[~contains(merge(backward.intervals), begun_ns)]
        self._begun_before = np.searchsorted(self._forward_ns, self._backward.start_ns)
        self._numbered = Nested(host[trace.forward & is_function[host.label]])
        self._launches = {lane: np.sort(launches.start_ns[here]) for lane, here in places_by_value(launches.lane)}
        self._operators = Nested(host[is_operator[host.label]])
        is_collective = np.array([_COLLECTIVE.match(name) is not None for name in names], bool)
        collectives = np.flatnonzero(is_collective[host.label])
        self._collectives = Nested(replace(host[collectives], label=collectives.astype(np.int32)))

    def at(self, thread: int, moment_ns: int) -> str:
        """Returns the innermost module, annotation or function of autograd; empty if there is none.

        If a function runs inside a module, both: `Attention_0: RowParallel`.
        """
        named, function = (ranges.innermost_span(thread, moment_ns) for ranges in (self._named, self._functions))
        labels = [ranges.innermost(thread, moment_ns) for ranges in (self._named, self._functions)]
        name, called = ("" if label is None else self._names[label] for label in labels)
        called = called.removeprefix(_BACKWARD).removeprefix("torch::autograd::")
        if named is None or function is None or named[0] >= function[0]:
            return name.removeprefix(MODULE) or called
        return f"{name.removeprefix(MODULE)}: {called}" if name.startswith(MODULE) else called

    def operator_at(self, thread: int, moment_ns: int) -> str:
        """Returns the outermost operator of PyTorch; empty if there is none."""
        label = self._operators.outermost(thread, moment_ns)
        return "" if label is None else self._names[label]

    def collectives_at(self, thread: int, moment_ns: int) -> list[int]:
        """Returns operators and annotations of collectives, indices of `trace.host`, from the innermost outwards."""
        return self._collectives.all_at(thread, moment_ns)

    def collectives_before(self, thread: int, moment_ns: int) -> Iterator[int]:
        """Yields operators and annotations of collectives that began before the moment, indices of `trace.host`, the
        last first."""
        return self._collectives.begun_before(thread, moment_ns)

    def in_function(self, thread: int, moment_ns: int) -> bool:
        """Returns whether a function that autograd numbered as part of a forward computation runs at the moment."""
        return self._numbered.innermost_span(thread, moment_ns) is not None

    def computed_before(self, thread: int, moment_ns: int) -> bool:
        """Returns whether the function of a forward computation that runs at the moment has launched computation."""
        span = self._numbered.innermost_span(thread, moment_ns)
        launches = self._launches.get(thread)
        if span is None or launches is None:
            return False
        return bool(np.searchsorted(launches, span[0]) < np.searchsorted(launches, moment_ns))

    def is_backward(self, thread: int, moment_ns: int) -> bool:
        """Returns whether autograd runs a function of the backward pass at the moment."""
        return self._nodes.innermost(thread, moment_ns) is not None

    def follows_backward(self, moment_ns: int) -> bool:
        """Returns whether a backward pass has begun and no forward computation since, on any thread."""
        begun = int(np.searchsorted(self._backward.start_ns, moment_ns, side="right")) - 1
        return begun >= 0 and bool(self._begun_before[begun] == np.searchsorted(self._forward_ns, moment_ns))

    def backward_passes(self) -> Intervals:
        """Returns when the backward passes ran, each after the forward computation of a microbatch."""
        if not len(self._backward):
            return np.empty((0, 2), np.int64)
        first = np.unique(self._begun_before, return_index=True)[1]
        return np.stack(
            (self._backward.start_ns[first], np.maximum.reduceat(self._backward.end_ns, first)), axis=1
        ).astype(np.int64)

    def accumulates(self, thread: int, moment_ns: int) -> bool:
        """Returns whether autograd accumulates gradients at the moment, or runs the hooks there."""
        label = self._nodes.innermost(thread, moment_ns)
        return label is not None and "AccumulateGrad" in self._names[label]


class Nested:
    """Ranges of several threads; those of one thread contain each other or are apart."""

    def __init__(self, events: Events) -> None:
        self._by_lane: dict[int, tuple[list[int], list[int], list[int], NDArray[np.int64]]] = {}
        for lane, here in places_by_value(events.lane):
            own = events[here[np.lexsort((-events.end_ns[here], events.start_ns[here]))]]
            starts, ends = own.start_ns.tolist(), own.end_ns.tolist()
            self._by_lane[lane] = (starts, ends, own.label.tolist(), _parents(starts, ends))

    def around(self, lane: int, moment_ns: int) -> Iterator[tuple[int, int, int]]:
        """Yields label, start and end of the ranges that contain the moment, from the innermost outwards."""
        starts, ends, labels, parents = self._by_lane.get(lane, ([], [], [], np.empty(0, np.int64)))
        i = bisect_right(starts, moment_ns) - 1
        while i >= 0:
            if ends[i] > moment_ns:
                yield labels[i], starts[i], ends[i]
            i = int(parents[i])

    def begun_before(self, lane: int, moment_ns: int) -> Iterator[int]:
        """Yields the labels, the last first."""
        starts, _, labels, _ = self._by_lane.get(lane, ([], [], [], np.empty(0, np.int64)))
        return (labels[i] for i in range(bisect_right(starts, moment_ns) - 1, -1, -1))

    def innermost(self, lane: int, moment_ns: int) -> int | None:
        """Returns the label; None if there is no range."""
        return next((label for label, _, _ in self.around(lane, moment_ns)), None)

    def innermost_span(self, lane: int, moment_ns: int) -> tuple[int, int] | None:
        return next(((start, end) for _, start, end in self.around(lane, moment_ns)), None)

    def outermost(self, lane: int, moment_ns: int) -> int | None:
        """Returns the label; None if there is no range."""
        return next(reversed(self.all_at(lane, moment_ns)), None)

    def all_at(self, lane: int, moment_ns: int) -> list[int]:
        """Returns the labels, from the innermost outwards."""
        return [label for label, _, _ in self.around(lane, moment_ns)]


def _parents(starts: list[int], ends: list[int]) -> NDArray[np.int64]:
    """Returns the index of the range around each range, or -1."""
    parents = np.full(len(starts), -1, np.int64)
    open_: list[int] = []
    for i, start in enumerate(starts):
        while open_ and ends[open_[-1]] <= start:
            open_.pop()
        parents[i] = open_[-1] if open_ else -1
        open_.append(i)
    return parents
