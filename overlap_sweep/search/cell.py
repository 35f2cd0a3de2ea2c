"""What is searched, one pass of one operator and the settings that its slots may be given, and what was measured of it.

A trail knows every setting that was measured, how often, and why others were not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.overlap.space import Setting
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.search import Failure, mean

ORDINAL = "num_sm"
"""The knob along which time falls and then rises; the others are tried one value at a time."""
FOLLOWS = "cga_size"
"""May follow from num_sm (clusters of two want even counts): then it is no knob of its own."""

Arm = tuple[Any, ...]
"""Candidates that differ in nothing but num_sm."""

MOST_FAILURES = 2
"""Of an arm. A single one may be an accident of the machine; each may cost a new process group."""


@dataclass(frozen=True)
class Candidate:
    """What the slots of one pass are given; hashable. Without slots it is `none`."""

    slots: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, Setting]) -> Candidate:
        """`settings` by slot; a slot that is left out is not overlapped."""
        return cls(tuple((slot, tuple(sorted(settings[slot].items()))) for slot in sorted(settings)))

    @cached_property
    def settings(self) -> dict[str, Setting]:
        return {slot: dict(setting) for slot, setting in self.slots}

    @cached_property
    def num_sms(self) -> dict[str, int]:
        """By slot, of those that have one."""
        return {slot: setting[ORDINAL] for slot, setting in self.settings.items() if ORDINAL in setting}

    def __str__(self) -> str:
        """`none`, `ring_agg0`, or of several slots `dgrad bulk_sm4 + wgrad bulk_sm2`."""
        return space.settings_name(self.settings)


NONE = Candidate()


@dataclass(frozen=True)
class Cell:
    """What one search may choose among: any subset of what the knobs could be combined to."""

    candidates: tuple[Candidate, ...]
    """Without `none`, simpler first; each once."""

    @cached_property
    def arms(self) -> dict[Arm, list[Candidate]]:
        """By arm its candidates, in their order."""
        return _grouped((self.arm(candidate), candidate) for candidate in self.candidates)

    @property
    def groups(self) -> list[list[Candidate]]:
        """The candidates by what num_sm and single knobs lead to: in each group every one can be reached from every
        other by changing one of them at a time."""
        left, groups = dict.fromkeys(self.candidates), []
        while left:
            reached, ahead = set(), [next(iter(left))]
            while ahead:
                candidate = ahead.pop()
                if candidate in left:
                    del left[candidate]
                    reached.add(candidate)
                    knobs = (
                        (slot, knob) for slot, setting in candidate.slots for knob, _ in setting if knob != "method"
                    )
                    lines = (self._lines[self._line(candidate, slot, knob)] for slot, knob in knobs)
                    ahead += chain(self.arms[self.arm(candidate)], *lines)
            groups.append([candidate for candidate in self.candidates if candidate in reached])
        return groups

    def arm(self, candidate: Candidate) -> Arm:
        return self._without(candidate, {(slot, ORDINAL) for slot in candidate.settings})

    def ladder(self, candidate: Candidate, slot: str) -> list[Candidate]:
        """The candidates that differ from this one in nothing but the slot's num_sm, itself among them, by num_sm."""
        return sorted(self._lines[self._line(candidate, slot, ORDINAL)], key=lambda other: other.num_sms[slot])

    def flips(self, candidate: Candidate) -> dict[tuple[str, str], dict[Any, list[Candidate]]]:
        """By slot and categorical knob, by another value of it: the candidates that have it and differ from this one
        in nothing else but num_sm. Of two slots, one may also not be overlapped at all: that is its method `none`."""
        found: dict[tuple[str, str], dict[Any, list[Candidate]]] = {}
        for slot in candidate.settings:
            rest = Candidate(tuple(item for item in candidate.slots if item[0] != slot))
            if rest in self.arms.get(self.arm(rest), ()):
                found[slot, "method"] = {"none": [rest]}
        for slot, setting in candidate.settings.items():
            for knob in (name for name in setting if name not in ("method", ORDINAL)):
                line = self._lines[self._line(candidate, slot, knob)]
                by_value = _grouped((other.settings[slot].get(knob), other) for other in line)
                if others := {value: others for value, others in by_value.items() if value != setting[knob]}:
                    found[slot, knob] = others
        return found

    @cached_property
    def _cga_follows(self) -> bool:
        """Whether num_sm tells the cluster size wherever it is given."""
        sizes: dict[Any, set[Any]] = defaultdict(set)
        for candidate in self.candidates:
            for slot, setting in candidate.settings.items():
                rest = frozenset(item for item in setting.items() if item[0] != FOLLOWS)
                sizes[slot, rest].add(setting.get(FOLLOWS))
        return all(len(found) == 1 for found in sizes.values())

    def _without(self, candidate: Candidate, knobs: set[tuple[str, str]]) -> Arm:
        """The candidate without these knobs, by slot; without the cluster size, too, where its num_sm is left out."""
        dropped = knobs | {(slot, FOLLOWS) for slot, knob in knobs if knob == ORDINAL and self._cga_follows}
        return tuple((s, tuple(item for item in x if (s, item[0]) not in dropped)) for s, x in candidate.slots)

    def _line(self, candidate: Candidate, slot: str, knob: str) -> Any:
        """Equal for candidates that differ in the slot's knob only, or if it is not num_sm in that, too."""
        open_slots = [slot] if knob == ORDINAL else candidate.settings
        return slot, knob, self._without(candidate, {(slot, knob), *((each, ORDINAL) for each in open_slots)})

    @cached_property
    def _lines(self) -> dict[Any, list[Candidate]]:
        return _grouped(
            (self._line(candidate, slot, knob), candidate)
            for candidate in self.candidates
            for slot, setting in candidate.slots
            for knob, _ in setting
            if knob != "method"
        )


