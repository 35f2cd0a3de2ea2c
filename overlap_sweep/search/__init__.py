"""Finds the fastest settings without measuring all of them.

A search is a generator: it yields what to measure next, is sent the results, and returns why it ended. It knows nothing
of points and launchers. There are two:

- `bisect` searches one pass of an operator (`cell`: what its slots may be given, and what was measured so far). In
  `tasks` forward and backward searches share points, and `sweeper` advances all of a sweep's round by round.
- `knobs` searches any knobs of any workload, which `Samples` compares; `knob_sweeper` makes points of them.

`measured` has points measured by a Hydra launcher within a budget, for both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.workloads import Sample

_Wanted = TypeVar("_Wanted")
_Answers = TypeVar("_Answers")
_Why = TypeVar("_Why")


Setting = tuple[str, ...]
"""One value for each knob, in their order, as Hydra takes it."""


@dataclass(frozen=True)
class Failure:
    """A setting that could not be measured."""

    reason: str
    wrong_numbers: bool = False
    """It computes something else than without overlap."""


def mean(estimates: Sequence[Estimate], spread_us: float) -> Estimate:
    """Returns the mean of several estimates of one setting. Its noise is that of the mean, or what single ones are
    found to differ by, whichever is larger."""
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
    """Measurements of settings that may be compared with each other."""

    def __init__(self, beside: bool = True, deviations: float = 2.0) -> None:
        """`beside`: compare through what was measured beside each sample; else by the times alone. `deviations`: how
        many standard deviations a difference must have."""
        self.of: dict[Setting, list[Sample]] = {}
        self.beside, self._deviations = beside, deviations
        self._estimates: dict[Setting, Estimate] = {}

    def add(self, setting: Setting, sample: Sample) -> None:
        self.of.setdefault(setting, []).append(sample)
        self._estimates = {}

    def by_time(self) -> Samples:
        """Returns the same samples, compared by the times alone."""
        other = Samples(False, self._deviations)
        other.of = self.of
        return other

    def estimate(self, setting: Setting) -> Estimate:
        """Returns the mean of the setting's measurements, in microseconds. Its noise is that of the repeats within
        them, or what measurements of one setting are found to differ by, whichever is larger."""
        if not self._estimates:
            scales_us = {work: statistics.fmean(besides) for work, besides in self._besides().items()}
            levels = {s: [self._level(sample, scales_us) for sample in samples] for s, samples in self.of.items()}
            spread = self._spread([[level.time_us for level in own] for own in levels.values()])
            self._estimates = {
                s: mean(own, spread * statistics.fmean(o.time_us for o in own)) for s, own in levels.items()
            }
        return self._estimates[setting]

    def time_us(self, setting: Setting) -> float:
        return self.estimate(setting).time_us

    def gain(self, slower: Setting, faster: Setting) -> Estimate:
        """Returns by how much the second is faster, in microseconds; negative where it is slower."""
        one, other = self.estimate(slower), self.estimate(faster)
        noise_us = math.hypot(one.noise_us, other.noise_us)
        works = {sample.work for setting in (slower, faster) for sample in self.of[setting]}
        if self.beside and len(works) > 1:
            # What else they compute differs: how fast the machine was when each was measured does not cancel.
            noise_us = math.hypot(noise_us, *(one.time_us * self._drift(work) for work in works))
        return Estimate(one.time_us - other.time_us, noise_us, one.repeats + other.repeats)

    def beats(self, faster: Setting, slower: Setting) -> bool:
        """Returns whether it is faster beyond the noise."""
        gain = self.gain(slower, faster)
        return gain.time_us > gain.noise_us

    def _level(self, sample: Sample, scales_us: Mapping[str, float]) -> Estimate:
        """Returns the sample's time at the average speed of the machine: by its ratio to what was measured beside it,
        pair by pair, what slows both down cancels."""
        if not self.beside or not sample.beside_us:
            return estimate(sample.times_us)
        scale_us = scales_us[sample.work]
        ratio = estimate([time / beside for time, beside in zip(sample.times_us, sample.beside_us, strict=True)])
        return Estimate(ratio.time_us * scale_us, ratio.noise_us * scale_us, ratio.repeats)

    def _besides(self) -> dict[str, list[float]]:
        """Returns by work the median of what was measured beside each sample."""
        found: dict[str, list[float]] = {}
        for sample in (sample for samples in self.of.values() for sample in samples if sample.beside_us):
            found.setdefault(sample.work, []).append(statistics.median(sample.beside_us))
        return found

    def _drift(self, work: str) -> float:
        """Returns the uncertainty of the machine's average speed in all that computes this, as a share."""
        besides = self._besides()
        return self._spread(list(besides.values())) / math.sqrt(len(besides[work])) if work in besides else 0.0

    def _spread(self, groups: Iterable[Sequence[float]]) -> float:
        """Returns the largest deviation of a single value, as a share, by the differences within groups: some pooled
        standard deviations, and more where they rest on few values, much as in Student's distribution."""
        repeated = [[value / statistics.fmean(group) for value in group] for group in groups if len(group) > 1]
        freedom = sum(len(group) - 1 for group in repeated)
        if not freedom:
            return 0.0
        deviation = math.sqrt(sum(statistics.variance(g) * (len(g) - 1) for g in repeated) / freedom)
        return self._deviations * (1 + self._deviations / (2 * freedom)) * deviation
