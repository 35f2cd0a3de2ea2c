"""Chooses the setting of the slots, `none` included, for every operator, TP size and pass of a case.

A pass is the unit, since dgrad and wgrad can only be timed together: the backward candidates are pairs of settings.

Settings that failed are not trusted. A race may show at one num_sm and not at another: if a setting computes wrong
numbers, so may those that differ only in num_sm and cluster size. A setting that once crashed or hung may do it again.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import NONE_IN_WORDS
from overlap_sweep.overlap.space import KnobValue, Setting
from overlap_sweep.results import verdict
from overlap_sweep.results.estimate import Estimate, hidden_fraction, normalised, pooled_none
from overlap_sweep.results.gain import NO_GAIN, Gain, gain_of_sum, gain_over
from overlap_sweep.results.points import Case, Point
from overlap_sweep.results.run_directory import Result
from overlap_sweep.results.traces import TraceReading
from overlap_sweep.workloads.operator.config import Asked, Resolved
from overlap_sweep.workloads.operator.result import OperatorTimes, PassTimes, distinct

Frozen = frozenset[tuple[str, frozenset[tuple[str, KnobValue]]]]
"""The slots of a pass with their settings, hashable."""
PassKey = tuple[Case, int | None, str, str]
"""Case, TP size, operator and pass."""


@dataclass
class Failures:
    """The failures of one pass."""

    wrong: set[Frozen] = field(default_factory=set)
    """Arms (settings without their sizes) with a setting that computed wrong numbers."""
    broken: set[Frozen] = field(default_factory=set)
    """Settings that crashed or timed out."""
    attempted: set[str] = field(default_factory=set)
    """Slots that some point tried to overlap, whether it succeeded or not."""

    def distrusts(self, settings: Mapping[str, Setting]) -> bool:
        return _arm(settings) in self.wrong or frozen(settings) in self.broken


def wrong_passes(result: Result) -> set[str]:
    """Returns the passes with wrong tensors; empty unless it is an operator's point that failed for wrong numbers."""
    if not result.has_wrong_numbers or result.point.workload.name != "operator":
        return set()
    allowed = space.tolerance(result.point_as(Resolved))
    wrong = {name for name, error in result.relative_error.items() if error is None or error > allowed}
    # The other tensors are gradients.
    return {"fwd" if name == "output" else "bwd" for name in wrong}


def frozen(settings: Mapping[str, Setting], without: Sequence[str] = ()) -> Frozen:
    return frozenset(
        (slot, frozenset((k, v) for k, v in s.items() if k not in without)) for slot, s in settings.items()
    )


def _arm(settings: Mapping[str, Setting]) -> Frozen:
    return frozen(settings, ("num_sm", "cga_size"))


def _pass_key(point: Point, pass_name: str) -> PassKey:
    """Returns the pass that a point measures, whatever the nodes, and the GPU, which failed points did not record."""
    config = point.config_as(Asked)
    return point.case._replace(device="", nodes=1), config.tp_size, config.operator, pass_name


def slots_in_pass(settings: Mapping[str, Setting], pass_name: str) -> dict[str, Setting]:
    """Returns the slots of one pass."""
    return {slot: s for slot, s in settings.items() if space.PASS_OF_PHASE[slot.partition("_")[2]] == pass_name}


def failures_by_pass(points: Iterable[Point]) -> Mapping[PassKey, Failures]:
    """Returns the failures by pass. If a point that overlaps both passes failed, only wrong tensors of a single pass
    show which one failed; otherwise a search measures each again alone."""
    found: dict[PassKey, Failures] = defaultdict(Failures)
    for point in points:
        if point.workload != "operator" or not point.result or point.status == "skipped":
            continue
        by_pass = {name: slots_in_pass(point.result.settings, name) for name in space.PASSES}
        overlapped = {name: settings for name, settings in by_pass.items() if settings}
        wrong = wrong_passes(point.result)
        for name, settings in overlapped.items():
            own = found[_pass_key(point, name)]
            own.attempted |= set(settings)
            if wrong == {name}:
                own.wrong.add(_arm(settings))
            elif point.status != "ok" and not wrong and len(overlapped) == 1:
                own.broken.add(frozen(settings))
    return found


@dataclass(frozen=True)
class Observation:
    """One pass of one result."""

    point: str
    settings: Mapping[str, Setting]
    times: PassTimes
    overlap_ratio: float | None


@dataclass(frozen=True)
class Candidate:
    """A setting for the slots of one pass, and its time."""

    settings: Mapping[str, Setting]
    """Settings by slot; slots that are left out are not overlapped. Empty for `none`."""
    estimate: Estimate
    """Time relative to the none time of the same point, so that candidates of a pass compare."""
    points: tuple[str, ...]
    overlap_ratio: float | None

    @property
    def time_us(self) -> float:
        return self.estimate.time_us

    @property
    def name(self) -> str:
        """Returns `none`, `ring_agg0`, or with several slots `dgrad bulk_sm4 + wgrad bulk_sm2`."""
        return space.settings_name(self.settings)

    @property
    def spoken(self) -> str:
        """Returns the name in a sentence."""
        return self.name if self.settings else NONE_IN_WORDS


