"""What a search over knobs knows: every setting's measurements, and what makes two settings different."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.search import Failure, mean
from overlap_sweep.workloads import Sample

Setting = tuple[str, ...]
"""One value for each knob, in their order, as Hydra takes it."""


@dataclass(frozen=True)
class Knob:
    """A key of the configuration, and the values to choose from."""

    key: str
    values: tuple[str, ...]
    """The first is the baseline's, and what is preferred in a tie."""
    restarts: bool = False
    """Another value of it needs other worker processes."""


Answer = Sample | Failure | None
"""None: there was no time or point left for it."""

Steps = Generator[Sequence[Setting], Sequence[Answer]]
"""Yields what to measure next, each in this order, the same setting perhaps more than once; is sent what came of it."""

PROOF_DEVIATIONS = 2.6
"""Nothing that is no faster should be named in more than one of a hundred searches."""


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
        """The same, compared by the times alone."""
        other = Samples(False, self._deviations)
        other.of = self.of
        return other

    def estimate(self, setting: Setting) -> Estimate:
        """The mean of the setting's measurements, in microseconds. Its noise is that of the repeats within them, or
        what measurements of one setting are found to differ by, whichever is larger."""
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
        """By how much the second is faster, in microseconds; negative where it is slower."""
        one, other = self.estimate(slower), self.estimate(faster)
        noise_us = math.hypot(one.noise_us, other.noise_us)
        works = {sample.work for setting in (slower, faster) for sample in self.of[setting]}
        if self.beside and len(works) > 1:
            # What else they compute differs: how fast the machine was when each was measured does not cancel.
            noise_us = math.hypot(noise_us, *(one.time_us * self._drift(work) for work in works))
        return Estimate(one.time_us - other.time_us, noise_us, one.repeats + other.repeats)

    def beats(self, faster: Setting, slower: Setting) -> bool:
        """Whether it is faster beyond the noise."""
        gain = self.gain(slower, faster)
        return gain.time_us > gain.noise_us

    def _level(self, sample: Sample, scales_us: Mapping[str, float]) -> Estimate:
        """The sample's time, as it would have been at the average speed of the machine: by its ratio to what was
        measured beside it, pair by pair, what slows both down cancels."""
        if not self.beside or not sample.beside_us:
            return estimate(sample.times_us)
        scale_us = scales_us[sample.work]
        ratio = estimate([time / beside for time, beside in zip(sample.times_us, sample.beside_us, strict=True)])
        return Estimate(ratio.time_us * scale_us, ratio.noise_us * scale_us, ratio.repeats)

    def _besides(self) -> dict[str, list[float]]:
        """By work the median of what was measured beside each sample."""
        found: dict[str, list[float]] = {}
        for sample in (sample for samples in self.of.values() for sample in samples if sample.beside_us):
            found.setdefault(sample.work, []).append(statistics.median(sample.beside_us))
        return found

    def _drift(self, work: str) -> float:
        """How uncertain the machine's average speed is in all that computes this, as a share."""
        besides = self._besides()
        return self._spread(list(besides.values())) / math.sqrt(len(besides[work])) if work in besides else 0.0

    def _spread(self, groups: Iterable[Sequence[float]]) -> float:
        """What a single value is off by at most, as a share, as far as values of one group differ: some of their pooled
        standard deviations, and more where few tell it, much as in Student's distribution."""
        repeated = [[value / statistics.fmean(group) for value in group] for group in groups if len(group) > 1]
        freedom = sum(len(group) - 1 for group in repeated)
        if not freedom:
            return 0.0
        deviation = math.sqrt(sum(statistics.variance(g) * (len(g) - 1) for g in repeated) / freedom)
        return self._deviations * (1 + self._deviations / (2 * freedom)) * deviation


