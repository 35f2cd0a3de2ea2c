"""What one search chooses among, the settings of one pass of one operator, and what was measured of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.overlap.space import Setting
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.search import Failure, mean

ORDINAL = "num_sm"
"""The knob along which time falls and then rises; the others are tried one value at a time."""

Arm = tuple[Any, ...]
"""What candidates have in common that differ in nothing but num_sm."""

MOST_FAILURES = 2
"""Of an arm. A single one may be an accident of the machine; each may cost a new process group."""


@dataclass(frozen=True)
class Candidate:
    """What the slots of one pass are given; hashable. Without slots it is `none`."""

    slots: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Setting]) -> Candidate:
        """Returns the candidate of `settings` by slot; a slot that is left out is not overlapped."""
        return cls(tuple((slot, tuple(sorted(settings[slot].items()))) for slot in sorted(settings)))

    @cached_property
    def settings(self) -> dict[str, Setting]:
        return {slot: dict(setting) for slot, setting in self.slots}

    @cached_property
    def methods(self) -> dict[str, str]:
        """Returns the methods by slot."""
        return {slot: setting["method"] for slot, setting in self.settings.items()}

    @cached_property
    def num_sms(self) -> dict[str, int]:
        """Returns num_sm by slot, of those that have one."""
        return {slot: setting[ORDINAL] for slot, setting in self.settings.items() if ORDINAL in setting}

    @cached_property
    def arm(self) -> Arm:
        return tuple((slot, tuple(item for item in setting if item[0] != ORDINAL)) for slot, setting in self.slots)

    def __str__(self) -> str:
        """Returns `none`, `ring_agg0`, or of several slots `dgrad bulk_sm4 + wgrad bulk_sm2`."""
        return space.settings_name(self.settings)


NONE = Candidate()


def changes(one: Candidate, other: Candidate) -> list[tuple[str, str]] | None:
    """Returns the knobs but num_sm, by slot, in which two candidates differ; None where their methods differ."""
    if one.methods != other.methods:
        return None
    settings = ((slot, setting, other.settings[slot]) for slot, setting in one.settings.items())
    return [
        (slot, knob)
        for slot, own, others in settings
        for knob in own.keys() | others.keys()
        if knob != ORDINAL and own.get(knob) != others.get(knob)
    ]


@dataclass(frozen=True)
class Cell:
    """What one search may choose among: any subset of what the knobs could be combined to."""

    candidates: tuple[Candidate, ...]
    """Without `none`, simpler first; each once."""

    @property
    def groups(self) -> list[list[Candidate]]:
        """Returns the candidates in groups connected by num_sm and single knobs: in each every one can be reached from
        every other by changing one of them at a time."""
        arms: dict[Arm, list[Candidate]] = defaultdict(list)
        for candidate in self.candidates:
            arms[candidate.arm].append(candidate)
        left = [own[0] for own in arms.values()]
        groups: list[list[Candidate]] = []
        while left:
            reached = [left.pop(0)]
            for candidate in reached:
                near = [other for other in left if len(changes(candidate, other) or ()) == 1]
                left = [other for other in left if other not in near]
                reached += near
            groups.append([candidate for first in reached for candidate in arms[first.arm]])
        return groups

    def ladder(self, candidate: Candidate, slot: str) -> list[Candidate]:
        """Returns the candidates that differ from this one only in the slot's num_sm, and itself, by num_sm."""
        others = {**candidate.num_sms, slot: None}
        found = [c for c in self.candidates if c.arm == candidate.arm and {**c.num_sms, slot: None} == others]
        return sorted(found, key=lambda other: other.num_sms[slot])

    def flips(self, candidate: Candidate) -> dict[tuple[str, str], dict[Any, list[Candidate]]]:
        """Returns by slot and categorical knob, by another value of it, the candidates that have it and differ from
        this one in nothing else but num_sm. Of two slots, one may also not be overlapped at all: its method `none`."""
        found: dict[tuple[str, str], dict[Any, list[Candidate]]] = defaultdict(lambda: defaultdict(list))
        for slot in candidate.settings:
            rest = Candidate(tuple(item for item in candidate.slots if item[0] != slot))
            if rest in self.candidates:
                found[slot, "method"] = {"none": [rest]}
        for other in self.candidates:
            changed = changes(candidate, other) or []
            if len(changed) == 1:
                slot, knob = changed[0]
                found[slot, knob][other.settings[slot].get(knob)].append(other)
        return found