@dataclass(frozen=True)
class PassChoice:
    """The decision for one pass of one operator at one TP size."""

    tp_size: int
    operator: str
    pass_name: str
    candidates: tuple[Candidate, ...]
    """All candidates, `none` first, then from simple to complex."""
    chosen: Candidate
    reason: str
    floor_us: float
    tp1_us: float | None
    default: Estimate | None
    """Time under the library's default in every slot of the operator; not a candidate, since it names no settings.
    None if no default was measured."""
    attempted: frozenset[str] = frozenset()
    gain: Gain = NO_GAIN
    """Gain of the chosen setting over no overlap, with the noise that decided."""

    @property
    def none(self) -> Candidate:
        return self.candidates[0]

    @property
    def tried_slots(self) -> frozenset[str]:
        """Returns the slots with an overlap tried, even if every try failed."""
        return self.attempted.union(slot for candidate in self.candidates for slot in candidate.settings)

    @property
    def fastest_overlap(self) -> Candidate | None:
        """Returns the fastest candidate with overlap; None if there is none."""
        return min(self.candidates[1:], key=lambda candidate: candidate.time_us, default=None)

    @property
    def default_wins(self) -> bool:
        """Returns whether the library's default is faster than every candidate beyond the noise."""
        if self.default is None:
            return False
        fastest = min(self.candidates, key=lambda candidate: candidate.time_us).estimate
        return self.default.time_us < fastest.time_us and self.default.differs_from(fastest)

    @property
    def speedup(self) -> float:
        """Returns the speedup of the chosen setting over no overlap."""
        return self.none.time_us / self.chosen.time_us

    def gain_of(self, candidate: Candidate) -> Gain:
        """Returns the candidate's gain over no overlap."""
        return self.gain if candidate is self.chosen else _gain(candidate, self.candidates)

    @property
    def hidden_fraction(self) -> float:
        """Returns the hidden fraction of the chosen setting."""
        return self.hidden_at(self.chosen.time_us)

    def hidden_at(self, time_us: float) -> float:
        """Returns the hidden fraction of a pass that takes `time_us`; NaN if there is nothing to hide."""
        return hidden_fraction(time_us, self.none.time_us, self.floor_us)

    @property
    def label(self) -> str:
        return f"{self.operator} {self.pass_name}"


def labels(choices: Sequence[PassChoice]) -> list[str]:
    """Returns `fc1` for operators with both passes among the choices, else `fc1 fwd`."""
    passes = Counter(choice.operator for choice in choices)
    return list(dict.fromkeys(c.operator if passes[c.operator] == len(space.PASSES) else c.label for c in choices))


def _gain(candidate: Candidate, among: Sequence[Candidate]) -> Gain:
    none, *others = among
    return NO_GAIN if candidate is none else gain_over(none.estimate, candidate.estimate, len(others))


def gain_together(passes: Iterable[tuple[PassChoice, Candidate]]) -> Gain:
    """Returns the gain of the passes' summed times, each with its candidate, over no overlap."""
    return gain_of_sum((choice.gain_of(candidate), choice.none.time_us) for choice, candidate in passes)


def default_sum_us(choices: Sequence[PassChoice]) -> float | None:
    """Returns the sum of the passes' times under the library's default; None unless all were measured."""
    times = [choice.default.time_us for choice in choices if choice.default]
    return sum(times) if times and len(times) == len(choices) else None


def choose_all(
    points: Iterable[Point],
    traces: Mapping[Path, TraceReading],
    objective: str,
    failed: Mapping[PassKey, Failures] = MappingProxyType({}),
) -> list[PassChoice]:
    """Returns one choice per TP size, operator and pass of one case. Launch-bound points and settings that `failed`
    distrusts are ignored."""
    attempted: dict[tuple[int, str, str], set[str]] = {}
    observed: dict[tuple[int, str, str], list[Observation]] = defaultdict(list)
    device_kind = "cpu"
    for point in points:
        config = point.config_as(Resolved)
        device_kind = config.runtime.device
        if not point.result or point.result.launch_bound:
            continue
        for pass_name, times in point.measured_as(OperatorTimes).times.items():
            settings = slots_in_pass(point.result.settings, pass_name)
            failures = failed.get(_pass_key(point, pass_name), Failures())
            if pass_name in space.PASSES and not failures.distrusts(settings):
                ratio = traces.get(point.directory, TraceReading()).metrics.get(f"{pass_name}_overlap_ratio")
                key = config.tp_size, config.operator, pass_name
                observed[key].append(Observation(point.name, settings, times, ratio))
                attempted[key] = failures.attempted
    operators = list(space.OPERATORS)
    keys = sorted(observed, key=lambda key: (key[0], operators.index(key[1]), space.PASSES.index(key[2])))
    return [choose(*key, observed[key], device_kind, objective, attempted[key]) for key in keys]