@dataclass
class KnobTrail:
    """A search's space and all that came of it so far."""

    knobs: tuple[Knob, ...]
    refusal: Callable[[Setting], str | None]
    """Why a setting makes no sense, or None: then it is never measured."""
    room: Callable[[], float]
    """How many more points may be measured."""
    found: Samples = field(default_factory=Samples)
    proof: Samples = field(default_factory=lambda: Samples(deviations=PROOF_DEVIATIONS))
    """Measured in alternation after the search, so that what was chosen for its luck has to show it again."""
    failed: dict[Setting, str] = field(default_factory=dict)
    effects: dict[tuple[int, str], Estimate] = field(default_factory=dict)
    """By knob's index and value, what the change to it gained when it was last made alone, in microseconds."""
    dropped: dict[tuple[int, str], float] = field(default_factory=dict)
    """By knob's index and value, the share by which it was slower: not tried again."""
    notes: list[str] = field(default_factory=list)
    cut: bool = False
    """Something was left out because no point or time was left."""
    chosen: Setting | None = None
    """What the proof came to."""

    @property
    def baseline(self) -> Setting:
        return tuple(knob.values[0] for knob in self.knobs)

    @property
    def grid(self) -> int:
        """Settings that there are, sensible or not."""
        return math.prod(len(knob.values) for knob in self.knobs)

    def changed(self, setting: Setting, origin: Setting | None = None) -> dict[int, str]:
        """By knob's index the values that differ from the baseline's, or from another setting's."""
        pairs = zip(setting, origin or self.baseline, strict=True)
        return {index: value for index, (value, other) in enumerate(pairs) if value != other}

    def name(self, setting: Setting, origin: Setting | None = None) -> str:
        """Its overrides, or those that differ from another setting; or `the baseline`."""
        changed = self.changed(setting, origin)
        return " ".join(f"{self.knobs[i].key}={value}" for i, value in changed.items()) or "the baseline"

    def possible(self, setting: Setting) -> bool:
        """Whether it makes sense and may work. What failed fails with more changed, too: each failure costs a new
        process group."""
        changed = self.changed(setting).items()
        return not any(self.changed(bad).items() <= changed for bad in self.failed) and not self.refusal(setting)

    def simplicity(self, setting: Setting) -> tuple[int, int]:
        """Less is simpler: values that are not the baseline's, and how late in their lists they stand."""
        changed = self.changed(setting)
        return len(changed), sum(self.knobs[index].values.index(value) for index, value in changed.items())

    @property
    def fastest(self) -> Setting:
        return min(self.found.of, key=self.found.time_us)

    @property
    def best(self) -> Setting:
        """What the proof came to, or else the simplest of those that the noise cannot tell from the fastest."""
        if self.chosen is not None:
            return self.chosen
        fastest = self.fastest
        ties = [setting for setting in self.found.of if not self.found.beats(fastest, setting)]
        return min(ties, key=lambda setting: (*self.simplicity(setting), self.found.time_us(setting)))

    def measure(self, settings: Iterable[Setting], reserve: int = 0) -> Steps:
        """Have those measured that never were and make sense, unless fewer than `reserve` points would be left."""
        known = self.found.of.keys()
        new = [setting for setting in dict.fromkeys(settings) if setting not in known and self.possible(setting)]
        yield from self.measure_again(new, reserve)

    def measure_again(self, settings: Sequence[Setting], reserve: int = 0) -> Steps:
        """One more sample of each."""
        yield from self._ask(settings, self.found, reserve)

    def prove(self, settings: Sequence[Setting]) -> Steps:
        """One more sample of each for the proof."""
        yield from self._ask(settings, self.proof, 0)

    def _ask(self, settings: Sequence[Setting], into: Samples, reserve: int) -> Steps:
        room = max(0.0, self.room() - reserve)
        costs = accumulate(map(self._cost, settings))
        asked = [setting for setting, cost in zip(settings, costs, strict=True) if cost - 1 < room]
        self.cut = self.cut or len(asked) < len(settings)
        if asked:
            for setting, answer in zip(asked, (yield asked), strict=True):
                self._record(setting, answer, into)

    def _cost(self, setting: Setting) -> int:
        """In points: to start other processes takes about as long as one."""
        changed = (self.knobs[index].restarts for index in self.changed(setting))
        return 2 if any(changed) else 1

    def _record(self, setting: Setting, answer: Answer, into: Samples) -> None:
        if isinstance(answer, Sample):
            into.add(setting, answer)
        elif answer is None:
            self.cut = True
        else:
            self.notes.append(f"{self.name(setting)} failed: {answer.reason}")
            # It has run before: an accident, not its settings'.
            if setting not in self.found.of:
                self.failed[setting] = answer.reason
