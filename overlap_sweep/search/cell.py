"""What is searched, one pass of one operator and the settings that its slots may be given, and what was measured of it.

A trail knows every setting that was measured, how often, and why others were not."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.overlap.space import Setting
from overlap_sweep.results.estimate import Estimate

ORDINAL = "num_sm"
"""The knob along which time falls and then rises; the others are tried one value at a time."""
FOLLOWS = "cga_size"
"""May follow from num_sm (clusters of two want even counts): then it is no knob of its own."""

Arm = tuple[Any, ...]
"""Candidates that differ in nothing but num_sm."""

MOST_FAILURES = 2
"""Of an arm. A single one may be an accident of the machine; each may cost a new process group."""

USUAL_NUM_SM = 16
"""What Transformer Engine gives to every kernel that moves data by SMs: about what fills the links."""


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
    def ordinal_slots(self) -> tuple[str, ...]:
        """The slots that have a num_sm."""
        return tuple(slot for slot, setting in self.settings.items() if ORDINAL in setting)

    def __str__(self) -> str:
        """`none`, `ring_agg0`, or of several slots `dgrad bulk_sm4 + wgrad bulk_sm2`."""
        return space.settings_name(self.settings)


NONE = Candidate()


@dataclass(frozen=True)
class Cell:
    """One search. Candidates may be any subset of what the knobs could be combined to."""

    label: str
    """Such as `llama3_70b TP=8 fc1 bwd`."""
    candidates: tuple[Candidate, ...]
    """Without `none`, simpler first; each once."""

    @cached_property
    def arms(self) -> dict[Arm, list[Candidate]]:
        """By arm its candidates, in their order."""
        arms: dict[Arm, list[Candidate]] = defaultdict(list)
        for candidate in self.candidates:
            arms[self.arm(candidate)].append(candidate)
        return dict(arms)

    @cached_property
    def groups(self) -> list[list[Candidate]]:
        """The candidates by what num_sm and single knobs lead to: in each group every one can be reached from every
        other by changing one of them at a time."""
        group_of: dict[Candidate, list[Candidate]] = {}
        for line in (*self.arms.values(), *self._neighbours.values()):
            joined = {id(group_of[c]): group_of[c] for c in line if c in group_of}
            members = [c for group in joined.values() for c in group]
            members += [c for c in line if c not in group_of]
            group_of.update(dict.fromkeys(members, members))
        order = {candidate: index for index, candidate in enumerate(self.candidates)}
        groups = {id(group): sorted(group, key=order.__getitem__) for group in group_of.values()}
        return sorted(groups.values(), key=lambda group: order[group[0]])

    def arm(self, candidate: Candidate) -> Arm:
        return tuple((slot, self._without(setting, ORDINAL)) for slot, setting in candidate.slots)

    def ladder(self, candidate: Candidate, slot: str) -> list[Candidate]:
        """The candidates that differ from this one in nothing but the slot's num_sm, itself among them, by num_sm."""
        return self._ladders[self._line(candidate, slot)]

    def flips(self, candidate: Candidate) -> dict[tuple[str, str], dict[Any, list[Candidate]]]:
        """By slot and categorical knob, by another value of it: the candidates that have it and differ from this one
        in nothing else but num_sm. Of two slots, one may also not be overlapped at all: that is its method `none`."""
        found: dict[tuple[str, str], dict[Any, list[Candidate]]] = {
            (slot, "method"): {"none": [rest]} for slot, rest in self._dropped(candidate).items()
        }
        for slot, setting in candidate.settings.items():
            for knob in (name for name in setting if name not in ("method", ORDINAL)):
                by_value: dict[Any, list[Candidate]] = defaultdict(list)
                for other in self._neighbours[self._apart_from(candidate, slot, knob)]:
                    value = other.settings[slot].get(knob)
                    if value != setting.get(knob):
                        by_value[value].append(other)
                if by_value:
                    found[slot, knob] = dict(by_value)
        return found

    def _dropped(self, candidate: Candidate) -> dict[str, Candidate]:
        """By slot, the candidate without it, where there is one."""
        rests = {
            slot: Candidate(tuple(item for item in candidate.slots if item[0] != slot)) for slot, _ in candidate.slots
        }
        return {slot: rest for slot, rest in rests.items() if rest in self._members}

    @cached_property
    def _members(self) -> frozenset[Candidate]:
        return frozenset(self.candidates)

    @cached_property
    def _cga_follows(self) -> bool:
        """Whether num_sm tells the cluster size wherever it is given."""
        sizes: dict[Any, set[Any]] = defaultdict(set)
        for candidate in self.candidates:
            for slot, setting in candidate.slots:
                knobs = dict(setting)
                rest = tuple(item for item in setting if item[0] not in (ORDINAL, FOLLOWS))
                sizes[slot, rest, knobs.get(ORDINAL)].add(knobs.get(FOLLOWS))
        return all(len(found) == 1 for found in sizes.values())

    def _without(self, setting: Iterable[tuple[str, Any]], *knobs: str) -> tuple[tuple[str, Any], ...]:
        dropped = {*knobs, FOLLOWS} if ORDINAL in knobs and self._cga_follows else set(knobs)
        return tuple(item for item in setting if item[0] not in dropped)

    def _line(self, candidate: Candidate, slot: str) -> Any:
        return slot, tuple((s, self._without(x, ORDINAL) if s == slot else x) for s, x in candidate.slots)

    def _apart_from(self, candidate: Candidate, slot: str, knob: str) -> Any:
        parts = [(s, self._without(x, ORDINAL, *([knob] if s == slot else []))) for s, x in candidate.slots]
        return slot, knob, tuple(parts)

    @cached_property
    def _ladders(self) -> dict[Any, list[Candidate]]:
        ladders: dict[Any, list[Candidate]] = defaultdict(list)
        for candidate in self.candidates:
            for slot, setting in candidate.settings.items():
                if ORDINAL in setting:
                    ladders[self._line(candidate, slot)].append(candidate)
        for (slot, _), ladder in ladders.items():
            ladder.sort(key=lambda candidate: candidate.settings[slot][ORDINAL])
        return ladders

    @cached_property
    def _neighbours(self) -> dict[Any, list[Candidate]]:
        neighbours: dict[Any, list[Candidate]] = defaultdict(list)
        for candidate in self.candidates:
            for slot, setting in candidate.slots:
                for knob in (name for name, _ in setting if name not in ("method", ORDINAL)):
                    neighbours[self._apart_from(candidate, slot, knob)].append(candidate)
        return neighbours


