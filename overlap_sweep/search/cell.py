"""The search space of one pass of an operator: its candidate settings and their measurements."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from overlap_sweep.overlap import space
from overlap_sweep.overlap.space import KnobValue, Setting
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.search import Failure, mean

ORDINAL = "num_sm"
"""The knob along which time falls and then rises; other knobs are tried one value at a time."""

Arm = tuple[tuple[str, tuple[tuple[str, KnobValue], ...]], ...]
"""Key of candidates that differ only in num_sm."""

MOST_FAILURES = 2
"""Failures after which an arm is given up. One may be an accident; each may cost a new process group."""


@dataclass(frozen=True)
class Candidate:
    """Settings of the slots of one pass; hashable. Without slots it is `none`."""

    slots: Arm = ()

    @classmethod
    def of(cls, settings: Mapping[str, Setting]) -> Candidate:
        """Returns the candidate with these settings by slot; slots left out are not overlapped."""
        return cls(tuple((slot, tuple(sorted(settings[slot].items()))) for slot in sorted(settings)))

    @cached_property
    def settings(self) -> dict[str, Setting]:
        return {slot: dict(setting) for slot, setting in self.slots}

    @cached_property
    def methods(self) -> dict[str, str]:
        """Returns the methods by slot."""
        return {slot: space.method_of(setting) for slot, setting in self.settings.items()}

    @cached_property
    def num_sms(self) -> dict[str, int]:
        """Returns num_sm by slot, for slots that have one."""
        return {slot: space.num_sm_of(setting) for slot, setting in self.settings.items() if ORDINAL in setting}

    @cached_property
    def arm(self) -> Arm:
        return tuple((slot, tuple(item for item in setting if item[0] != ORDINAL)) for slot, setting in self.slots)

    def __str__(self) -> str:
        """Returns a name such as `none`, `ring_agg0` or, for several slots, `dgrad bulk_sm4 + wgrad bulk_sm2`."""
        return space.settings_name(self.settings)


NONE = Candidate()


def changes(one: Candidate, other: Candidate) -> list[tuple[str, str]] | None:
    """Returns the slots and knobs, except num_sm, in which two candidates differ; None if their methods differ."""
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
    """The search space of one pass: any subset of the combinations of knobs."""

    candidates: tuple[Candidate, ...]
    """Distinct candidates without `none`, simpler first."""

    @property
    def groups(self) -> list[list[Candidate]]:
        """Returns the candidates in connected groups: within a group, each can be reached from each other by changing
        one knob at a time."""
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
        """Returns this candidate and those that differ only in the slot's num_sm, in order of num_sm."""
        others = {**candidate.num_sms, slot: None}
        found = [c for c in self.candidates if c.arm == candidate.arm and {**c.num_sms, slot: None} == others]
        return sorted(found, key=lambda other: other.num_sms[slot])

    def flips(self, candidate: Candidate) -> dict[tuple[str, str], dict[KnobValue | None, list[Candidate]]]:
        """Returns the candidates that differ from this one in one categorical knob, and perhaps num_sm: by slot and
        knob, then by its value. With two slots, one may also have the method `none`."""
        found: dict[tuple[str, str], dict[KnobValue | None, list[Candidate]]] = defaultdict(lambda: defaultdict(list))
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
    """Returns the distance in num_sm, in octaves, summed over the slots."""
    both = one.num_sms.keys() & other.num_sms.keys()
    return sum(abs(math.log2(one.num_sms[slot] / other.num_sms[slot])) for slot in both)


Measured = Estimate | Failure
"""One measurement of a candidate, comparable within its cell, or the failure."""

Steps = Generator[Sequence[Candidate], Mapping[Candidate, Measured]]
"""A part of a search: yields the candidates to measure next and is sent their measurements."""

Search = Generator[Sequence[Candidate], Mapping[Candidate, Measured], str]
"""Steps that return why they ended."""


@dataclass
class Trail:
    """The measurements of one cell so far. Times are in microseconds."""

    cell: Cell
    none: Estimate
    """Time without overlap, which is measured with every candidate."""
    floor_us: float
    samples: dict[Candidate, list[Estimate]] = field(default_factory=dict)
    failed: dict[Candidate, Failure] = field(default_factory=dict)
    stopped: str = ""
    """Why the search ended; empty while it runs."""

    def measure(self, candidates: Iterable[Candidate]) -> Steps:
        """Measures the candidates that are not yet in `samples` or `failed`."""
        new = [c for c in dict.fromkeys(candidates) if c not in self.samples and c not in self.failed]
        if new:
            yield from self.measure_again(new)

    def measure_again(self, candidates: Sequence[Candidate]) -> Steps:
        """Measures each candidate once more."""
        self.record((yield candidates))

    def record(self, measured: Mapping[Candidate, Measured]) -> None:
        """Adds measurements. If one num_sm computes wrong numbers, its whole arm is marked as failed."""
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
        """Returns whether too many candidates of the arm failed."""
        own = [found for other, found in self.failed.items() if other.arm == arm]
        return len(own) >= MOST_FAILURES or any(found.wrong_numbers for found in own)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Returns the estimate from all samples of the candidate."""
        return self.none if candidate == NONE else together(self.samples[candidate])

    def time_us(self, candidate: Candidate) -> float:
        return self.estimate(candidate).time_us

    @property
    def notes(self) -> list[str]:
        """Returns a note on each failure, with its reason."""
        return [f"{c} {'failed' if f.measured else 'not measured'}: {f.reason}" for c, f in self.failed.items()]

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
        """Returns the number of measurements of candidates; each includes `none`."""
        tried = sum(failure.measured for failure in self.failed.values())
        return sum(map(len, self.samples.values())) + tried


def together(samples: Sequence[Estimate]) -> Estimate:
    """Returns one estimate from several of the same setting."""
    times_us = [sample.time_us for sample in samples]
    return samples[0] if len(samples) == 1 else mean(samples, (max(times_us) - min(times_us)) / 2)
