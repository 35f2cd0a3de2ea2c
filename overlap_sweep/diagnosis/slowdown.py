"""Measures how much slower GEMMs are next to communication than the same GEMMs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis.exposure import Measure
from overlap_sweep.diagnosis.facts import RankFacts
from overlap_sweep.trace.intervals import Intervals, intervals_of, places_by_value

ALONE = 0.02
"""Most of a GEMM's time that communication may overlap for the GEMM to count as alone."""

BESIDE = 0.1
"""Least of a GEMM's time that communication must overlap for its slowdown to be counted."""

ANOTHER_GEMM = 1.12
"""Kernels of one name and grid whose times differ by this factor multiply different sizes."""

ENOUGH_ALONE = 2

ENOUGH_SHARES, SPREAD_OF_SHARES, FITS = 6, 0.4, 0.8
"""Of GEMMs that never run alone: how many are needed, how much the share that communication overlaps must vary between
them, and how well (correlation) their times must follow it, to tell the time alone."""


@dataclass(frozen=True)
class Slowed:
    """GEMMs next to communication, and what it cost them. Columns of equal length."""

    work: NDArray[np.intp]
    """Index into the rank's work."""
    alone_ns: NDArray[np.float64]
    """Median time of the same GEMM alone."""
    extra_ns: NDArray[np.float64]
    """Time beyond it; negative if it was faster."""
    unknown: int
    """Number of GEMMs next to communication that never ran alone."""


def slowed_gemms(facts: RankFacts) -> Slowed:
    """Returns the GEMMs next to communication with the times of the same GEMMs alone, from all steps.

    A kernel's name and grid may stand for several sizes: then the times alone fall into groups, and a GEMM is compared
    with the slowest group that is not slower than it, which makes the slowdown a lower bound.
    """
    work = facts.work
    comm = Measure(intervals_of(call for call in facts.calls if not call.is_wait))
    took = (work.end_ns - work.start_ns).astype(np.float64)
    beside = comm.within(work.intervals) / np.maximum(took, 1)
    steady = ~np.isin(work.step, [step.number for step in facts.steps if step.startup])
    gemms = np.flatnonzero(work.is_gemm & (took > 0))
    chosen: list[int] = []
    alone_ns: list[float] = []
    unknown = 0
    for _, places in places_by_value(work.signature[gemms]):
        own = gemms[places]
        levels = _levels(took[own[(beside[own] <= ALONE) & steady[own]]])
        overlapped = own[beside[own] >= BESIDE]
        if not len(levels):
            here = overlapped[steady[overlapped]]
            levels = _level_without_overlap(beside[here], took[here])
        if not len(levels):
            unknown += len(overlapped)
            continue
        level = np.searchsorted(levels, took[overlapped] * 1.0, side="right") - 1
        chosen += overlapped.tolist()
        alone_ns += levels[np.maximum(level, 0)].tolist()
    works, baseline = np.array(chosen, np.intp), np.array(alone_ns, np.float64)
    return Slowed(works, baseline, took[works] - baseline, unknown)


def _levels(times_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the medians of the groups that the times fall into, ascending; a single time is no group."""
    if len(times_ns) < ENOUGH_ALONE:
        return np.empty(0)
    times_ns = np.sort(times_ns)
    cuts = np.flatnonzero(times_ns[1:] > ANOTHER_GEMM * times_ns[:-1]) + 1
    return np.array([np.median(group) for group in np.split(times_ns, cuts)])


def _level_without_overlap(shares: NDArray[np.float64], times_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the time alone that the times of overlapped GEMMs lead to as a line over the overlapped share; empty if
    they don't follow one."""
    if len(shares) < ENOUGH_SHARES or np.ptp(shares) < SPREAD_OF_SHARES or not np.ptp(times_ns):
        return np.empty(0)
    if np.corrcoef(shares, times_ns)[0, 1] < FITS:
        return np.empty(0)
    _, alone_ns = np.polyfit(shares, times_ns, 1)
    return np.array([alone_ns]) if alone_ns > 0 else np.empty(0)


def slowed_by_call(facts: RankFacts, slowed: Slowed) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns for each call the time that GEMMs next to it lost, and how long GEMMs next to it would have run alone."""
    lost, alone = np.zeros(len(facts.calls)), np.zeros(len(facts.calls))
    if not len(slowed.work) or not facts.calls:
        return lost, alone
    starts = np.array([call.start_ns for call in facts.calls], np.int64)
    ends = np.array([call.end_ns for call in facts.calls], np.int64)
    reach = np.maximum.accumulate(ends)
    for i, extra, baseline in zip(slowed.work.tolist(), slowed.extra_ns, slowed.alone_ns, strict=True):
        start, end = int(facts.work.start_ns[i]), int(facts.work.end_ns[i])
        first, beyond = np.searchsorted(reach, start, side="right"), np.searchsorted(starts, end)
        common = np.minimum(ends[first:beyond], end) - np.maximum(starts[first:beyond], start)
        shares = np.maximum(common, 0) / max(np.maximum(common, 0).sum(), 1)
        lost[first:beyond] += shares * extra
        alone[first:beyond] += shares * baseline
    return lost, alone


class SlowedCall(NamedTuple):
    """What GEMMs lost next to a call. Nanoseconds."""

    extra_ns: float
    """Negative if they were faster than alone."""
    alone_ns: float
    """How long they would have taken alone."""
    hidden_ns: float
    """How long computation ran next to the call."""


def slowed_calls(facts: RankFacts, gaps: Intervals, moving_ns: Sequence[float]) -> dict[int, SlowedCall]:
    """Returns what GEMMs lost next to each call. `gaps`: when nothing computes; `moving_ns`: by call, how long it ran
    without waiting, before its end."""
    extra, alone = slowed_by_call(facts, slowed_gemms(facts))
    moving = [(call.end_ns - round(ns), call.end_ns) for call, ns in zip(facts.calls, moving_ns, strict=True)]
    hidden = hidden_ns(moving, gaps)
    return {i: SlowedCall(float(extra[i]), float(alone[i]), float(hidden[i])) for i in np.flatnonzero(extra).tolist()}


def hidden_ns(calls: Sequence[tuple[int, int]], gaps: Intervals) -> NDArray[np.float64]:
    """Returns how long computation runs next to each call, given its start and end. `gaps`: when nothing computes."""
    spans = np.array(calls, np.int64).reshape(-1, 2)
    return (spans[:, 1] - spans[:, 0]) - Measure(gaps).within(spans)


def lost_of_hidden(facts: RankFacts, gaps: Intervals) -> float:
    """Returns what GEMMs lost next to communication, as a share of the time that computation hid. `gaps`: when nothing
    computes."""
    steady = np.isin([call.step for call in facts.calls], [step.number for step in facts.steps if not step.startup])
    lost, _ = slowed_by_call(facts, slowed_gemms(facts))
    hidden = hidden_ns([(call.start_ns, call.end_ns) for call in facts.calls], gaps)[steady].sum()
    return float(lost[steady].sum() / hidden) if hidden > 0 else 0.0
