"""Says how much slower GEMMs are next to communication than alone.

A trace does not say what sizes a GEMM multiplies, and persistent kernels have as many thread blocks for any. So GEMMs
of one kernel are the same if they were launched after the same kernels, or else if their times allow no other.
"""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlap_sweep.diagnosis import once
from overlap_sweep.diagnosis.facts import RankFacts, Work
from overlap_sweep.trace.intervals import Intervals, Measure, intervals_of, places_by_value

MOST_SLOWED = 2.25
"""Time of a GEMM next to communication over that of the same alone on a GPU, above which it is taken for one of another
size. One wave of thread blocks becomes two if communication has some multiprocessors: 2.0 on two H200s, seldom more."""

LEAST_SLOWED = 0.9
"""Ratio of these times below which it is taken for one of a smaller size."""

MOST_SLOWED_OF_SIZES = 1.4
"""MOST_SLOWED where the kernel's times alone are of several sizes, none of which is known to be this one's."""

MOST_BEHIND = 0.5
"""Share of a GEMM's time behind another, above which the two share multiprocessors, and neither's time is its own."""


def slowed_gemms(facts: RankFacts) -> Iterator[tuple[int, float, float]]:
    """Yields the GEMMs next to communication: index into the rank's work, time of the same GEMM alone, from all steps,
    and the time beyond it, negative if it was faster. Nanoseconds. On a GPU one has no multiprocessors yet while
    another runs that started before it."""
    work = facts.work
    comm = Measure(intervals_of(call for call in facts.calls if not call.is_wait))
    whole = (work.end_ns - work.start_ns).astype(np.float64)
    behind = _behind_ns(work) if facts.on_device else np.zeros_like(whole)
    took, beside = whole - behind, comm.within(work.intervals) / np.maximum(whole, 1)
    # Communication overlaps next to nothing of a GEMM alone, and enough of one whose slowdown is counted.
    steady = ~np.isin(work.step, [*facts.startup_steps])
    alone = (beside <= 0.02) & steady
    gemms = np.flatnonzero(work.is_gemm & (whole > 0) & (behind <= MOST_BEHIND * whole))
    after = _after(work) if facts.on_device else np.zeros(len(work), np.int64)
    # On a CPU what communicates may take most of the cores.
    most, most_of_sizes = (MOST_SLOWED, MOST_SLOWED_OF_SIZES) if facts.on_device else (inf, inf)
    for _, places in places_by_value(work.signature[gemms]):
        own = gemms[places]
        of_kernel, overlapped = _levels(took[own[alone[own]]]), own[beside[own] >= 0.1]
        if not len(of_kernel):
            here = overlapped[steady[overlapped]]
            of_kernel = _level_without_overlap(beside[here], took[here])
        most_of_kernel = most if len(of_kernel) == 1 else most_of_sizes
        for _, alike in places_by_value(after[own]):
            same = own[alike]
            slowed = same[beside[same] >= 0.1]
            alone_ns = _times_alone(_levels(took[same[alone[same]]]), took[slowed], most)
            alone_ns = np.where(alone_ns > 0, alone_ns, _times_alone(of_kernel, took[slowed], most_of_kernel))
            slowed, alone_ns = slowed[alone_ns > 0], alone_ns[alone_ns > 0]
            yield from zip(slowed.tolist(), alone_ns.tolist(), (took[slowed] - alone_ns).tolist(), strict=True)


