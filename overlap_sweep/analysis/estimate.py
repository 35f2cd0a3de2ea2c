"""Medians with their noise: what makes two times different, and how repeated measurements are put together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap_sweep.run_directory import DefaultTiming, Timing

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A median time and the half-width of its notch, in microseconds."""

    time_us: float
    noise_us: float
    repeats: int

    def differs_from(self, other: Estimate) -> bool:
        """Whether the difference is larger than both noises, added as independent errors are: in quadrature."""
        return abs(self.time_us - other.time_us) > math.hypot(self.noise_us, other.noise_us)


@dataclass(frozen=True)
class Interval:
    """Where a median lies, and with what probability it does."""

    low: float
    high: float
    coverage: float

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


def notch_us(samples_us: Sequence[float]) -> float:
    """Half-width of the notch around a median: 1.57 x IQR / sqrt(n); NaN of a single sample, which tells nothing.

    McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1), 1978.
    """
    if len(samples_us) == 1:
        return math.nan
    q1_us, _, q3_us = statistics.quantiles(samples_us, n=4, method="inclusive")
    return 1.57 * (q3_us - q1_us) / math.sqrt(len(samples_us))


def estimate(samples_us: Sequence[float]) -> Estimate:
    return Estimate(statistics.median(samples_us), notch_us(samples_us), len(samples_us))


def normalised(pairs: Iterable[tuple[Timing, Timing]], none: Estimate) -> Estimate:
    """Pool measurements of one setting, each relative to the none time that was measured beside it.

    `pairs` are (setting, none of the same point). Each sample is scaled by the ratio of the case's none time to its
    own, so that drift between points cancels; the noise of that own none time is part of the result's.
    """
    samples_us: list[float] = []
    relative_noises = []
    for timing, beside in pairs:
        scale = none.time_us / beside.median_us
        samples_us += [sample * scale for sample in timing.samples_us]
        relative_noises.append(notch_us(beside.samples_us) / beside.median_us)
    pooled = estimate(samples_us)
    scale_noise = math.hypot(*relative_noises) / len(relative_noises)
    return Estimate(pooled.time_us, math.hypot(pooled.noise_us, pooled.time_us * scale_noise), pooled.repeats)


def pooled_none(timings: Sequence[Timing]) -> Estimate:
    """The none time of a case: the median over its points; its noise is that of all their samples, drift taken out."""
    time_us = statistics.median(timing.median_us for timing in timings)
    scaled = [sample * time_us / timing.median_us for timing in timings for sample in timing.samples_us]
    return Estimate(time_us, notch_us(scaled), len(scaled))


def distinct(defaults: Iterable[DefaultTiming]) -> list[DefaultTiming]:
    """Each measurement of the default once, in time order, however many points carry it."""
    found = {(default.measured, *default.default.samples_us): default for default in defaults}
    return [found[key] for key in sorted(found)]


def median_interval(values: Sequence[float]) -> Interval:
    """Distribution-free confidence interval of the median: from the k-th lowest to the k-th highest of n values.

    It covers the median with a probability of sum over i = k ... n - k of C(n, i) / 2^n, since the number of values
    below the median is binomial. k is the largest that reaches CONFIDENCE; where none does (n < 6) it is 1,
    and `coverage` says what the lowest and the highest value reach. Conover, Practical Nonparametric Statistics,
    3rd edition, 1999, section 3.2.
    """
    ordered, n = sorted(values), len(values)

    def coverage(k: int) -> float:
        return sum(math.comb(n, i) for i in range(k, n - k + 1)) / 2**n

    k = max((k for k in range(1, n // 2 + 1) if coverage(k) >= CONFIDENCE), default=1)
    return Interval(ordered[k - 1], ordered[n - k], coverage(k))
