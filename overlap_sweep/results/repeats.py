"""Decides when a measurement needs no further repeats. The noise is that of the analysis, from the samples so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overlap_sweep.results.estimate import estimate, normalised
from overlap_sweep.results.measured import summarise


def enough_of_pass(point_us: Sequence[float], none_us: Sequence[float], noise_goal: float, best: float) -> bool:
    """Returns whether a pass with these samples needs no more.

    That is if the noise of its time is at most the fraction `noise_goal` of it, or if it is slower than the best
    setting so far by more than that fraction and the noise. `best`: time of that setting over that of no overlap.
    """
    none = estimate(none_us)
    time = normalised([(summarise(list(point_us)), summarise(list(none_us)))], none).relative_to(none.time_us)
    return time.noise_us <= noise_goal * time.time_us or time.time_us - time.noise_us > (1 + noise_goal) * best


def enough_of_rounds(others_us: Iterable[Sequence[float]], reference_us: Sequence[float], noise_goal: float) -> bool:
    """Returns whether variants that took turns need no further rounds: the noise of the ratio of each one's time to
    that of the reference in the same round is at most `noise_goal`. False if there is none to compare."""
    compared = list(others_us)
    ratios = ([time / reference for time, reference in zip(one, reference_us, strict=True)] for one in compared)
    return bool(compared) and all(estimate(ratio).noise_us <= noise_goal for ratio in ratios)
