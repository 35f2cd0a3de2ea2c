"""Finds the fastest settings without measuring all of them.

A search is a generator: it yields the settings to measure next, is sent their results, and returns why it ended. It is
independent of points and launchers. There are two:

- `bisect` searches one pass of an operator (`cell`: its candidate settings and measurements). `tasks` lets forward and
  backward searches share points, and `sweeper` advances all searches of a sweep round by round.
- `knobs` searches any knobs of any workload and compares them with `Samples` (`knob_trail`: what it has measured;
  `climb`: with few measurements, where something is expected of changes; `proof`: how it ends); `knob_sweeper` turns
  them into points.

For both, `measured` measures points through a Hydra launcher, within a budget.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import TypeVar

from overlap_sweep.results.estimate import Estimate, estimate, standard_deviation, student
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.records import Noises
from overlap_sweep.workloads import Sample

_Wanted = TypeVar("_Wanted")
_Answers = TypeVar("_Answers")
_Why = TypeVar("_Why")


DISTURBED = 2.0
"""How many times the noise of times their ratios to baselines must have, for plain times to be compared instead. A
steady baseline adds its own noise to the ratios, but less than that."""
DEVIATIONS = 2.0
"""Standard deviations that a difference must exceed."""
LEAST_TURNS = 5
"""Rounds in turns whose ratios say what they differ by."""
ERROR_OF_TURNS = 0.005
"""Probability with which the ratio of two settings in turns is not within its noise."""
ENOUGH_FOR_RANKS = 9
"""Values whose ranks can exclude something with that probability."""
FREEDOM_TO_TELL = 4
"""Degrees of freedom (measurements of settings beyond each one's first) below which scatter says too little."""

Setting = tuple[str, ...]
"""One value for each knob, in the order of the knobs, spelled as for Hydra."""


@dataclass(frozen=True)
class Failure:
    """A setting that could not be measured."""

    reason: str
    wrong_numbers: bool = False
    """Whether its output or gradients differ from those without overlap."""
    measured: bool = True
    """Whether a point was tried; otherwise it was known before."""
    refused: bool = False
    """Whether it cannot be applied there, whatever the value."""


def mean(estimates: Sequence[Estimate], spread_us: float) -> Estimate:
    """Returns the mean of several estimates of one setting. Its noise is the larger of the estimates' own noise and
    their `spread_us`, both for the mean."""
    count = len(estimates)
    noise_us = math.hypot(*(one.noise_us for one in estimates)) / count
    time_us = statistics.fmean(one.time_us for one in estimates)
    return Estimate(time_us, max(noise_us, spread_us / math.sqrt(count)), sum(one.repeats for one in estimates))


def conduct(search: Generator[_Wanted, _Answers, _Why], measure: Callable[[_Wanted], _Answers]) -> _Why:
    """Runs a search to its end; returns its return value."""
    try:
        wanted = next(search)
        while True:
            wanted = search.send(measure(wanted))
    except StopIteration as stop:
        why: _Why = stop.value
        return why


def disturbed_baselines(measurements: Iterable[Sequence[Sample]]) -> Noises | None:
    """Returns the noise of times and of their ratios to baselines, if the baselines are disturbed: if that of ratios is
    more than DISTURBED times that of times. None if it isn't, or if the repetitions are too few to tell.

    `measurements`: those of each setting. Ratios are better while the machine's speed drifts, because drift cancels.
    But a baseline that changes by chance, between points or within them, would hide any gain: that of a training on a
    network or on cores that others use.
    """
    repeated = [samples for samples in measurements if len(samples) > 1 and all(one.beside_us for one in samples)]
    if sum(len(samples) - 1 for samples in repeated) < FREEDOM_TO_TELL:
        return None
    times = _noise([[_plain(sample) for sample in samples] for samples in repeated])
    ratios = _noise([[_ratio(sample) for sample in samples] for samples in repeated])
    return Noises(times=times, ratios=ratios) if ratios > DISTURBED * times else None


class Samples:
    """Comparable measurements of settings."""

    def __init__(
        self, *, by_time: bool = False, disturbed: Noises | None = None, deviations: float = DEVIATIONS
    ) -> None:
        """`by_time`: compare plain times, also while ratios to the baseline that was measured with each sample, which
        cancel drift, are steady; `disturbed`: their noise, if that is why. `deviations`: as DEVIATIONS."""
        self.of: dict[Setting, list[Sample]] = {}
        self.rounds: list[dict[Setting, Sample]] = []
        """Those that were measured in turns, one after the other, so that a disturbance of the machine that lasts is in
        all of a round."""
        self._by_time, self._disturbed, self._deviations = by_time, disturbed, deviations
        self._noise_is_known = by_time
        self._estimates: dict[Setting, Estimate] = {}

    def add(self, setting: Setting, sample: Sample) -> None:
        self.of.setdefault(setting, []).append(sample)
        if self.rounds:
            self.rounds[-1][setting] = sample
        self._estimates = {}
        self._noise_is_known = self._by_time

    @property
    def paired(self) -> bool:
        """Returns whether ratios to baselines are compared, otherwise plain times."""
        return not self._by_time and not self.disturbed

    @property
    def disturbed(self) -> Noises | None:
        """Returns the noise with disturbed baselines, if plain times are compared for that reason."""
        if not self._noise_is_known:
            self._disturbed, self._noise_is_known = disturbed_baselines(self.of.values()), True
        return self._disturbed

    @property
    def freedom(self) -> int:
        """Returns the number of measurements of settings beyond each one's first."""
        return sum(len(samples) - 1 for samples in self.of.values())

    def by_time(self, disturbed: Noises | None = None) -> Samples:
        """Returns the same samples, compared by plain times; `disturbed` as above."""
        other = Samples(by_time=True, disturbed=disturbed, deviations=self._deviations)
        other.of, other.rounds = self.of, self.rounds
        return other

    def estimate(self, setting: Setting) -> Estimate:
        """Returns the mean of the setting's measurements, in microseconds. Its noise is the larger of that within
        measurements and that between repeated measurements of a setting."""
        if not self._estimates:
            scales_us = {work: statistics.fmean(times_us) for work, times_us in self._baselines_us().items()}
            levels = {s: [self._level(sample, scales_us) for sample in samples] for s, samples in self.of.items()}
            self._estimates = dict(zip(levels, _means(list(levels.values()), self._deviations), strict=True))
        return self._estimates[setting]

    def time_us(self, setting: Setting) -> float:
        return self.estimate(setting).time_us

    def gain(self, slower: Setting, faster: Setting) -> Estimate:
        """Returns by how much `faster` is faster than `slower`, in microseconds; negative if it is slower. By the
        ratios of the rounds in which both took turns, if plain times scatter by far more."""
        one, other = self.estimate(slower), self.estimate(faster)
        noise_us = math.hypot(one.noise_us, other.noise_us)
        works = {sample.work for setting in (slower, faster) for sample in self.of[setting]}
        if self.paired and len(works) > 1:
            # Their baselines do different work, so the machine's drift does not cancel.
            noise_us = math.hypot(noise_us, *(one.time_us * self._drift(work) for work in works))
        plain = Estimate(one.time_us - other.time_us, noise_us, one.repeats + other.repeats)
        turns = self._gain_in_turns(slower, faster)
        return turns if turns and DISTURBED * turns.noise_us < noise_us else plain

    def share(self, slower: Setting, faster: Setting) -> Gain:
        """Returns the same as a share of the slower one's time."""
        gain, slower_us = self.gain(slower, faster), self.time_us(slower)
        return Gain(gain.time_us / slower_us, gain.noise_us / slower_us)

    def _gain_in_turns(self, slower: Setting, faster: Setting) -> Estimate | None:
        """Returns the gain by the ratio in each round; None if the rounds are too few, or if samples have baselines of
        their own."""
        pairs = [(_plain(one[slower]), _plain(one[faster])) for one in self.rounds if {slower, faster} <= one.keys()]
        if len(pairs) < LEAST_TURNS or any(sample.beside_us for sample in self.of[slower]):
            return None
        logs = [math.log(other.time_us / one.time_us) for one, other in pairs]
        within = math.hypot(*(each.noise_us / each.time_us for pair in pairs for each in pair)) / len(pairs)
        log, between = _centre(logs)
        ratio, slower_us = math.exp(log), self.time_us(slower)
        noise_us = slower_us * ratio * math.expm1(max(within, between))
        return Estimate(slower_us * (1 - ratio), noise_us, sum(each.repeats for pair in pairs for each in pair))

    def beats(self, faster: Setting, slower: Setting) -> bool:
        """Returns whether `faster` is faster than `slower` beyond the noise."""
        gain = self.gain(slower, faster)
        return gain.time_us > gain.noise_us

    def agrees(self, one: Setting, other: Setting) -> bool:
        """Returns whether the drift-corrected gain agrees with that of plain times. Those are noisier, but don't assume
        that both settings have the same baseline."""
        gain, by_time = self.gain(one, other), self.by_time().gain(one, other)
        return abs(gain.time_us - by_time.time_us) <= math.hypot(gain.noise_us, by_time.noise_us)

    def _level(self, sample: Sample, scales_us: Mapping[str, float]) -> Estimate:
        """Returns the sample's time at the machine's average speed: drift cancels in the ratio to the baseline that was
        measured with it, pair by pair."""
        if not self.paired or not sample.beside_us:
            return _plain(sample)
        scale_us, ratio = scales_us[sample.work], _ratio(sample)
        return Estimate(ratio.time_us * scale_us, ratio.noise_us * scale_us, ratio.repeats)

    def _baselines_us(self) -> dict[str, list[float]]:
        """Returns the median time of each sample's baseline, by its work."""
        found: dict[str, list[float]] = {}
        for sample in (sample for samples in self.of.values() for sample in samples if sample.beside_us):
            found.setdefault(sample.work, []).append(statistics.median(sample.beside_us))
        return found

    def _drift(self, work: str) -> float:
        """Returns the uncertainty of the machine's average speed in measurements with this work, as a fraction."""
        baselines = self._baselines_us()
        return (
            _spread(list(baselines.values()), self._deviations) / math.sqrt(len(baselines[work]))
            if work in baselines
            else 0.0
        )


def _plain(sample: Sample) -> Estimate:
    """Returns the sample's own time."""
    return estimate(sample.times_us, by_mean=sample.by_mean)


def _ratio(sample: Sample) -> Estimate:
    """Returns the ratio of the sample's time to its baseline's, pair by pair."""
    return estimate([time / baseline for time, baseline in zip(sample.times_us, sample.beside_us, strict=True)])


def _centre(values: Sequence[float]) -> tuple[float, float]:
    """Returns the values' mean and its noise; of many values, if that is less, as where a few of them are far off, the
    median of the means of all pairs of values, and the noise by the ranks of those (Hodges and Lehmann, Annals of
    Mathematical Statistics 34, 1963)."""
    n = len(values)
    mean = statistics.fmean(values), student(ERROR_OF_TURNS, n - 1) * standard_deviation(values) / math.sqrt(n)
    if n < ENOUGH_FOR_RANKS:
        return mean
    pairs = sorted((one + other) / 2 for one, other in combinations_with_replacement(values, 2))
    wide = statistics.NormalDist().inv_cdf(1 - ERROR_OF_TURNS / 2) * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    outside, median = max(0, math.floor(n * (n + 1) / 4 - wide)), statistics.median(pairs)
    by_rank = median, max(median - pairs[outside], pairs[-1 - outside] - median)
    return min(mean, by_rank, key=lambda one: one[1])


def _means(measurements: Sequence[Sequence[Estimate]], deviations: float) -> list[Estimate]:
    """Returns the mean of each setting's measurements."""
    spread = _spread([[one.time_us for one in own] for own in measurements], deviations)
    return [mean(own, spread * statistics.fmean(one.time_us for one in own)) for own in measurements]


def _noise(measurements: Sequence[Sequence[Estimate]]) -> float:
    """Returns the noise of a setting's mean as a fraction: the root mean square over the settings."""
    shares = [one.noise_us / one.time_us for one in _means(measurements, DEVIATIONS)]
    return math.hypot(*shares) / math.sqrt(len(shares))


def _spread(groups: Iterable[Sequence[float]], deviations: float) -> float:
    """Returns the largest expected deviation of a single value, as a fraction: `deviations` times the pooled standard
    deviation within groups, each as a fraction of its mean, more for few values."""
    repeated = [[value / statistics.fmean(group) for value in group] for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in repeated)
    if not freedom:
        return 0.0
    deviation = math.sqrt(sum(standard_deviation(g) ** 2 * (len(g) - 1) for g in repeated) / freedom)
    return certain(deviations, freedom) * deviation


def certain(deviations: float, freedom: int) -> float:
    """Returns the number of standard deviations, widened for few values much as in Student's distribution."""
    return deviations * (1 + deviations / (2 * freedom))
