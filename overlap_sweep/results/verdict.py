"""Decides for all workloads which of several settings wins, and whether two sessions differ.

A setting is chosen instead of the reference (no overlap, the sequential kernel, the defaults) only if it is faster
beyond the noise, however many were tried. Among those, the simplest within the noise of the fastest wins.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan, sqrt
from statistics import fmean, geometric_mean
from typing import Generic, Literal, TypeVar

from overlap_sweep.results.estimate import Estimate, RunNoise, estimate, gap_noise_us, normalised
from overlap_sweep.results.gain import NO_GAIN, Gain, gain_over
from overlap_sweep.results.measured import Timing, summarise

T = TypeVar("T")

TYPICAL_SCATTER = {"cuda": 0.003, "cpu": 0.02}
"""Standard deviation of one setting's time between points, as a share of it, by kind of device, for times relative to a
baseline of the same point. The largest value, of small kernels, that benchmarks/repeated_settings.sh found twice; large
ones have 0.001 or less."""
TYPICAL_SCATTER_OF_LAYERS = {"cuda": 0.001, "cpu": 0.02}
"""The same for whole layers, whose variants take turns in one process group."""
TYPICAL_SCATTER_OF_STEPS = {"cuda": 0.01, "cpu": 0.05}
"""The same for plain times of whole training steps."""
TYPICAL_SCATTER_OF_HOST = 0.07
"""The same for steps that are limited by the host."""
_TYPICAL_WEIGHT = 4
"""Degrees of freedom of repetitions that weigh as much as the typical scatter."""
_MEDIAN_OF_MEAN = 1.2
"""Standard error of the median of a few points over that of their mean: 1.09 for four, 1.25 for many."""
_STEADY_WEIGHT = 12.0
"""Degrees of freedom of one setting's noise that weigh as much as the noise of all settings."""


@dataclass(frozen=True)
class Scatter:
    """The scatter between points of equal settings, beyond the noise within each."""

    share: float
    """Standard deviation between points, as a share of the time."""
    freedom: float = inf
    """Degrees of freedom; infinite for the typical scatter."""

    def added_to(self, estimate: Estimate, points: int) -> Estimate:
        """Returns the estimate, the median of that many points, with the scatter added to its noise."""
        factor = _MEDIAN_OF_MEAN if points > 2 else 1.0
        return estimate.with_error(estimate.time_us * self.share * factor / sqrt(points), self.freedom)


def scatter(
    repeated: Iterable[Sequence[Estimate]], typical: float, baselines: Iterable[Sequence[Estimate]] = ()
) -> Scatter:
    """Returns the scatter between points, from the settings that were measured more than once.

    It is the variance of their times minus that within them, averaged with the typical variance by degrees of freedom.
    `baselines` are the other times that every point measures: if those scatter by more than is typical, so do settings.
    If they scatter by less, that is not used.
    """
    found = [_between(points) for points in repeated]
    freedom = sum(free for _, free in found)
    baseline_scatters = (_with_typical(*_between(points), typical) for points in baselines)
    unrepeated = max([Scatter(typical), *baseline_scatters], key=lambda one: one.share)
    if not freedom:
        return unrepeated
    return _with_typical(sum(squares for squares, _ in found), freedom, unrepeated.share)


def _with_typical(squares: float, freedom: int, typical: float) -> Scatter:
    variance = (squares + _TYPICAL_WEIGHT * typical**2) / (freedom + _TYPICAL_WEIGHT)
    return Scatter(sqrt(variance), freedom + _TYPICAL_WEIGHT)


def _between(points: Sequence[Estimate]) -> tuple[float, int]:
    """Returns the sum of squares of relative times between points, beyond the noise, and its degrees of freedom."""
    if len(points) < 2:
        return 0.0, 0
    mean_us, freedom = fmean(point.time_us for point in points), len(points) - 1
    within = fmean((point.error_us / mean_us) ** 2 for point in points)
    squares = sum((point.time_us / mean_us - 1) ** 2 for point in points)
    return max(0.0, squares - freedom * within), freedom