def _grouped(pairs: Iterable[tuple[Any, Candidate]]) -> dict[Any, list[Candidate]]:
    found: dict[Any, list[Candidate]] = defaultdict(list)
    for key, candidate in pairs:
        found[key].append(candidate)
    return dict(found)


def distance(one: Candidate, other: Candidate) -> float:
    """How far apart in num_sm, in octaves summed over the slots."""
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
    seeds: Sequence[Candidate] = ()
    """What is measured in any case, such as the settings of a preset."""
    samples: dict[Candidate, list[Estimate]] = field(default_factory=dict)
    failed: dict[Candidate, Failure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was dropped, and why."""
    stopped: str = ""
    """Why the search ended; empty while it has not."""

    def measure(self, candidates: Iterable[Candidate]) -> Steps:
        """Have those measured that never were; each of them is in `samples` or `failed` then."""
        new = [c for c in dict.fromkeys(candidates) if c not in self.samples and c not in self.failed]
        if new:
            yield from self.measure_again(new)

    def measure_again(self, candidates: Sequence[Candidate]) -> Steps:
        """One more sample of each."""
        self.record((yield candidates))

    def record(self, measured: Mapping[Candidate, Measured]) -> None:
        """Numbers that are wrong at one num_sm may be right by chance at another: then the whole arm is distrusted."""
        for candidate, found in measured.items():
            if isinstance(found, Estimate):
                self.samples.setdefault(candidate, []).append(found)
                continue
            self.notes.append(f"{candidate} failed: {found.reason}")
            if not (found.by_chance and candidate in self.samples):
                self.failed[candidate] = found
                self.samples.pop(candidate, None)
        wrong = {self.cell.arm(candidate): candidate for candidate, found in self.failed.items() if found.wrong_numbers}
        for candidate in [candidate for candidate in self.samples if self.cell.arm(candidate) in wrong]:
            culprit = wrong[self.cell.arm(candidate)]
            self.failed[candidate] = Failure(f"{culprit}, which differs in num_sm only, computes wrong numbers", True)
            self.notes.append(f"{candidate} is not trusted: {self.failed[candidate].reason}")
            del self.samples[candidate]

    def given_up(self, candidate: Candidate) -> bool:
        """Whether too much of the candidate's arm failed to go on with it."""
        own = [found for other, found in self.failed.items() if self.cell.arm(other) == self.cell.arm(candidate)]
        return sum(not found.by_chance for found in own) >= MOST_FAILURES or any(found.wrong_numbers for found in own)

    def estimate(self, candidate: Candidate) -> Estimate:
        """All samples of the candidate together."""
        return self.none if candidate == NONE else together(self.samples[candidate])

    def time_us(self, candidate: Candidate) -> float:
        """Infinite for what failed or was not measured."""
        known = candidate == NONE or candidate in self.samples
        return self.estimate(candidate).time_us if known else math.inf

    @property
    def overlaps(self) -> list[Candidate]:
        """What was measured but `none`, fastest first."""
        return sorted(self.samples, key=self.time_us)

    @property
    def best(self) -> Candidate:
        """The fastest so far; ties are for the analysis, which sees all measurements, to decide."""
        return min([NONE, *self.samples], key=self.time_us)

    @property
    def settings_tried(self) -> int:
        return len(self.samples) + len(self.failed)

    @property
    def evaluations(self) -> int:
        """Measurements of candidates; `none` comes with every one of them."""
        return sum(map(len, self.samples.values())) + len(self.failed)


def together(samples: Sequence[Estimate]) -> Estimate:
    """Several medians of one setting as one."""
    times_us = [sample.time_us for sample in samples]
    return samples[0] if len(samples) == 1 else mean(samples, (max(times_us) - min(times_us)) / 2)