def choose(
    tp_size: int,
    operator: str,
    pass_name: str,
    observations: Sequence[Observation],
    device_kind: str,
    objective: str = "time",
    attempted: Iterable[str] = (),
) -> PassChoice:
    """Returns the best setting of one pass, by `time` or by `overlap_ratio`. The observations must not contain settings
    that are distrusted."""
    none = pooled_none([observation.times.none for observation in observations])
    # `none` is always a candidate; its time is that of the baselines.
    by_setting: dict[Frozen, list[Observation]] = {frozenset(): []}
    for observation in observations:
        by_setting.setdefault(frozen(observation.settings), []).append(observation)
    defaults = distinct(observation.times.default for observation in observations if observation.times.default)
    default_pairs = [(measured.default, measured.none) for measured in defaults]
    pairs = {key: [(one.times.point, one.times.none) for one in same] for key, same in by_setting.items()}
    between = verdict.scatter(
        ([normalised([pair], none) for pair in same] for same in pairs.values()),
        verdict.TYPICAL_SCATTER[device_kind],
        (
            [normalised([(one.times.floor, one.times.none)], none) for same in by_setting.values() for one in same],
            [normalised([pair], none) for pair in default_pairs],
        ),
    )
    candidates = []
    for key, same in by_setting.items():
        ratios = [observation.overlap_ratio for observation in same if observation.overlap_ratio is not None]
        candidates.append(
            Candidate(
                settings=same[0].settings if key else {},
                estimate=between.added_to(normalised(pairs[key], none), len(same)) if key else none,
                points=tuple(observation.point for observation in same),
                overlap_ratio=statistics.median(ratios) if ratios else None,
            )
        )
    candidates.sort(key=_complexity)
    chosen, gain, reason = (_fastest if objective == "time" else _most_overlapped)(candidates)
    tp1 = [observation.times.tp1.median_us for observation in observations if observation.times.tp1]
    return PassChoice(
        tp_size=tp_size,
        operator=operator,
        pass_name=pass_name,
        candidates=tuple(candidates),
        attempted=frozenset(attempted),
        chosen=chosen,
        gain=gain,
        reason=reason,
        floor_us=statistics.median(
            one.times.floor.median_us * none.time_us / one.times.none.median_us for one in observations
        ),
        tp1_us=statistics.median(tp1) if tp1 else None,
        default=between.added_to(normalised(default_pairs, none), len(defaults)) if defaults else None,
    )


def _complexity(candidate: Candidate) -> tuple[int, list[tuple[int, ...]]]:
    """Returns a sort key that decides ties: simpler and smaller settings come first."""
    keys = [
        (space.METHODS.index(space.method_of(setting)), *(abs(int(setting.get(knob) or 0)) for knob in space.KNOBS))
        for _, setting in sorted(candidate.settings.items())
    ]
    return len(keys), keys


def _fastest(candidates: Sequence[Candidate]) -> tuple[Candidate, Gain, str]:
    """Returns the fastest candidate, its gain and why. `candidates` are sorted by complexity, `none` first."""
    none, *overlaps = candidates
    if not overlaps:
        return none, NO_GAIN, "no setting with overlap was measured"
    choice = verdict.choose(candidates, lambda candidate: candidate.estimate)
    chosen, fastest = choice.chosen, choice.fastest
    if not choice.won:
        gain = choice.gain_of_fastest.in_words(NONE_IN_WORDS)
        return none, NO_GAIN, f"the fastest overlap, {fastest.name}, is {gain}"
    if chosen is not fastest:
        reason = f"simplest setting within the noise of the fastest, {fastest.name} (noise {choice.tie_noise:.1%})"
    else:
        reason = f"fastest of {len(candidates)} settings, no overlap included"
    return chosen, choice.gain, reason if len(chosen.points) > 1 else f"{reason}; not repeated"


def _most_overlapped(candidates: Sequence[Candidate]) -> tuple[Candidate, Gain, str]:
    """Returns the candidate other than `none` with the highest overlap ratio, its gain and why."""
    none, *overlaps = candidates
    rated = [candidate for candidate in overlaps if candidate.overlap_ratio is not None]
    if not rated:
        return none, NO_GAIN, "no trace has an overlap ratio" if overlaps else "no setting with overlap was measured"
    chosen = max(rated, key=lambda candidate: candidate.overlap_ratio or 0.0)
    return chosen, _gain(chosen, candidates), f"highest overlap ratio of {len(rated)} settings"