def noise_of_runs(repeated: Iterable[Sequence[float]], expected: float | None = None) -> RunNoise:
    """Returns what runs of one setting differ by. `repeated`: the times of each setting's runs; `expected`: what such
    runs differ by elsewhere, as a share, which weighs as much as a few repetitions."""
    settings = [times for times in repeated if len(times) > 1]
    freedom = sum(len(times) - 1 for times in settings)
    squares = sum((time / fmean(times) - 1) ** 2 for times in settings for time in times)
    return RunNoise(
        share=sqrt(squares / freedom) if freedom else nan,
        freedom=freedom,
        expected=None if expected is None else RunNoise(expected, _TYPICAL_WEIGHT),
    )


def noises_of_steps(repeated: Iterable[tuple[Sequence[float], bool]], device_kind: str) -> dict[bool, RunNoise]:
    """Returns what runs of training steps differ by, separately for those that the host limits (True). `repeated`: as
    above, with whether the host limits them."""
    settings = list(repeated)
    typical = {False: TYPICAL_SCATTER_OF_STEPS[device_kind], True: TYPICAL_SCATTER_OF_HOST}
    return {
        limited: noise_of_runs([times for times, known in settings if known == limited], share)
        for limited, share in typical.items()
    }


def times_of_steps(
    settings_us: Sequence[Sequence[Sequence[float]]], limited: Sequence[bool], device_kind: str
) -> list[Estimate]:
    """Returns the time of each setting's steps: over its runs, with the noise between runs of all settings, and what
    such runs typically differ by. `settings_us`: the samples of each run; `limited`: whether the host limits them."""
    runs_us = [[estimate(samples).time_us for samples in runs] for runs in settings_us]
    between = noises_of_steps(zip(runs_us, limited, strict=True), device_kind)
    settings = zip(settings_us, runs_us, limited, strict=True)
    return [between[bound].over_runs(estimate(*samples), own_us) for samples, own_us, bound in settings]