def distance(one: Candidate, other: Candidate) -> float:
    """How far apart in num_sm, in octaves summed over the slots."""
    pairs = [
        (setting.get(ORDINAL), other.settings.get(slot, {}).get(ORDINAL)) for slot, setting in one.settings.items()
    ]
    return sum(abs(math.log2(a / b)) for a, b in pairs if a and b)


@dataclass(frozen=True)
class Failure:
    """A candidate that could not be measured."""

    reason: str
    wrong_numbers: bool = False
    """It computes something else than without overlap."""
    by_chance: bool = False
    """It may be measured at another time: nothing about the candidate is to blame."""


Measured = Estimate | Failure
"""One measurement of a candidate, comparable with the others of its cell; or why there is none."""

Search = Generator[Sequence[Candidate], Mapping[Candidate, Measured], str]
"""Yields what to measure next, is sent what came of it, and returns why it stopped."""

Steps = Generator[Sequence[Candidate], Mapping[Candidate, Measured]]
"""A part of a search."""


def unlimited(candidate: Candidate) -> int:
    """A machine can measure everything again."""
    return sys.maxsize


@dataclass
class Baselines:
    """What is measured beside every candidate, in microseconds."""

    none: Estimate
    floor_us: float
    collective_us: float = 0.0
    """One collective alone, at the full rate of the links; every operator of a layer moves the same activations."""


