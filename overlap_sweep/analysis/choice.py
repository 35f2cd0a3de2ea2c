"""Choose: for every operator, TP size and pass of a case the setting of its slots, `none` included.

A pass is the unit, since dgrad and wgrad can only be timed together: the backward candidates are pairs of settings.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from types import MappingProxyType
from typing import Any

from overlap_sweep import overlap_cfg, space
from overlap_sweep.analysis.estimate import Estimate, distinct, normalised, pooled_none
from overlap_sweep.analysis.failures import Failures, PassKey, of_pass, pass_key
from overlap_sweep.analysis.points import Point
from overlap_sweep.analysis.traces import TraceReading
from overlap_sweep.run_directory import PassTimes
from overlap_sweep.space import Setting

DEFAULT_MARGIN = 0.005
"""The default is measured minutes apart from a point, and one backend's kernels in other process groups than another's;
medians of one setting then differ by some 0.3 %: a smaller difference is a tie, whatever the noise."""
RATIO_OF_PASS = {"fwd": "forward_overlap_ratio", "bwd": "backward_overlap_ratio"}


@dataclass(frozen=True)
class Observation:
    """One pass of one result."""

    point: str
    settings: Mapping[str, Setting]
    """By slot, of this pass only."""
    times: PassTimes
    overlap_ratio: float | None


@dataclass(frozen=True)
class Candidate:
    """What the slots of one pass may be given, and what that costs."""

    settings: Mapping[str, Setting]
    """By slot; a slot that is left out is not overlapped, and none at all is `none`."""
    estimate: Estimate
    """Comparable with the other candidates of the same pass: relative to the none time measured beside it."""
    points: tuple[str, ...]
    """The run directories that it was measured in."""
    overlap_ratio: float | None
    measured: bool = True
    """False for a pair whose slots were measured one at a time: its time is predicted."""

    @property
    def time_us(self) -> float:
        return self.estimate.time_us

    @property
    def name(self) -> str:
        """`none`, `ring_agg0`, or of several slots `dgrad bulk_sm4 + wgrad bulk_sm2`."""
        return space.settings_name(self.settings)


@dataclass(frozen=True)
class PassChoice:
    """The decision for one pass of one operator at one TP size."""

    tp_size: int
    operator: str
    pass_name: str
    candidates: tuple[Candidate, ...]
    """All of them, `none` first, then from simple to complex."""
    chosen: Candidate
    reason: str
    floor_us: float
    tp1_us: float | None
    default: Estimate | None
    """Under the library's default in every slot of the operator; comparable with the candidates, but none of them,
    since it names no settings. None where no default was measured."""
    attempted: frozenset[str] = frozenset()
    """The slots that some point overlapped, whether it could be measured or not."""

    @property
    def none(self) -> Candidate:
        return self.candidates[0]

    @property
    def tried_slots(self) -> frozenset[str]:
        """The slots for which an overlap was tried, also where every try failed; of the others nothing is known."""
        return self.attempted.union(slot for candidate in self.candidates for slot in candidate.settings)

    @property
    def default_wins(self) -> bool:
        """Whether the library's default is faster, beyond the noise and a margin, than anything that was tried."""
        if self.default is None:
            return False
        fastest = min(self.candidates, key=lambda candidate: candidate.time_us).estimate
        faster = self.default.time_us < (1 - DEFAULT_MARGIN) * fastest.time_us
        return faster and self.default.differs_from(fastest)

    @property
    def label(self) -> str:
        return f"{self.operator} {self.pass_name}"


def labels(choices: Sequence[PassChoice]) -> list[str]:
    """`fc1` where both its passes are among the choices, else `fc1 fwd`."""
    passes = Counter(choice.operator for choice in choices)
    both = len(space.PASSES)
    return list(dict.fromkeys(c.operator if passes[c.operator] == both else c.label for c in choices))


def default_sum_us(choices: Sequence[PassChoice]) -> float | None:
    """All their passes under the library's default; None unless it was measured for each."""
    times = [choice.default.time_us for choice in choices if choice.default]
    return sum(times) if times and len(times) == len(choices) else None


