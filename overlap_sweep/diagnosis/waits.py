"""Finds when the host waited for the device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from overlap_sweep.diagnosis.places import Places
from overlap_sweep.trace.activity import step_ranges
from overlap_sweep.trace.columns import Trace

BLOCKS_FROM_NS = 10_000
"""Shortest call that counts as a wait of the host; synchronising an idle device takes a few microseconds."""

COPY_BLOCKS_FROM_NS = 100_000
"""The same for asynchronous copies, which block only if the memory is not pinned."""

SYNC = re.compile(r"(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize|(cuda|hip)Memcpy$")
_WHOLE_DEVICE = re.compile(r"(cuda|hip)DeviceSynchronize|cuCtxSynchronize")
_COPY = re.compile(r"(cuda|hip)MemcpyAsync|hipMemcpyWithStream")


@dataclass(frozen=True)
class Wait:
    """A call in which the host waited for the device."""

    start_ns: int
    end_ns: int
    name: str
    """The call of the runtime."""
    operator: str
    """Operator that called it, such as aten::item; empty if none did."""
    where: str
    ends_step: bool = False
    """Whether it waits for the whole device at the end of a ProfilerStep, as programs do to take times."""


def waits_of(trace: Trace, places: Places, *, apart: bool) -> Iterator[Wait]:
    """Yields the waits that can delay a step.

    With ProfilerSteps only those inside of them. If the steps are `apart`, because something else runs between them, as
    in a benchmark, then what ends a step delays none.
    """
    launches = trace.launches
    if not len(trace.device):
        return
    of_device = np.isin(launches.correlation, trace.device.correlation)
    with_kernels = np.unique(launches.lane[of_device])
    sync, copy = (
        np.array([pattern.match(name) is not None for _, name in trace.labels], bool)[launches.label]
        for pattern in (SYNC, _COPY)
    )
    took = launches.end_ns - launches.start_ns
    blocked = (sync & (took >= BLOCKS_FROM_NS)) | (copy & (took >= COPY_BLOCKS_FROM_NS))
    chosen = np.flatnonzero(blocked & np.isin(launches.lane, with_kernels))
    ranges, launched = step_ranges(trace), np.sort(launches.start_ns[of_device])
    for i in chosen[np.argsort(launches.start_ns[chosen], kind="stable")].tolist():
        start_ns, end_ns, thread = int(launches.start_ns[i]), int(launches.end_ns[i]), int(launches.lane[i])
        name, operator = trace.labels[launches.label[i]][1], places.operator_at(thread, start_ns)
        step_end_ns = next((int(end) for start, end in ranges if start <= start_ns < end), None)
        if step_end_ns is None and len(ranges):
            continue
        ends_step = bool(
            step_end_ns is not None
            and np.searchsorted(launched, start_ns) == np.searchsorted(launched, step_end_ns)
            and _WHOLE_DEVICE.match(name)
            and not operator
        )
        if not (ends_step and apart):
            yield Wait(start_ns, end_ns, name, operator, places.at(thread, start_ns), ends_step)
