"""Finds the fastest settings without measuring all of them.

A search is a generator: it yields the settings to measure next, is sent their results, and returns why it ended. It is
independent of points and launchers. There are two:

- `bisect` searches one pass of an operator (`cell`: its candidate settings and measurements). `tasks` lets forward and
  backward searches share points, and `sweeper` advances all searches of a sweep round by round.
- `knobs` searches any knobs of any workload and compares them with `Samples` (`knob_trail`: what it has measured);
  `knob_sweeper` turns them into points.

For both, `measured` measures points through a Hydra launcher, within a budget.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from overlap_sweep.results.estimate import Estimate, estimate, estimate_of_mean
from overlap_sweep.workloads import Sample

_Wanted = TypeVar("_Wanted")
_Answers = TypeVar("_Answers")
_Why = TypeVar("_Why")


Setting = tuple[str, ...]
"""One value for each knob, in the order of the knobs, spelled as for Hydra."""


@dataclass(frozen=True)
class Failure:
    """A setting that could not be measured."""

    reason: str
    wrong_numbers: bool = False
    """Whether its output or gradients differ from those without overlap."""


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


class Samples:
    """Comparable measurements of settings."""

    def __init__(self, *, paired: bool = True, deviations: float = 2.0) -> None:
        """`paired`: compare ratios to the baseline that was measured with each sample, which cancels drift; else plain
        times. `deviations`: standard deviations that a difference must exceed."""
        self.of: dict[Setting, list[Sample]] = {}
        self.paired, self._deviations = paired, deviations
        self._estimates: dict[Setting, Estimate] = {}

    def add(self, setting: Setting, sample: Sample) -> None:
        self.of.setdefault(setting, []).append(sample)
        self._estimates = {}

    def by_time(self) -> Samples:
        """Returns the same samples, compared by plain times."""
        other = Samples(paired=False, deviations=self._deviations)
        other.of = self.of
        return other

    def estimate(self, setting: Setting) -> Estimate:
        """Returns the mean of the setting's measurements, in microseconds. Its noise is the larger of that within
        measurements and that between repeated measurements of a setting."""
        if not self._estimates:
            scales_us = {work: statistics.fmean(times_us) for work, times_us in self._baselines_us().items()}
            levels = {s: [self._level(sample, scales_us) for sample in samples] for s, samples in self.of.items()}
            spread = self._spread([[level.time_us for level in own] for own in levels.values()])
            self._estimates = {
                s: mean(own, spread * statistics.fmean(o.time_us for o in own)) for s, own in levels.items()
            }
        return self._estimates[setting]

    def time_us(self, setting: Setting) -> float:
        return self.estimate(setting).time_us

    def gain(self, slower: Setting, faster: Setting) -> Estimate:
        """Returns by how much `faster` is faster than `slower`, in microseconds; negative if it is slower."""
        one, other = self.estimate(slower), self.estimate(faster)
        noise_us = math.hypot(one.noise_us, other.noise_us)
        works = {sample.work for setting in (slower, faster) for sample in self.of[setting]}
        if self.paired and len(works) > 1:
            # Their baselines do different work, so the machine's drift does not cancel.
            noise_us = math.hypot(noise_us, *(one.time_us * self._drift(work) for work in works))
        return Estimate(one.time_us - other.time_us, noise_us, one.repeats + other.repeats)

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
            return estimate_of_mean(sample.times_us) if sample.by_mean else estimate(sample.times_us)
        scale_us = scales_us[sample.work]
        ratio = estimate([time / baseline for time, baseline in zip(sample.times_us, sample.beside_us, strict=True)])
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
        return self._spread(list(baselines.values())) / math.sqrt(len(baselines[work])) if work in baselines else 0.0

    def _spread(self, groups: Iterable[Sequence[float]]) -> float:
        """Returns the largest expected deviation of a single value, as a fraction: `deviations` times the pooled
        standard deviation within groups, widened for few values much as in Student's distribution."""
        repeated = [[value / statistics.fmean(group) for value in group] for group in groups if len(group) > 1]
        freedom = sum(len(group) - 1 for group in repeated)
        if not freedom:
            return 0.0
        deviation = math.sqrt(sum(statistics.variance(g) * (len(g) - 1) for g in repeated) / freedom)
        return self._deviations * (1 + self._deviations / (2 * freedom)) * deviation