def sum_under_us(choices: Sequence[PassChoice], slots: Mapping[str, Mapping[str, Any]]) -> float | None:
    """All their passes under ub_cfgs, such as a preset's; None unless each was measured so."""
    times = []
    for choice in choices:
        settings = overlap_cfg.settings_of_pass(slots, choice.operator, choice.pass_name)
        times += [candidate.time_us for candidate in choice.candidates if dict(candidate.settings) == settings]
    return sum(times) if len(times) == len(choices) else None


def choose_all(
    points: Iterable[Point],
    traces: Mapping[Path, TraceReading],
    objective: str,
    failed: Mapping[PassKey, Failures] = MappingProxyType({}),
) -> list[PassChoice]:
    """One choice per TP size, operator and pass of one case. Launch-bound points have no say, nor has what `failed`
    tells not to trust."""
    failures: dict[tuple[int, str, str], Failures] = {}
    observed: dict[tuple[int, str, str], list[Observation]] = defaultdict(list)
    for point in points:
        if point.result and not point.result.launch_bound:
            for pass_name in space.PASSES:
                key = point.config["tp_size"], point.config["operator"], pass_name
                failures[key] = failed.get(pass_key(point, pass_name), Failures())
                observation = _observe(point, pass_name, traces[point.directory])
                if not failures[key].distrusts(observation.settings):
                    observed[key].append(observation)
    operators = list(space.OPERATORS)
    keys = sorted(observed, key=lambda key: (key[0], operators.index(key[1]), space.PASSES.index(key[2])))
    return [choose(*key, observed[key], objective, failures[key]) for key in keys]


def choose(
    tp_size: int,
    operator: str,
    pass_name: str,
    observations: Sequence[Observation],
    objective: str = "time",
    failures: Failures | None = None,
) -> PassChoice:
    """The best setting of one pass, by `time` or by `overlap_ratio`. What `failures` distrust was left out of the
    observations already."""
    failures = failures or Failures()
    none = pooled_none([observation.times.none for observation in observations])
    candidates = _candidates(observations, none)
    candidates += [pair for pair in _predicted_pairs(candidates) if not failures.distrusts(pair.settings)]
    candidates.sort(key=_complexity)
    chosen, reason = (_fastest if objective == "time" else _most_overlapped)(candidates)
    scaled_floors = [o.times.floor.median_us * none.time_us / o.times.none.median_us for o in observations]
    defaults = distinct(observation.times.default for observation in observations if observation.times.default)
    tp1 = [observation.times.tp1.median_us for observation in observations if observation.times.tp1]
    return PassChoice(
        tp_size=tp_size,
        operator=operator,
        pass_name=pass_name,
        candidates=tuple(candidates),
        attempted=frozenset(failures.attempted),
        chosen=chosen,
        reason=reason,
        floor_us=statistics.median(scaled_floors),
        tp1_us=statistics.median(tp1) if tp1 else None,
        default=normalised([(measured.default, measured.none) for measured in defaults], none) if defaults else None,
    )


def _observe(point: Point, pass_name: str, traces: TraceReading) -> Observation:
    assert point.result
    own = of_pass(point.result.settings, pass_name)
    ratio = traces.metrics.get(RATIO_OF_PASS[pass_name])
    return Observation(point.name, own, point.result.times[pass_name], ratio)


def _candidates(observations: Iterable[Observation], none: Estimate) -> list[Candidate]:
    """One per effective setting, however often it was measured; `none` always, from the baselines."""
    by_setting: dict[Any, list[Observation]] = defaultdict(list)
    for observation in observations:
        key = frozenset((slot, frozenset(setting.items())) for slot, setting in observation.settings.items())
        by_setting[key].append(observation)
    by_setting.setdefault(frozenset(), [])
    candidates = []
    for key, same in by_setting.items():
        ratios = [observation.overlap_ratio for observation in same if observation.overlap_ratio is not None]
        candidates.append(
            Candidate(
                settings=same[0].settings if key else {},
                estimate=normalised([(o.times.point, o.times.none) for o in same], none) if key else none,
                points=tuple(observation.point for observation in same),
                overlap_ratio=statistics.median(ratios) if ratios else None,
            )
        )
    return candidates


