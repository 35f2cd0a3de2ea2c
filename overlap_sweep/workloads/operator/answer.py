"""The answers for operators: the setting of each slot at each TP size, which TP size pays, and how baselines
drifted."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlap_sweep.overlap import space
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.section import Sources
from overlap_sweep.results.estimate import later_change
from overlap_sweep.results.points import Case, Point, group_cases
from overlap_sweep.results.traces import TraceReading, read_traces
from overlap_sweep.workloads.operator.choice import (
    Candidate,
    PassChoice,
    choose_all,
    failures_by_pass,
)
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Unproven, outcomes, standing
from overlap_sweep.workloads.operator.result import OperatorTimes
from overlap_sweep.workloads.operator.switches import Plan, SwitchAdvice, UnmeasuredSlot, plan, unmeasured_slots

ROUNDING = 1e-9
"""600 x 4 / 2000 is 1.2 and must not fail a tolerance of 0.2 for the last binary digit."""


def config_id(tp_size: int, operator: str, phase: str, setting: Mapping[str, Any] | None) -> str:
    """Returns a setting's name, with every knob that is not at its method's default: `tp2_fc1_fprop_ring_agg0`."""
    return f"tp{tp_size}_{operator}_{phase}_{space.brief_name(setting)}"


@dataclass(frozen=True)
class SlotAnswer:
    """The setting for one slot."""

    case: CaseAnalysis
    slot: str
    choice: PassChoice
    """The decision about its pass: its times are those of all slots of the pass together."""
    final: Candidate
    """What the pass will run under Megatron-Core's switches: the choice, unless they don't allow it."""

    @property
    def tp_size(self) -> int:
        return self.choice.tp_size

    @property
    def phase(self) -> str:
        return self.slot.partition("_")[2]

    @property
    def setting(self) -> space.Setting | None:
        """Returns the best setting for its pass; None: no overlap."""
        return self.choice.chosen.settings.get(self.slot)

    @property
    def final_setting(self) -> space.Setting | None:
        """Returns the setting that goes into the YAML."""
        return self.final.settings.get(self.slot)


@dataclass(frozen=True)
class CaseAnalysis:
    """The answers for points that may be compared with each other."""

    case: Case
    folder: str
    """Where its files go, below all others: empty for the only case."""
    points: list[Point]
    plans: dict[int, Plan]
    """By TP size, from 2 on."""
    scaling: Scaling
    launch_bound: list[str]
    """Points whose times say nothing about the device."""
    outcomes: dict[int, Outcome]
    """By TP size, of those that a tuner measured: what it proved on the whole layer, or why it proved nothing."""

    @property
    def proofs(self) -> dict[int, Proof]:
        """Returns the proofs by TP size."""
        return {tp_size: found for tp_size, found in self.outcomes.items() if isinstance(found, Proof)}

    @property
    def tp_sizes(self) -> list[int]:
        """Returns the TP sizes from 2 on that have a configuration."""
        return sorted({*self.plans, *self.proofs})

    def passes(self, tp_size: int) -> list[tuple[PassChoice, Candidate]]:
        """Returns the choices for passes with an overlap tried, each with what Megatron-Core's switches leave of it."""
        plan = self.plans.get(tp_size)
        pairs = zip(plan.choices, plan.finals, strict=True) if plan else ()
        return [(choice, final) for choice, final in pairs if choice.tried_slots]

    def tried(self, tp_size: int) -> list[PassChoice]:
        """Returns the choices for passes with an overlap tried."""
        return [choice for choice, _ in self.passes(tp_size)]

    def config(self, tp_size: int) -> OverlapConfig:
        """Returns the configuration to train with: the proven one, or if the best of each slot was refuted what is
        left, or else the best of each slot, one by one."""
        return self.decided(tp_size) or self.plans[tp_size].config

    def decided(self, tp_size: int) -> OverlapConfig | None:
        """Returns the configuration that the whole layer decided on; None if it decided nothing."""
        outcome = self.outcomes.get(tp_size)
        return outcome.config if isinstance(outcome, Proof) else outcome.instead if outcome else None

    def switches(self, tp_size: int) -> list[SwitchAdvice]:
        """Returns the switches of that configuration that must not keep their defaults."""
        planned = self.plans[tp_size].switches if tp_size in self.plans else []
        decided = self.decided(tp_size)
        if decided is None:
            return planned
        known = {(advice.name, advice.value): advice for advice in planned}
        changed = (item for item in decided.switches.items() if item not in SWITCH_DEFAULTS.items())
        return [known.get(item, SwitchAdvice(*item, "as the whole layer was measured")) for item in changed]

    def unmeasured(self, tp_size: int) -> list[UnmeasuredSlot]:
        """Returns the slots that no point of an operator overlapped, and what that configuration makes of them."""
        tried = {answer.slot for answer in self.slots(tp_size)}
        return unmeasured_slots(self.config(tp_size), tried)

    def slots(self, tp_size: int) -> list[SlotAnswer]:
        """Returns the answers for the slots with an overlap tried at this TP size."""
        answers = (
            SlotAnswer(self, space.slot(choice.operator, phase), choice, final)
            for choice, final in self.passes(tp_size)
            for phase in space.PHASES
            if space.PASS_OF_PHASE[phase] == choice.pass_name
        )
        return [answer for answer in answers if answer.slot in answer.choice.tried_slots]


@dataclass(frozen=True)
class OperatorAnalysis:
    """The answers for all operators of a directory."""

    cases: list[CaseAnalysis]
    strays: list[Unproven]
    """What a tuner could not prove because it belongs to none of the cases."""
    traces: Mapping[Path, TraceReading]
    """By run directory."""


