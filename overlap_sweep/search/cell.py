"""What is searched: one pass of one operator, and the settings that its slots may be given."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.overlap.space import Setting

ORDINAL = "num_sm"
"""The knob along which time falls and then rises; the others are tried one value at a time."""
FOLLOWS = "cga_size"
"""May follow from num_sm (clusters of two want even counts): then it is no knob of its own."""


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

    @property
    def family(self) -> tuple[tuple[str, str], ...]:
        """By slot the method."""
        return tuple((slot, setting["method"]) for slot, setting in self.settings.items())

    @cached_property
    def ordinal_slots(self) -> tuple[str, ...]:
        """The slots that have a num_sm."""
        return tuple(slot for slot, setting in self.settings.items() if ORDINAL in setting)

    def __str__(self) -> str:
        """`none`, `ring_agg0`, or of several slots `dgrad bulk_sm4 + wgrad bulk_sm2`."""
        return space.settings_name(self.settings)


NONE = Candidate()

Arm = tuple[Any, ...]
"""Candidates that differ in nothing but num_sm."""


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