def _times_alone(levels: NDArray[np.float64], took_ns: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """Returns for GEMMs that take so long next to communication the slowest of these times alone that is not slower, or
    hardly; 0 if there is none, or it took more than `most` times as long."""
    place = np.searchsorted(levels, took_ns / LEAST_SLOWED, side="right")
    alone_ns = np.concatenate(([0.0], levels))[place]
    return np.where(took_ns / most <= alone_ns, alone_ns, 0.0)


def _after(work: Work) -> NDArray[np.int64]:
    """Returns for all work a number that is the same for what was launched after two kernels of the same names and
    thread blocks."""
    order = np.argsort(work.launch_ns, kind="stable")
    signatures = np.concatenate(([0, 0], work.signature[order].astype(np.int64) + 1))
    after = np.zeros(len(work), np.int64)
    after[order] = signatures[:-2] * (signatures.max() + 1) + signatures[1:-1]
    return after


def _behind_ns(work: Work) -> NDArray[np.float64]:
    """Returns how long after its start another GEMM runs that started before it; 0 of what is no GEMM."""
    behind = np.zeros(len(work))
    gemms = np.flatnonzero(work.is_gemm)
    gemms = gemms[np.lexsort((work.end_ns[gemms], work.start_ns[gemms]))]
    reach = np.maximum.accumulate(work.end_ns[gemms])[:-1]
    later = gemms[1:]
    behind[later] = np.maximum(np.minimum(reach, work.end_ns[later]) - work.start_ns[later], 0)
    return behind


def _levels(times_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the medians of the groups that the times fall into, ascending; a single time is no group: communication
    may have begun before the recording, and have slowed it."""
    times_ns = np.sort(times_ns)
    # Kernels of one name and grid whose times differ more multiply different sizes.
    cuts = np.flatnonzero(times_ns[1:] > 1.12 * times_ns[:-1]) + 1
    return np.array([np.median(group) for group in np.split(times_ns, cuts) if len(group) > 1])


def _level_without_overlap(shares: NDArray[np.float64], times_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the time alone that the times of overlapped GEMMs lead to as a line over the overlapped share; empty if
    they don't follow one."""
    if len(shares) < 6 or np.ptp(shares) < 0.4 or not np.ptp(times_ns):
        return np.empty(0)
    if np.corrcoef(shares, times_ns)[0, 1] < 0.8:
        return np.empty(0)
    _, alone_ns = np.polyfit(shares, times_ns, 1)
    return np.array([alone_ns]) if alone_ns > 0 else np.empty(0)


def slowed_by_call(facts: RankFacts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns for each call the time that GEMMs next to it lost, and how long GEMMs next to it would have run alone."""
    spans = intervals_of(facts.calls)
    lost, alone = np.zeros(len(spans)), np.zeros(len(spans))
    reach = np.maximum.accumulate(spans[:, 1])
    for i, baseline, extra in slowed_gemms(facts):
        start, end = int(facts.work.start_ns[i]), int(facts.work.end_ns[i])
        near = slice(np.searchsorted(reach, start, side="right"), np.searchsorted(spans[:, 0], end))
        common = np.maximum(np.minimum(spans[near, 1], end) - np.maximum(spans[near, 0], start), 0)
        shares = common / max(common.sum(), 1)
        lost[near] += shares * extra
        alone[near] += shares * baseline
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
    extra, alone = once(facts, slowed_by_call)
    ends_ns = intervals_of(facts.calls)[:, 1]
    hidden = _hidden_ns(np.stack((ends_ns - np.rint(moving_ns).astype(np.int64), ends_ns), axis=1), gaps)
    return {i: SlowedCall(float(extra[i]), float(alone[i]), float(hidden[i])) for i in np.flatnonzero(extra).tolist()}


def lost_of_hidden(facts: RankFacts, gaps: Intervals) -> float:
    """Returns what GEMMs lost next to communication, as a share of the time that computation hid. `gaps`: when nothing
    computes."""
    steady = np.isin([call.step for call in facts.calls], facts.steady_steps)
    lost, _ = once(facts, slowed_by_call)
    hidden = _hidden_ns(intervals_of(facts.calls), gaps)[steady].sum()
    return float(lost[steady].sum() / hidden) if hidden > 0 else 0.0


def _hidden_ns(spans: Intervals, gaps: Intervals) -> NDArray[np.float64]:
    """Returns how long computation runs in each of the spans. `gaps`: when nothing computes."""
    return (spans[:, 1] - spans[:, 0]) - Measure(gaps).within(spans)
