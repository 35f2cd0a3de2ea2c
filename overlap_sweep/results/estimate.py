"""Medians with their noise: what makes two times different, and how repeated measurements are put together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from overlap_sweep.results.measured import Timing

CONFIDENCE = 0.95
"""What an interval covers, and 1 minus how often two equal times are told apart."""

TYPICAL_CORRELATION = 0.3
"""Between one sample and the next: the median over recorded operators, layers and training steps on H200s."""
_SAMPLES_BEHIND_IT = 10
"""How many samples of one's own weigh as much as that."""
_EFFICIENCY = 0.37
"""Of an interquartile range as a measure of spread, against the standard deviation: it counts for so many samples."""
_IQR_OF_SD = 1.349
_MEDIAN_OF_MEAN = 1.2533
"""The standard error of a median over that of a mean: sqrt(pi / 2). These three hold for normal errors."""


@dataclass(frozen=True)
class Estimate:
    """A median time, in microseconds, and how well it is known."""

    time_us: float
    noise_us: float
    """Half-width of its confidence interval, which covers the true time with a probability of CONFIDENCE."""
    repeats: int
    freedom: float = math.inf
    """Degrees of freedom that the noise was estimated with: how well the noise itself is known."""

    @property
    def error_us(self) -> float:
        """Returns the standard error of the time."""
        return self.noise_us / student(1 - CONFIDENCE, self.freedom)

    def differs_from(self, other: Estimate, pairs: int = 1) -> bool:
        """Returns whether the two are apart by more than chance explains, with a probability of CONFIDENCE.

        `pairs` is how many such questions one decision asks: the best of many equal settings would seem faster by
        chance, so that each must be surer (Bonferroni). Errors add in quadrature; degrees of freedom by Welch and
        Satterthwaite.
        """
        return abs(self.time_us - other.time_us) > gap_noise_us(self, other, pairs)

    def plus(self, other: Estimate, sign: int = 1) -> Estimate:
        """Returns the sum of the two, or with a sign of -1 their difference: errors add in either."""
        noise_us, freedom = _sum_of_noises((self.noise_us, self.freedom), (other.noise_us, other.freedom))
        return Estimate(self.time_us + sign * other.time_us, noise_us, self.repeats + other.repeats, freedom)

    def relative_to(self, unit_us: float) -> Estimate:
        """Returns the estimate in multiples of the unit."""
        return replace(self, time_us=self.time_us / unit_us, noise_us=self.noise_us / unit_us)

    def with_error(self, error_us: float, freedom: float = math.inf) -> Estimate:
        """Returns the same with a further, independent error, given as a standard error."""
        further = (_half_width(error_us, freedom), freedom)
        noise_us, both = _sum_of_noises((self.noise_us, self.freedom), further)
        return replace(self, noise_us=noise_us, freedom=both)


EXACTLY_ONE = Estimate(1.0, 0.0, 1)
"""What a ratio is where nothing differs."""


@dataclass(frozen=True)
class Interval:
    """Where a ratio lies with a probability of CONFIDENCE."""

    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return value < self.low or value > self.high


def gap_noise_us(one: Estimate, other: Estimate, pairs: int = 1) -> float:
    """Returns what the difference of the two must exceed; NaN where a noise is unknown."""
    noise_us, freedom = _sum_of_noises((one.noise_us, one.freedom), (other.noise_us, other.freedom))
    return noise_us * student((1 - CONFIDENCE) / pairs, freedom) / student(1 - CONFIDENCE, freedom)


@cache
def student(error: float, freedom: float) -> float:
    """Returns the two-sided quantile of Student's distribution: beyond it on either side lies a probability of `error`.

    Expansion in 1 / freedom; Abramowitz and Stegun, 26.7.5. At 2 degrees of freedom and 5 % it is 2 % low.
    """
    x = statistics.NormalDist().inv_cdf(1 - error / 2)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _half_width(error_us: float, freedom: float) -> float:
    """Returns half the width of the confidence interval, from a standard error."""
    return error_us * student(1 - CONFIDENCE, freedom)


