"""Medians with their noise: when two times differ, and how repeated measurements are pooled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from overlap_sweep.results.measured import Timing

CONFIDENCE = 0.95
"""Coverage of the intervals; 1 minus the rate at which equal times are found different."""

TYPICAL_CORRELATION = 0.3
"""Correlation of successive samples: median over recorded operators, layers and training steps on H200s."""
_SAMPLES_BEHIND_IT = 10
"""Number of own samples that weigh as much as the typical correlation."""
_EFFICIENCY = 0.37
"""Statistical efficiency of the interquartile range against the standard deviation."""
_IQR_OF_SD = 1.349
_MEDIAN_OF_MEAN = 1.2533
"""Standard error of a median over that of a mean: sqrt(pi / 2). These three are for normal errors."""

LEAST_RUNS = 2
"""Runs of a setting below which it is neither faster nor slower than another."""
LEAST_FREEDOM = 4
"""Runs beyond each setting's first, over all settings, below which none is faster or slower. With fewer, load that
comes and goes is likely enough to meet all runs of one setting and none of another."""
_OTHERS_WEIGHT = 2
"""Degrees of freedom of a setting's own runs that weigh as much as the runs of all settings."""


@dataclass(frozen=True)
class Estimate:
    """A median time in microseconds, with its uncertainty."""

    time_us: float
    noise_us: float
    """Half-width of the confidence interval, which covers the true time with a probability of CONFIDENCE."""
    repeats: int
    freedom: float = math.inf
    """Degrees of freedom of the noise: how well the noise itself is known."""
    runs: int = 0
    """Number of runs that it is the mean of, if the noise is that between runs."""
    between: RunNoise | None = None
    """That noise, which the settings of a case share; None if the noise is another one."""

    @property
    def error_us(self) -> float:
        return self.noise_us / student(1 - CONFIDENCE, self.freedom)

    def differs_from(self, other: Estimate, pairs: int = 1) -> bool:
        """Returns whether the two times differ beyond the noise, with a probability of CONFIDENCE.

        `pairs` is the number of comparisons of one decision: the best of many equal settings would seem faster by
        chance, so each comparison must be surer (Bonferroni). Errors add in quadrature; degrees of freedom by Welch
        and Satterthwaite.
        """
        return abs(self.time_us - other.time_us) > gap_noise_us(self, other, pairs)

    def relative_to(self, unit_us: float) -> Estimate:
        """Returns the estimate in multiples of the unit."""
        return replace(self, time_us=self.time_us / unit_us, noise_us=self.noise_us / unit_us)

    def with_error(self, error_us: float, freedom: float = math.inf) -> Estimate:
        """Returns the estimate with a further independent error, given as a standard error."""
        further = (_half_width(error_us, freedom), freedom)
        noise_us, both = _sum_of_noises((self.noise_us, self.freedom), further)
        return replace(self, noise_us=noise_us, freedom=both)


@dataclass(frozen=True, eq=False)
class RunNoise:
    """What runs of one setting differ by, pooled over all settings of a case. Runs are the repetitions, however many
    steps each has: the steps of one share its clocks, memory and neighbours."""

    share: float
    """Standard deviation between runs, as a share of the time; NaN if no setting was repeated."""
    freedom: float
    """Its degrees of freedom: runs beyond each setting's first."""
    expected: RunNoise | None = None
    """What runs of such a program differ by elsewhere, beyond the noise within each; None if nothing is known of it."""

    def enough_for(self, one: Estimate, other: Estimate) -> bool:
        """Returns whether there are enough runs to compare the two, one of which has this noise."""
        freedom = sum(noise.freedom for noise in {one.between, other.between} if noise)
        return self.expected is not None or (min(one.runs, other.runs) >= LEAST_RUNS and freedom >= LEAST_FREEDOM)

    def over_runs(self, time: Estimate, runs_us: Sequence[float]) -> Estimate:
        """Returns the mean of the runs' times, with the noise between them: Student's interval over the runs, or a
        wider one, from the noise within them and what is expected. NaN if it is unknown.

        `time`: all runs pooled, with the noise within them. The mean, because load that comes and goes makes two kinds
        of runs, between which a median jumps.
        """
        count, mean_us = len(runs_us), statistics.fmean(runs_us)
        known = []
        if self.freedom:
            share, freedom = self._setting_noise(runs_us)
            known.append((mean_us * share / math.sqrt(count), freedom))
        if self.expected:
            weight = self.expected.freedom
            squares = weight * (time.error_us**2 + (mean_us * self.expected.share) ** 2 / count)
            squares += sum(error_us**2 * freedom for error_us, freedom in known)
            known.append((math.sqrt(squares / (self.freedom + weight)), self.freedom + weight))
        elif known:
            known.append((time.error_us, time.freedom))
        widths = ((_half_width(*one), one[1]) for one in known if not math.isnan(one[0]))
        noise_us, freedom = max(widths, default=(math.nan, 1.0))
        return Estimate(mean_us, noise_us, time.repeats, freedom, count, self)

    def _setting_noise(self, runs_us: Sequence[float]) -> tuple[float, float]:
        """Returns the standard deviation of these runs as a share, and its degrees of freedom: that of all settings, or
        more if they differ by more than those of others; then the variances are averaged."""
        if len(runs_us) == 1:
            return self.share, self.freedom
        own, weight = standard_deviation(runs_us) / statistics.fmean(runs_us), len(runs_us) - 1
        if own <= self.share:
            return self.share, self.freedom
        both = weight + _OTHERS_WEIGHT
        return math.sqrt((weight * own**2 + _OTHERS_WEIGHT * self.share**2) / both), min(self.freedom, both)