@dataclass
class Trail:
    """The measurements of one cell so far."""

    cell: Cell
    baselines: Baselines
    samples: dict[Candidate, list[Estimate]] = field(default_factory=dict)
    failed: dict[Candidate, Failure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was dropped, and why."""
    seeds: Sequence[Candidate] = ()
    """What is measured in any case, such as the settings of a preset."""
    stopped: str = ""
    """Why the search ended; empty while it has not."""
    most_samples: Callable[[Candidate], int] = unlimited
    """How often a candidate can be measured at all: a recording ends."""

    def measure(self, candidates: Iterable[Candidate]) -> Steps:
        """Have those measured that never were; each of them is in `samples` or `failed` then."""
        new = [c for c in dict.fromkeys(candidates) if c not in self.samples and c not in self.failed]
        if new:
            self.record((yield new))

    def measure_again(self, candidates: Iterable[Candidate]) -> Steps:
        """One more sample of each."""
        self.record((yield list(candidates)))

    def record(self, measured: Mapping[Candidate, Measured]) -> None:
        """Numbers that are wrong at one num_sm may be right by chance at another: then the whole arm is distrusted."""
        for candidate, found in measured.items():
            if isinstance(found, Estimate):
                self.samples.setdefault(candidate, []).append(found)
                continue
            self.notes.append(f"{candidate} failed: {found.reason}")
            if found.by_chance and candidate in self.samples:
                continue
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
        if candidate == NONE:
            return self.baselines.none
        return together(self.samples[candidate])

    def time_us(self, candidate: Candidate) -> float:
        """Infinite for what failed or was not measured."""
        if candidate != NONE and candidate not in self.samples:
            return math.inf
        return self.estimate(candidate).time_us

    @property
    def known(self) -> list[Candidate]:
        """`none` and what was measured, fastest first."""
        return sorted([NONE, *self.samples], key=self.time_us)

    @property
    def overlaps(self) -> list[Candidate]:
        """What was measured but `none`, fastest first."""
        return [candidate for candidate in self.known if candidate != NONE]

    def can_repeat(self, candidate: Candidate) -> bool:
        return len(self.samples[candidate]) < self.most_samples(candidate)

    @property
    def best(self) -> Candidate:
        """The fastest so far; ties are for the analysis, which sees all measurements, to decide."""
        return self.known[0]

    @property
    def settings_tried(self) -> int:
        return len(self.samples) + len(self.failed)

    @property
    def evaluations(self) -> int:
        """Measurements of candidates; `none` comes with every one of them."""
        return sum(map(len, self.samples.values())) + len(self.failed)


def together(samples: Sequence[Estimate]) -> Estimate:
    """Several medians of one setting as one: their mean, and the noise of a mean, or what they really differ by."""
    count = len(samples)
    if count == 1:
        return samples[0]
    mean_us = sum(sample.time_us for sample in samples) / count
    noise_us = math.hypot(*(sample.noise_us for sample in samples)) / count
    spread_us = (max(s.time_us for s in samples) - min(s.time_us for s in samples)) / 2 / math.sqrt(count)
    return Estimate(mean_us, max(noise_us, spread_us), sum(sample.repeats for sample in samples))


Start = Callable[[Trail, str, Sequence[Candidate]], Candidate]
"""Of the cell with this trail and this slot: which of the ladder's candidates to measure first."""


def usual(trail: Trail, slot: str, ladder: Sequence[Candidate]) -> Candidate:
    """The count closest to the library's own."""
    return _closest(ladder, slot, USUAL_NUM_SM)


def modelled(trail: Trail, slot: str, ladder: Sequence[Candidate]) -> Candidate:
    """The fewest SMs at which the communication would take no longer than the GEMM beside it.

    A collective takes bytes / link rate with the usual count, and inversely longer with less; the GEMM takes FLOPs /
    GEMM rate. Both times are those of the baselines: what `none` takes beyond the floor, and the floor.
    """
    gemms = 2 if slot.endswith(("dgrad", "wgrad")) else 1
    gemm_us = trail.baselines.floor_us / gemms
    balanced = USUAL_NUM_SM * trail.baselines.collective_us / gemm_us
    return (
        usual(trail, slot, ladder)
        if math.isnan(balanced)
        else _closest(ladder, slot, min(USUAL_NUM_SM, max(1.0, balanced)))
    )


def _closest(ladder: Sequence[Candidate], slot: str, num_sm: float) -> Candidate:
    return min(ladder, key=lambda candidate: abs(math.log2(candidate.settings[slot][ORDINAL] / num_sm)))


STARTS: dict[str, Start] = {"usual": usual, "model": modelled}


def collectives(operator_kind: str, pass_name: str) -> int:
    """How many collectives a pass has: backward, a column-parallel operator gathers its input and scatters dgrad's
    output."""
    return 2 if (operator_kind, pass_name) == ("column", "bwd") else 1
