"""Medians with their noise: what makes two times different, and how repeated measurements are put together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap_sweep.run_directory import Timing


@dataclass(frozen=True)
class Estimate:
    """A median time and the half-width of its notch, in microseconds."""

    time_us: float
    noise_us: float
    repeats: int

    def differs_from(self, other: Estimate) -> bool:
        """Whether the difference is larger than both noises, added as independent errors are: in quadrature."""
        return abs(self.time_us - other.time_us) > math.hypot(self.noise_us, other.noise_us)


def notch_us(samples_us: Sequence[float]) -> float:
    """Half-width of the notch around a median: 1.57 x IQR / sqrt(n).

    McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1), 1978.
    """
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