def _sum_of_noises(*noises: tuple[float, float]) -> tuple[float, float]:
    """Returns half-width and degrees of freedom of a sum of independent errors, each given so."""
    errors = [(noise_us / student(1 - CONFIDENCE, freedom), freedom) for noise_us, freedom in noises]
    total = math.hypot(*(error for error, _ in errors))
    spread = sum(error**4 / freedom for error, freedom in errors)
    both = total**4 / spread if spread else math.inf
    return _half_width(total, both), both


def correlation(samples: Sequence[float]) -> float:
    """Returns the correlation between one sample and the next, from 0 to 0.9; of few samples mostly the typical one.

    The first sample autocorrelation, less its bias of -(1 + 4 r) / n (Marriott and Pope, Biometrika 41, 1954).
    """
    n, mean = len(samples), statistics.fmean(samples)
    squares = sum((sample - mean) ** 2 for sample in samples)
    if not squares:
        return 0.0
    raw = sum((one - mean) * (next_ - mean) for one, next_ in pairwise(samples)) / squares
    found = raw + (1 + 4 * raw) / n
    weighted = (n * found + _SAMPLES_BEHIND_IT * TYPICAL_CORRELATION) / (n + _SAMPLES_BEHIND_IT)
    return min(max(weighted, 0.0), 0.9)


def estimate(*series: Sequence[float]) -> Estimate:
    """Returns the median of all samples, which may come in several series. Each series is in the order of measuring.

    Its noise is that of a median of n (1 - r) / (1 + r) independent samples, where r is the correlation between
    successive ones; NaN of a single sample.
    """
    samples = [sample for one in series for sample in one]
    median = statistics.median(samples)
    if len(samples) == 1:
        return Estimate(median, math.nan, 1, 1.0)
    q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    independent, freedom = 0.0, 0.0
    for one in series:
        r = correlation(one)
        independent += len(one) * (1 - r) / (1 + r)
        freedom += _EFFICIENCY * (len(one) - 1) * (1 - r**2) / (1 + r**2)
    error = _MEDIAN_OF_MEAN * (q3 - q1) / _IQR_OF_SD / math.sqrt(independent)
    freedom = max(freedom, 2.0)
    return Estimate(median, _half_width(error, freedom), len(samples), freedom)


def normalised(pairs: Iterable[tuple[Timing, Timing]], none: Estimate) -> Estimate:
    """Pools measurements of one setting, each relative to the none time that was measured beside it.

    `pairs` are (setting, none of the same point). Each sample is scaled by the ratio of the case's none time to its
    own, so that drift between points cancels; the noise of that own none time is part of the result's.
    """
    series: list[list[float]] = []
    besides = []
    for timing, beside in pairs:
        scale = none.time_us / beside.median_us
        series.append([sample * scale for sample in timing.samples_us])
        own = estimate(beside.samples_us)
        besides.append((own.noise_us * scale * timing.median_us / beside.median_us, own.freedom))
    pooled = estimate(*series)
    shares = [(noise_us / len(besides), freedom) for noise_us, freedom in besides]
    noise_us, freedom = _sum_of_noises((pooled.noise_us, pooled.freedom), *shares)
    return Estimate(pooled.time_us, noise_us, pooled.repeats, freedom)


def pooled_none(timings: Sequence[Timing]) -> Estimate:
    """Returns the none time of a case: the median over its points, with the noise of all samples, drift taken out."""
    time_us = statistics.median(timing.median_us for timing in timings)
    scaled = [[sample * time_us / timing.median_us for sample in timing.samples_us] for timing in timings]
    return replace(estimate(*scaled), time_us=time_us)


def hidden_fraction(time_us: float, none_us: float, floor_us: float) -> float:
    """Returns (none - t) / (none - floor): 1 hides all communication, 0 none, below 0 harms. NaN where none is free."""
    return (none_us - time_us) / (none_us - floor_us) if none_us > floor_us else math.nan


NOTABLE_DRIFT = 0.05
"""From this change on the report speaks of drift."""


def later_change(times_us: Sequence[float]) -> float:
    """Returns the median of the later half over the median of the earlier half, minus 1. Of at least two times."""
    half = len(times_us) // 2
    return statistics.median(times_us[-half:]) / statistics.median(times_us[:half]) - 1