def distance(one: Candidate, other: Candidate) -> float:
    """Returns the distance in num_sm, in octaves summed over the slots."""
    both = one.num_sms.keys() & other.num_sms.keys()
    return sum(abs(math.log2(one.num_sms[slot] / other.num_sms[slot])) for slot in both)


Measured = Estimate | Failure
"""One measurement of a candidate, comparable with the others of its cell; or why there is none."""

Steps = Generator[Sequence[Candidate], Mapping[Candidate, Measured]]
"""A part of a search: yields what to measure next, and is sent what came of it."""

Search = Generator[Sequence[Candidate], Mapping[Candidate, Measured], str]
"""Steps that return why they ended."""


@dataclass
class Trail:
    """The measurements of one cell so far. Times are in microseconds."""

    cell: Cell
    none: Estimate
    """Without overlap: measured beside every candidate."""
    floor_us: float
    samples: dict[Candidate, list[Estimate]] = field(default_factory=dict)
    failed: dict[Candidate, Failure] = field(default_factory=dict)
    stopped: str = ""
    """Why the search ended; empty while it has not."""

    def measure(self, candidates: Iterable[Candidate]) -> Steps:
        """Has those measured that never were; each of them is in `samples` or `failed` then."""
        new = [c for c in dict.fromkeys(candidates) if c not in self.samples and c not in self.failed]
        if new:
            yield from self.measure_again(new)

    def measure_again(self, candidates: Sequence[Candidate]) -> Steps:
        """Takes one more sample of each."""
        self.record((yield candidates))

    def record(self, measured: Mapping[Candidate, Measured]) -> None:
        """Adds measurements. If one num_sm computes wrong numbers, its whole arm is distrusted, even if right."""
        for candidate, found in measured.items():
            if isinstance(found, Estimate):
                self.samples.setdefault(candidate, []).append(found)
            else:
                self.failed[candidate] = found
        wrong = {candidate.arm: candidate for candidate, found in self.failed.items() if found.wrong_numbers}
        for candidate in [candidate for candidate in self.samples if candidate.arm in wrong]:
            reason = f"{wrong[candidate.arm]}, which differs in num_sm only, computes wrong numbers"
            self.failed.setdefault(candidate, Failure(reason, wrong_numbers=True))
        self.samples = {candidate: own for candidate, own in self.samples.items() if candidate not in self.failed}

    def given_up(self, arm: Arm) -> bool:
        """Returns whether too much of the arm failed to go on with it."""
        own = [found for other, found in self.failed.items() if other.arm == arm]
        return len(own) >= MOST_FAILURES or any(found.wrong_numbers for found in own)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Returns the estimate from all samples of the candidate."""
        return self.none if candidate == NONE else together(self.samples[candidate])

    def time_us(self, candidate: Candidate) -> float:
        return self.estimate(candidate).time_us

    @property
    def notes(self) -> list[str]:
        """Returns a note on each failure, and its reason."""
        return [f"{candidate} failed: {failure.reason}" for candidate, failure in self.failed.items()]

    @property
    def overlaps(self) -> list[Candidate]:
        """Returns the measured candidates but `none`, fastest first."""
        return sorted(self.samples, key=self.time_us)

    @property
    def best(self) -> Candidate:
        """Returns the fastest so far; the analysis, which sees all measurements, decides ties."""
        return min([NONE, *self.samples], key=self.time_us)

    @property
    def evaluations(self) -> int:
        """Returns the number of measurements of candidates; `none` comes with every one of them."""
        return sum(map(len, self.samples.values())) + len(self.failed)


def together(samples: Sequence[Estimate]) -> Estimate:
    """Returns several medians of one setting as one."""
    times_us = [sample.time_us for sample in samples]
    return samples[0] if len(samples) == 1 else mean(samples, (max(times_us) - min(times_us)) / 2)