EXACTLY_ONE = Estimate(1.0, 0.0, 1)
"""The ratio of a time to itself."""


def gap_noise_us(one: Estimate, other: Estimate, pairs: int = 1) -> float:
    """Returns the noise that the difference of the two must exceed; NaN if a noise is unknown, or if there are too few
    runs."""
    noise_us, freedom = _sum_of_noises((one.noise_us, one.freedom), (other.noise_us, other.freedom))
    if between := one.between or other.between:
        if not between.enough_for(one, other):
            return math.nan
        if one.between is other.between:
            # Both have the same estimate of the noise, so their degrees of freedom don't add up.
            shared = min(one.freedom, other.freedom)
            noise_us, freedom = noise_us / student(1 - CONFIDENCE, freedom) * student(1 - CONFIDENCE, shared), shared
    return noise_us * student((1 - CONFIDENCE) / pairs, freedom) / student(1 - CONFIDENCE, freedom)


@cache
def student(error: float, freedom: float) -> float:
    """Returns the two-sided quantile of Student's distribution, with a total tail probability of `error`.

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
    return error_us * student(1 - CONFIDENCE, freedom)


def _sum_of_noises(*noises: tuple[float, float]) -> tuple[float, float]:
    """Returns half-width and degrees of freedom of a sum of independent errors, each given as the same pair."""
    errors = [(noise_us / student(1 - CONFIDENCE, freedom), freedom) for noise_us, freedom in noises]
    total = math.hypot(*(error for error, _ in errors))
    spread = sum(error**4 / freedom for error, freedom in errors)
    both = total**4 / spread if spread else math.inf
    return _half_width(total, both), both


def standard_deviation(samples: Sequence[float]) -> float:
    """Returns that of at least two samples, many times faster than `statistics.stdev`, which adds exact fractions."""
    mean = statistics.fmean(samples)
    return math.sqrt(math.fsum((sample - mean) ** 2 for sample in samples) / (len(samples) - 1))


def correlation(samples: Sequence[float]) -> float:
    """Returns the correlation of successive samples, from 0 to 0.9; for few samples mostly the typical one.

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


def estimate(*series: Sequence[float], by_mean: bool = False) -> Estimate:
    """Returns the median of all samples of one or several series, each in the order of measuring, and its noise.
    `by_mean`: the mean, for samples that add up, as a training's steps do, of which rare slow ones count as much as
    they take.

    The noise is that of n (1 - r) / (1 + r) independent samples, where r is the correlation between successive ones;
    NaN of a single sample.
    """
    samples = [sample for one in series for sample in one]
    time_us = statistics.fmean(samples) if by_mean else statistics.median(samples)
    if len(samples) == 1:
        return Estimate(time_us, math.nan, 1, 1.0)
    independent, freedom = 0.0, 0.0
    for one in series:
        r = correlation(one)
        independent += len(one) * (1 - r) / (1 + r)
        freedom += (len(one) - 1) * (1 - r**2) / (1 + r**2)
    if by_mean:
        error = standard_deviation(samples) / math.sqrt(independent)
    else:
        q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        error, freedom = _MEDIAN_OF_MEAN * (q3 - q1) / _IQR_OF_SD / math.sqrt(independent), _EFFICIENCY * freedom
    freedom = max(freedom, 2.0)
    return Estimate(time_us, _half_width(error, freedom), len(samples), freedom)


def normalised(pairs: Iterable[tuple[Timing, Timing]], none: Estimate) -> Estimate:
    """Returns the pooled measurements of one setting, each relative to the none time of the same point.

    `pairs` are (setting, none of the same point). Each sample is scaled by the ratio of the case's none time to its
    own, so that drift between points cancels. The noise of that none time is part of the result's noise.
    """
    series: list[list[float]] = []
    baseline_noises = []
    for timing, baseline in pairs:
        scale = none.time_us / baseline.median_us
        series.append([sample * scale for sample in timing.samples_us])
        own = estimate(baseline.samples_us)
        baseline_noises.append((own.noise_us * scale * timing.median_us / baseline.median_us, own.freedom))
    pooled = estimate(*series)
    shares = [(noise_us / len(baseline_noises), freedom) for noise_us, freedom in baseline_noises]
    noise_us, freedom = _sum_of_noises((pooled.noise_us, pooled.freedom), *shares)
    return Estimate(pooled.time_us, noise_us, pooled.repeats, freedom)


def pooled_none(timings: Sequence[Timing]) -> Estimate:
    """Returns the none time of a case: the median over its points, with the noise of all samples, without drift."""
    time_us = statistics.median(timing.median_us for timing in timings)
    scaled = [[sample * time_us / timing.median_us for sample in timing.samples_us] for timing in timings]
    return replace(estimate(*scaled), time_us=time_us)


def hidden_fraction(time_us: float, none_us: float, floor_us: float) -> float:
    """Returns (none - t) / (none - floor): 1 is perfect, 0 useless, negative harmful. NaN if none <= floor."""
    return (none_us - time_us) / (none_us - floor_us) if none_us > floor_us else math.nan


NOTABLE_DRIFT = 0.05
"""Change from which the report warns of drift."""


def later_change(times_us: Sequence[float]) -> float:
    """Returns the median of the later half over that of the earlier half, minus 1, for at least two times."""
    half = len(times_us) // 2
    return statistics.median(times_us[-half:]) / statistics.median(times_us[:half]) - 1