def _predicted_pairs(candidates: Collection[Candidate]) -> list[Candidate]:
    """Pairs of a dgrad and a wgrad setting that each beat `none` alone, where no pair was measured at all.

    The time is t_d + t_w - none, as if the two savings added up: a prediction, to be measured.
    """
    if any(len(candidate.settings) > 1 for candidate in candidates):
        return []
    none = next(candidate for candidate in candidates if not candidate.settings)
    helpful = [c for c in candidates if c.settings and c.time_us < none.time_us and _differ(c, none)]
    by_phase = {phase: [c for c in helpful if next(iter(c.settings)).endswith(phase)] for phase in ("dgrad", "wgrad")}
    pairs = []
    for dgrad in by_phase["dgrad"]:
        if next(iter(dgrad.settings.values()))["method"] != "bulk":
            # It scatters dgrad's own output, and nothing is left for wgrad to overlap.
            continue
        for wgrad in by_phase["wgrad"]:
            noises = dgrad.estimate.noise_us, wgrad.estimate.noise_us, none.estimate.noise_us
            repeats = min(dgrad.estimate.repeats, wgrad.estimate.repeats)
            time_us = dgrad.time_us + wgrad.time_us - none.time_us
            pairs.append(
                Candidate(
                    settings={**dgrad.settings, **wgrad.settings},
                    estimate=Estimate(time_us, hypot(*noises), repeats),
                    points=dgrad.points + wgrad.points,
                    overlap_ratio=None,
                    measured=False,
                )
            )
    return pairs


def _complexity(candidate: Candidate) -> tuple[Any, ...]:
    """Sorts simpler before more complex and smaller before larger: who wins a tie."""
    keys = [
        (space.METHODS.index(setting["method"]), *(int(setting.get(knob) or 0) for knob in space.KNOBS))
        for _, setting in sorted(candidate.settings.items())
    ]
    return len(keys), keys


def _differ(one: Candidate, other: Candidate) -> bool:
    return one.estimate.differs_from(other.estimate)


def _fastest(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The simplest of those that the noise cannot tell from the fastest. `candidates` are sorted by complexity."""
    fastest = min(candidates, key=lambda candidate: candidate.time_us)
    ties = [candidate for candidate in candidates if candidate is fastest or not _differ(candidate, fastest)]
    # A measurement may be so noisy that it ties with the fastest and is slower than no overlap at all.
    chosen = next(candidate for candidate in ties if candidate.time_us <= candidates[0].time_us)
    none, overlaps = candidates[0], [candidate for candidate in candidates if candidate.settings]
    if not overlaps:
        return none, "no overlap was measured"
    if chosen is none:
        best = min(overlaps, key=lambda candidate: candidate.time_us)
        if _differ(best, none):
            return none, f"the best overlap, {best.name}, is {best.time_us / none.time_us - 1:.1%} slower"
        return none, f"the best overlap, {best.name}, is no faster beyond the noise ({_gap(best, none)})"
    if chosen is not fastest:
        return chosen, f"simplest of those within the noise of the fastest, {fastest.name} ({_gap(fastest, chosen)})"
    return chosen, f"fastest of {len(candidates)}, none included"


def _gap(one: Candidate, other: Candidate) -> str:
    noise_us = hypot(one.estimate.noise_us, other.estimate.noise_us)
    difference_us = other.time_us - one.time_us
    return f"{abs(difference_us):.1f} us {'faster' if difference_us >= 0 else 'slower'}, noise {noise_us:.1f}"


def _most_overlapped(candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The reference's rule: the highest overlap ratio. `none` has no say, whatever its time."""
    overlaps = [candidate for candidate in candidates if candidate.settings and candidate.measured]
    if not overlaps:
        return candidates[0], "no overlap was measured"
    rated = [candidate for candidate in overlaps if candidate.overlap_ratio is not None]
    if not rated:
        return candidates[0], "no trace gives an overlap ratio"
    chosen = max(rated, key=lambda candidate: candidate.overlap_ratio or 0.0)
    return chosen, f"highest overlap ratio of {len(rated)}"
