"""What workloads give to comparisons and histories: times, by keys that are the same whoever measured them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, FLOOR, NONE
from overlap_sweep.results.estimate import Estimate, estimate, hidden_fraction, normalised, pooled_none
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Case
from overlap_sweep.results.verdict import Scatter

WHOLE = "all"
"""The pass of what has but one: a layer, a kernel, a copy."""
BASELINES = {NONE, DEFAULT, FLOOR}
"""Settings that are the same thing in every dataset."""


class Key(NamedTuple):
    """What was measured. A field that is compared and not matched is None while keys are matched."""

    model: Any
    """None of kernels and copies, which are the same where their sizes are."""
    tokens: Any
    precision: Any
    backend: Any
    device: Any
    tp_size: Any
    operator: str
    """Or whatever else was measured, with the sizes that make it the same."""
    pass_name: str
    setting: Any
    """What the pass is given, in a word: knobs of slots, a variant, an implementation; empty for the pass, whatever
    its setting."""

    def named(self, telling: Sequence[str]) -> str:
        """Returns the pass in words, after the values of these fields, which distinguish it from other cases."""
        values = {name: str(getattr(self, name)) for name in telling if getattr(self, name) is not None}
        case = [f"{value} tokens" if name == "tokens" else value for name, value in values.items()]
        return " ".join([*case, f"TP={self.tp_size} {self.operator} {self.pass_name}"])

    @property
    def order(self) -> tuple[Any, ...]:
        """Returns a sort key: case, TP size, operators in the layer's order, the others last; settings keep theirs."""
        operators = list(space.OPERATORS)
        place = operators.index(self.operator) if self.operator in operators else len(operators)
        case = (str(self.model), self.tokens or 0, str(self.precision), str(self.backend), str(self.device))
        return (*case, self.tp_size, place, self.operator, self.pass_name != "fwd")


def key_of_pass(case: Case, tp_size: int, operator: str, pass_name: str) -> Key:
    """Returns the key of a pass, of no setting yet."""
    return Key(**case._asdict(), tp_size=tp_size, operator=operator, pass_name=pass_name, setting="")


@dataclass(frozen=True)
class KeyedTime:
    """All measurements of one thing, pooled."""

    key: Key
    time: Estimate
    none_us: float | None
    """None where it was not measured without overlap."""
    floor_us: float | None
    points: tuple[str, ...]

    @property
    def hidden_fraction(self) -> float:
        """Returns the share of the communication that is hidden; NaN where it is undefined."""
        if self.none_us is None or self.floor_us is None:
            return math.nan
        return hidden_fraction(self.time.time_us, self.none_us, self.floor_us)


def pooled(key: Key, points: Sequence[tuple[str, Mapping[str, Timing]]], between: Scatter) -> list[KeyedTime]:
    """Returns the times of several points by setting: relative to the none time beside them, where every point has one.

    `key` is that of no setting yet, `points` are their names and times by setting, `between` is their scatter.
    """
    every_none = [times[NONE] for _, times in points if NONE in times]
    none = pooled_none(every_none) if len(every_none) == len(points) else None
    found: dict[str, KeyedTime] = {}
    for setting in dict.fromkeys(name for _, times in points for name in times):
        having = [(name, times) for name, times in points if setting in times]
        if none is None:
            time = estimate(*(times[setting].samples_us for _, times in having))
        else:
            time = none if setting == NONE else normalised([(times[setting], times[NONE]) for _, times in having], none)
        found[setting] = KeyedTime(
            key=key._replace(setting=setting),
            time=between.added_to(time, len(having)),
            none_us=none.time_us if none else None,
            floor_us=None,
            points=tuple(name for name, _ in having),
        )
    floor_us = found[FLOOR].time.time_us if FLOOR in found else None
    return [replace(time, floor_us=floor_us) for time in found.values()]


class Decision(NamedTuple):
    """What is best for a pass."""

    best: KeyedTime
    slots: Mapping[str, str]
    """What each slot of the pass is given in it, in a word."""
    tried: frozenset[str]
    """The slots that some point overlapped."""


@dataclass(frozen=True)
class Comparable:
    """What a workload gives to the comparison of one dataset."""

    times: list[KeyedTime]
    decisions: dict[Key, Decision] = field(default_factory=dict)
    """By key without a setting."""
    proofs: list[str] = field(default_factory=list)
    """What was proven of whole layers, or could not be."""
    lacking: str = ""
    """Why there are no times though there are points that are ok, behind the directory's name."""


def together(parts: Sequence[Comparable]) -> Comparable:
    """Returns what several workloads give to the comparison of the same dataset."""
    return Comparable(
        times=[time for part in parts for time in part.times],
        decisions={key: decision for part in parts for key, decision in part.decisions.items()},
        proofs=[proof for part in parts for proof in part.proofs],
        lacking=next((part.lacking for part in parts if part.lacking), ""),
    )


class Sample(NamedTuple):
    """One measurement of one setting, for its history."""

    timings: tuple[Timing, ...]
    """Of the passes whose times add up to the point's."""
    none_us: float | None
    """None where it was not measured without overlap."""
    pass_name: str
    tokens: int | None
