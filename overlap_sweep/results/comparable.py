"""Times that workloads give to comparisons and histories, by keys that are the same for all sweeps."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import DEFAULT, FLOOR, NONE
from overlap_sweep.results.estimate import Estimate, estimate, hidden_fraction, normalised, pooled_none
from overlap_sweep.results.measured import Timing
from overlap_sweep.results.points import Case, Point
from overlap_sweep.results.verdict import Scatter

WHOLE = "all"
"""The pass of workloads that have only one: layers, kernels, copies."""
BASELINES = {NONE, DEFAULT, FLOOR}
"""Settings that mean the same in every dataset."""


class Key(NamedTuple):
    """Identifies what was measured. Fields that are compared instead of matched are None while keys are matched."""

    model: str | None
    """Name of the model; None for kernels and copies, which are identified by their sizes."""
    tokens: int | None
    precision: str | None
    backend: str | None
    device: str | None
    tp_size: int | None
    operator: str
    """The operator, or what else was measured, with its sizes."""
    pass_name: str
    setting: str | None
    """Name of the setting: knobs of slots, a variant, an implementation. Empty for the pass with any setting."""
    nodes: int | None = 1
    process_wide: str | None = ""

    def named(self, shown: Sequence[str]) -> str:
        """Returns the name of the pass, after the values of the fields to show, which distinguish its case."""
        values = {name: str(getattr(self, name)) for name in shown if getattr(self, name) not in (None, "")}
        case = [f"{value} {name}" if name in ("tokens", "nodes") else value for name, value in values.items()]
        return " ".join([*case, f"TP={self.tp_size} {self.operator} {self.pass_name}"])

    @property
    def order(self) -> tuple[object, ...]:
        """Returns a sort key: case, TP size, operators in the layer's order, others last; settings keep their order."""
        operators = list(space.OPERATORS)
        place = operators.index(self.operator) if self.operator in operators else len(operators)
        names = map(str, (self.precision, self.backend, self.device, self.nodes or 0, self.process_wide))
        return (str(self.model), self.tokens or 0, *names, self.tp_size, place, self.operator, self.pass_name != "fwd")


def key_of_pass(case: Case, tp_size: int, operator: str, pass_name: str) -> Key:
    """Returns the key of a pass, without a setting."""
    return Key(**case._asdict(), tp_size=tp_size, operator=operator, pass_name=pass_name, setting="")


@dataclass(frozen=True)
class KeyedTime:
    """All measurements with one key, pooled."""

    key: Key
    time: Estimate
    none_us: float | None
    """Time with no overlap; None if it was not measured."""
    floor_us: float | None
    points: tuple[str, ...]

    @property
    def hidden_fraction(self) -> float:
        """Returns the hidden fraction; NaN if it is undefined."""
        if self.none_us is None or self.floor_us is None:
            return math.nan
        return hidden_fraction(self.time.time_us, self.none_us, self.floor_us)


def pooled(key: Key, points: Sequence[tuple[str, Mapping[str, Timing]]], between: Scatter) -> list[KeyedTime]:
    """Returns the pooled times of several points, one per setting, relative to each point's none time if all have one.

    `key` has no setting, `points` are names and times by setting, `between` is the scatter between points.
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


def pooled_by_key(
    points: Iterable[tuple[Key, Point, Mapping[str, Timing]]], typical: Mapping[str, float]
) -> list[KeyedTime]:
    """Returns the pooled times of the points with equal keys, each given with its times by setting. `typical`: the
    scatter between points by kind of device."""
    found: dict[tuple[Key, str], list[tuple[str, Mapping[str, Timing]]]] = defaultdict(list)
    for key, point, times in points:
        found[key, point.config.runtime.device].append((point.name, times))
    return [time for (key, device), own in found.items() for time in pooled(key, own, Scatter(typical[device]))]


class Decision(NamedTuple):
    """The best setting of a pass."""

    best: KeyedTime
    slots: Mapping[str, str]
    """Name of its setting for each slot of the pass."""
    tried: frozenset[str]
    """Slots that some point tried to overlap."""


@dataclass(frozen=True)
class Comparable:
    """The times and decisions of one workload in one dataset."""

    times: list[KeyedTime]
    decisions: dict[Key, Decision] = field(default_factory=dict)
    """Decisions by key, whose setting is empty."""
    proofs: list[str] = field(default_factory=list)
    """Verdicts of the tuner's proofs on whole layers."""
    lacking: str = ""
    """Why there are no times although some points are ok; follows the directory's name in a sentence."""


def together(parts: Sequence[Comparable]) -> Comparable:
    """Returns several workloads' parts of the same dataset, joined."""
    return Comparable(
        times=[time for part in parts for time in part.times],
        decisions={key: decision for part in parts for key, decision in part.decisions.items()},
        proofs=[proof for part in parts for proof in part.proofs],
        lacking=next((part.lacking for part in parts if part.lacking), ""),
    )


class Sample(NamedTuple):
    """One measurement of one setting, for its history."""

    timings: tuple[Timing, ...]
    """Timings of the passes whose times add up to the point's."""
    none_us: float | None
    pass_name: str
    tokens: int | None