def analyse_operators(sources: Sources) -> OperatorAnalysis:
    """Returns the best setting for each slot of each case, and what was proven of it."""
    points, config = sources.reading.points, sources.config
    traces = read_traces(sources.points("operator"))
    grouped = group_cases(points, "operator")
    found = outcomes(sources.records.tuners, points, grouped)
    failed = failures_by_pass(points)
    cases = []
    for case, of_case in grouped.items():
        choices = choose_all(of_case, traces, config.objective, failed)
        by_size: dict[int, list[PassChoice]] = defaultdict(list)
        for choice in choices:
            by_size[choice.tp_size].append(choice)
        cases.append(
            CaseAnalysis(
                case=case,
                folder=case.name if len(grouped) > 1 else "",
                points=of_case,
                plans={size: plan(by_size[size], config.unmeasured) for size in sorted(by_size) if size > 1},
                scaling=scale_case(choices, config.tp_scaling_tolerance),
                launch_bound=[point.name for point in of_case if point.result and point.result.launch_bound],
                outcomes=_standing(found, case),
            )
        )
    strays = [one for one in found if isinstance(one, Unproven) and one.case is None]
    return OperatorAnalysis(cases, strays, traces)


def _standing(found: Sequence[Outcome], case: Case) -> dict[int, Outcome]:
    """Returns by TP size the outcome to report for this case."""
    by_size = defaultdict(list)
    for one in found:
        if one.case == case:
            by_size[one.tp_size].append(one)
    return {tp_size: standing(by_size[tp_size]) for tp_size in sorted(by_size)}


# Does a larger TP size pay? Time(TP=n) should be Time(TP=1) / n, up to a tolerance.


@dataclass(frozen=True)
class OperatorScaling:
    """One operator's times over the TP sizes (in microseconds), and the conclusions."""

    optimal_tp_size: int | None
    """The largest that scales; None without a TP=1 baseline."""
    scaling_efficient: dict[int, bool]
    scaling_ratios: dict[int, float]
    """t_n x n / t_1."""
    e2e_times: dict[int, float]
    reason: str


@dataclass(frozen=True)
class Scaling:
    """TP scaling of a case."""

    optimal_tp_size: int | None
    """By the sum over the operators that were measured at every TP size."""
    tolerance: float
    results: dict[str, OperatorScaling] = field(default_factory=dict)
    reason: str = ""


def scale(e2e_times: Mapping[int, float], tolerance: float) -> OperatorScaling:
    """Judges every TP size against TP=1. `e2e_times` are microseconds by TP size."""
    times = dict(sorted(e2e_times.items()))
    if 1 not in times:
        return OperatorScaling(None, {}, {}, times, "No TP=1 baseline was measured.")
    ratios = {tp_size: time_us * tp_size / times[1] for tp_size, time_us in times.items()}
    efficient = {tp_size: ratio <= 1 + tolerance + ROUNDING for tp_size, ratio in ratios.items()}
    verdicts = [
        f"TP={tp} takes {as_us(times[tp])} us, {ratios[tp]:.2f} times the ideal: {'' if good else 'not '}efficient"
        for tp, good in efficient.items()
        if tp > 1
    ]
    reason = "; ".join([f"TP=1 takes {as_us(times[1])} us", *verdicts]) + "."
    optimal = max(tp_size for tp_size, good in efficient.items() if good)
    return OperatorScaling(optimal, efficient, ratios, times, reason)


def scale_case(choices: Sequence[PassChoice], tolerance: float) -> Scaling:
    """Returns the scaling of every operator of a case, with its chosen settings, forward and backward together.

    TP=1 is measured by points of that size, or else by the unsharded operator that the other points time beside
    themselves.
    """
    measured: dict[str, dict[int, float]] = {}
    for operator in space.OPERATORS:
        own = [choice for choice in choices if choice.operator == operator]
        if not own:
            continue
        sizes = dict.fromkeys(choice.tp_size for choice in own)
        times = {size: sum(one.chosen.time_us for one in own if one.tp_size == size) for size in sizes}
        tp1_us = _tp1_us(own)
        measured[operator] = {1: tp1_us, **times} if tp1_us else times
    results = {operator: scale(times, tolerance) for operator, times in measured.items()}
    tp_sizes = {tp_size for times in measured.values() for tp_size in times}
    complete = [operator for operator, times in measured.items() if set(times) == tp_sizes]
    if not complete:
        return Scaling(None, tolerance, results, "No operator was measured at every TP size.")
    total = scale({tp: sum(measured[operator][tp] for operator in complete) for tp in tp_sizes}, tolerance)
    return Scaling(total.optimal_tp_size, tolerance, results, f"Sum over {', '.join(complete)}: {total.reason}")


def _tp1_us(choices: Sequence[PassChoice]) -> float | None:
    """Returns forward plus backward time of the unsharded operator: the median over the TP sizes that it was measured
    beside; None unless both were."""
    passes = {name: [c.tp1_us for c in choices if c.pass_name == name and c.tp1_us] for name in space.PASSES}
    return sum(map(statistics.median, passes.values())) if all(passes.values()) else None


def baseline_drift(points: Iterable[Point]) -> dict[str, float]:
    """Returns by TP size, operator and pass how much the time without overlap drifted: its median over the later half
    of a case's points over that of the earlier half, minus 1."""
    none_us: dict[str, list[float]] = defaultdict(list)
    for point in sorted(points, key=lambda point: (point.result and point.result.started) or ""):
        times = point.measured_as(OperatorTimes).times
        for name in space.PASSES:
            what = f"{point.config['operator']} {name}, TP={point.config['tp_size']}"
            none_us[what].append(times[name].none.median_us)
    return {what: later_change(times_us) for what, times_us in none_us.items() if len(times_us) > 1}