def pairs_among(settings: Sequence[object]) -> int:
    """Returns the number of pairs, any of which might look different by chance."""
    return max(len(settings) * (len(settings) - 1) // 2, 1)


def ties(settings: Sequence[T], time: Callable[[T], Estimate]) -> list[T]:
    """Returns the fastest setting and those that are not slower beyond the noise, which counts all pairs, since any
    might have come out fastest by chance. `settings`: from fast to slow."""
    pairs = pairs_among(settings)
    return [one for one in settings if one is settings[0] or not time(one).differs_from(time(settings[0]), pairs)]


def steadied(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Returns the estimates with their noises moderated by each other.

    A noise from twenty samples is itself uncertain by a quarter. Among many settings one has a noise that is far too
    small, and would seem to win. So each squared relative error is averaged with that of all settings, weighted by
    degrees of freedom (Smyth, Statistical Applications in Genetics 3 (1), 2004). The noise between runs is that of all
    settings already.
    """
    own = [one.error_us > 0 and not one.between for one in estimates]
    known = [one for one, steadies in zip(estimates, own, strict=True) if steadies]
    if len(known) < 2:
        return list(estimates)
    shares = [(one.error_us / one.time_us) ** 2 for one in known]
    weights = [min(one.freedom, _STEADY_WEIGHT) for one in known]
    common = sum(share * weight for share, weight in zip(shares, weights, strict=True)) / sum(weights)
    return [_steadied(one, common) if steadies else one for one, steadies in zip(estimates, own, strict=True)]


def _steadied(one: Estimate, common: float) -> Estimate:
    own = min(one.freedom, 1e6)
    freedom = own + _STEADY_WEIGHT
    share = (own * (one.error_us / one.time_us) ** 2 + _STEADY_WEIGHT * common) / freedom
    return Estimate(one.time_us, 0.0, one.repeats).with_error(one.time_us * sqrt(share), freedom)


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The setting chosen among several."""

    chosen: T
    fastest: T
    """The fastest setting that beats the reference; if none does, the fastest of the others."""
    won: bool
    """Whether any setting beats the reference."""
    gain: Gain = NO_GAIN
    """Gain of the chosen setting over the reference, with the noise that decided."""
    gain_of_fastest: Gain = NO_GAIN
    """Gain of the fastest setting over the reference."""
    tie_noise: float = 0.0
    """Noise of the difference between the fastest and the chosen, as a share of the time."""
    unknown: Sequence[T] = ()
    """Settings that cannot win, since the noise of their difference from the reference is unknown: of too few runs."""


def choose(settings: Sequence[T], estimate_of: Callable[[T], Estimate]) -> Choice[T]:
    """Returns the choice between the reference, which comes first, and settings sorted from simple to complex."""
    reference, *rest = zip(settings, steadied([estimate_of(setting) for setting in settings]), strict=True)
    noises_us = [gap_noise_us(estimate, reference[1]) for _, estimate in rest]
    others = [pair for pair, noise_us in zip(rest, noises_us, strict=True) if not isnan(noise_us)]
    unknown = [setting for (setting, _), noise_us in zip(rest, noises_us, strict=True) if isnan(noise_us)]
    if not others:
        setting, estimate = min(rest, key=lambda pair: pair[1].time_us, default=reference)
        gain = gain_over(reference[1], estimate) if rest else NO_GAIN
        return Choice(reference[0], setting, won=False, gain_of_fastest=gain, unknown=unknown)
    faster = [
        (setting, estimate)
        for setting, estimate in others
        if estimate.time_us < reference[1].time_us and estimate.differs_from(reference[1], len(others))
    ]
    fastest, least = min(faster or others, key=lambda pair: pair[1].time_us)
    rivals = max(len(faster) - 1, 1) if faster else len(others)
    ties = [pair for pair in faster if pair[1] is least or not pair[1].differs_from(least, rivals)]
    chosen, taken = ties[0] if ties else reference
    gain, gain_of_fastest = (gain_over(reference[1], one, len(others)) for one in (taken, least))
    return Choice(
        *(chosen, fastest, bool(faster)),
        gain=gain if ties else NO_GAIN,
        gain_of_fastest=gain_of_fastest,
        tie_noise=gain_over(taken, least, rivals).noise,
        unknown=unknown,
    )


def gain_of_point(time: Timing, reference: Timing, device_kind: str, tried: int = 1) -> Gain:
    """Returns the gain of a single point's time over the reference that was measured in turns with it, with the typical
    scatter between points. `tried`: the number of variants of which it is the fastest."""
    base = estimate(reference.samples_us)
    own = Scatter(TYPICAL_SCATTER[device_kind]).added_to(normalised([(time, reference)], base), 1)
    return gain_over(base, own, tried)


MARGIN = 0.005
"""Relative difference below which two sessions tie, whatever their noise: sessions differ by more than that."""

Verdict = Literal["faster", "slower", "same", "unknown"]
"""`unknown`: they differ by more than MARGIN, but there are too few runs to know the noise."""
VERDICTS: tuple[Verdict, ...] = ("faster", "slower", "same", "unknown")


def differ(one: Estimate, reference: Estimate) -> bool:
    """Returns whether the times of two sessions differ beyond their noise and MARGIN."""
    return _beyond_margin(one, reference) and one.differs_from(reference)


def _beyond_margin(one: Estimate, reference: Estimate) -> bool:
    return abs(one.time_us - reference.time_us) > MARGIN * abs(reference.time_us)


def verdict(time: Estimate, reference: Estimate) -> Verdict:
    """Returns whether the session was faster or slower than the reference."""
    if _beyond_margin(time, reference) and isnan(gap_noise_us(time, reference)):
        return "unknown"
    if not differ(time, reference):
        return "same"
    return "faster" if time.time_us < reference.time_us else "slower"


def ratio(value: float | None, reference: float | None) -> float:
    """Returns the quotient; NaN if it is unknown or undefined."""
    return nan if value is None or not reference else value / reference


def mean_ratio(ratios: Iterable[float]) -> float:
    """Returns the geometric mean of the known ratios; NaN if there are none."""
    known = [one for one in ratios if not isnan(one)]
    return geometric_mean(known) if known else nan


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
    ratios = [[time / reference for time, reference in zip(one, reference_us, strict=True)] for one in others_us]
    return bool(ratios) and all(estimate(one).noise_us <= noise_goal for one in ratios)
