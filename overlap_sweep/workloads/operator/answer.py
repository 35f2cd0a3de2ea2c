"""The answers for operators: the setting of each slot at each TP size, the TP size to use, and the drift of the
baselines."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from overlap_sweep.config import Model
from overlap_sweep.overlap import space
from overlap_sweep.overlap.models import WHOLE, applies_to, layers_with
from overlap_sweep.overlap.overlap_cfg import DEFAULT, NONE, SWITCH_DEFAULTS, OverlapConfig, methods_allowed
from overlap_sweep.report.numbers import as_us
from overlap_sweep.report.section import Sources
from overlap_sweep.results.estimate import later_change
from overlap_sweep.results.points import Case, Point, group_cases
from overlap_sweep.results.traces import TraceReading, read_traces
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice, choose_all, failures_by_pass
from overlap_sweep.workloads.operator.config import Resolved
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Unproven, outcomes, standing
from overlap_sweep.workloads.operator.result import OperatorTimes
from overlap_sweep.workloads.operator.switches import Plan, SwitchAdvice, UnmeasuredSlot, plan, unmeasured_slots

_SIZES = {declared.name for declared in fields(Model)} - {"name", "source"}

ROUNDING = 1e-9
"""600 x 4 / 2000 is 1.2 and must not fail a tolerance of 0.2 for the last binary digit."""


def config_id(tp_size: int | None, operator: str, phase: str, settings: Mapping[str, space.Setting]) -> str:
    """Returns the id of a slot's configuration, given the settings by slot: `tp2_fc1_fprop_ring_agg0`.

    It has the knobs that differ from the method's defaults. Where the pass's other slot overlaps too it is named, since
    both are timed together: `tp2_fc1_dgrad_bulk_sm4_wgrad_bulk_sm2`.
    """
    own, pass_slots = space.slot(operator, phase), space.slots_of_pass(operator, space.PASS_OF_PHASE.get(phase, ""))
    slots = dict.fromkeys([own, *(slot for slot in pass_slots if slot in settings)])
    names = (f"{slot.partition('_')[2]}_{space.brief_name(settings.get(slot))}" for slot in slots)
    return "_".join([f"tp{tp_size}_{operator}", *names])


@dataclass(frozen=True)
class SlotAnswer:
    """The setting for one slot."""

    case: CaseAnalysis
    slot: str
    choice: PassChoice
    """The decision for its pass, with the times of all slots of the pass together."""
    final: Candidate
    """The setting that runs under Megatron-Core's switches: the chosen one, unless they don't allow it."""

    @property
    def tp_size(self) -> int:
        return self.choice.tp_size

    @property
    def phase(self) -> str:
        return self.slot.partition("_")[2]

    @property
    def setting(self) -> space.Setting | None:
        """Returns the best setting of the slot for its pass; None for no overlap."""
        return self.choice.chosen.settings.get(self.slot)

    @property
    def final_setting(self) -> space.Setting | None:
        """Returns the setting that goes into the YAML."""
        return self.final.settings.get(self.slot)

    @property
    def in_file(self) -> str:
        """Returns the name of the slot's setting in the written file, under its switches."""
        config = self.case.config(self.tp_size)
        if not methods_allowed(config.switches)[self.slot]:
            return NONE
        return space.brief_name(config.slots[self.slot]) if config.slots.get(self.slot) else DEFAULT

    @property
    def proof(self) -> Proof | None:
        return self.case.proofs.get(self.tp_size)


@dataclass(frozen=True)
class CaseAnalysis:
    """The answers for points that may be compared with each other."""

    case: Case
    folder: str
    """Folder of its files below the output directory; empty if there is only one case."""
    points: list[Point]
    plans: dict[int, Plan]
    """Configurations for Megatron-Core by TP size, from 2 on."""
    scaling: Scaling
    launch_bound: list[str]
    """Names of launch-bound points, whose times say nothing about the device."""
    outcomes: dict[int, Outcome]
    """What a tuner proved on the whole layer, or why it proved nothing, by TP size."""

    @property
    def proofs(self) -> dict[int, Proof]:
        """Returns the proofs by TP size."""
        return {tp_size: found for tp_size, found in self.outcomes.items() if isinstance(found, Proof)}

    @property
    def tp_sizes(self) -> list[int]:
        """Returns the TP sizes from 2 on that have a configuration."""
        return sorted({*self.plans, *self.proofs})

    def passes(self, tp_size: int) -> list[tuple[PassChoice, Candidate]]:
        """Returns the choice of each pass with an overlap tried, and the candidate that runs under the switches."""
        plan = self.plans.get(tp_size)
        pairs = zip(plan.choices, plan.finals, strict=True) if plan else ()
        return [(choice, final) for choice, final in pairs if choice.tried_slots]

    def tried(self, tp_size: int) -> list[PassChoice]:
        """Returns the choices for passes with an overlap tried."""
        return [choice for choice, _ in self.passes(tp_size)]

    def config(self, tp_size: int) -> OverlapConfig:
        """Returns the configuration to train with: the one that the whole layer decided on, or else the best setting of
        each slot measured alone."""
        return self.decided(tp_size) or self.plans[tp_size].config

    def decided(self, tp_size: int) -> OverlapConfig | None:
        """Returns the configuration that the whole layer decided on; None if it decided nothing."""
        outcome = self.outcomes.get(tp_size)
        return outcome.config if isinstance(outcome, Proof) else outcome.instead if outcome else None

    def switches(self, tp_size: int) -> list[SwitchAdvice]:
        """Returns the switches of that configuration that differ from their defaults."""
        planned = self.plans[tp_size].switches if tp_size in self.plans else []
        decided, outcome = self.decided(tp_size), self.outcomes.get(tp_size)
        if decided is None:
            return planned
        measured = outcome.trial.part if outcome and outcome.trial else WHOLE
        known = {(advice.name, advice.value): advice for advice in planned}
        changed = (item for item in decided.switches.items() if item not in SWITCH_DEFAULTS.items())
        return [known.get(item, SwitchAdvice(*item, f"as measured on {measured}")) for item in changed]

    @property
    def sizes(self) -> dict[str, object]:
        """Returns the model's sizes as in docs/options.md, without those it has none of."""
        model = self.points[0].config.model
        return {name: value for name, value in asdict(model).items() if name in _SIZES and value is not None}

    @property
    def applies_to(self) -> list[str]:
        """Returns which layers of the model the files apply to, in sentences; empty if all layers are alike."""
        operators = {choice.operator for plan in self.plans.values() for choice in plan.choices}
        return applies_to(self.points[0].config.model, operators)

    def unmeasured(self, tp_size: int) -> list[UnmeasuredSlot]:
        """Returns the slots that no operator point overlapped, and how they run in that configuration."""
        tried = {answer.slot for answer in self.slots(tp_size)}
        return unmeasured_slots(self.config(tp_size), tried, _layers_with(self.points))

    def slots(self, tp_size: int) -> list[SlotAnswer]:
        """Returns the answers for the slots that were tried with an overlap at this TP size."""
        return [
            SlotAnswer(self, slot, choice, final)
            for choice, final in self.passes(tp_size)
            for slot in space.slots_of_pass(choice.operator, choice.pass_name)
            if slot in choice.tried_slots
        ]


@dataclass(frozen=True)
class OperatorAnalysis:
    """The answers for all operators of a directory."""

    cases: list[CaseAnalysis]
    strays: list[Unproven]
    """Proofs of a tuner that belong to none of the cases."""
    traces: Mapping[Path, TraceReading]


def analyse_operators(sources: Sources) -> OperatorAnalysis:
    """Returns the best setting of each slot of each case, and what the tuner proved."""
    points, config = sources.reading.points, sources.config
    traces = read_traces(sources.points("operator"))
    grouped = group_cases(points, "operator")
    found = outcomes(sources.records.tuners, points, grouped)
    failed = failures_by_pass(points)
    cases = []
    for case, case_points in grouped.items():
        choices = choose_all(case_points, traces, config.objective, failed)
        layers = _layers_with(case_points)
        by_size: dict[int, list[PassChoice]] = defaultdict(list)
        for choice in choices:
            by_size[choice.tp_size].append(choice)
        cases.append(
            CaseAnalysis(
                case=case,
                folder=case.name if len(grouped) > 1 else "",
                points=case_points,
                plans={
                    size: plan(by_size[size], config.unmeasured, layers, only_if_faster=config.objective == "time")
                    for size in sorted(by_size)
                    if size > 1
                },
                scaling=scale_case(choices, config.tp_scaling_tolerance),
                launch_bound=[point.name for point in case_points if point.launch_bound],
                outcomes=standing(found, case),
            )
        )
    strays = [one for one in found if isinstance(one, Unproven) and one.case is None]
    return OperatorAnalysis(cases, strays, traces)


def _layers_with(points: Iterable[Point]) -> dict[str, int]:
    # Sizes that the user gives for one point add its operator.
    return {operator: number for point in points for operator, number in layers_with(point.config.model).items()}


# A larger TP size pays if time(TP=n) is at most time(TP=1) / n plus a tolerance.


@dataclass(frozen=True)
class OperatorScaling:
    """One operator's times by TP size, in microseconds, and how well they scale."""

    optimal_tp_size: int | None
    """The largest TP size that scales; None without a TP=1 baseline."""
    scaling_efficient: dict[int, bool]
    scaling_ratios: dict[int, float]
    """time(TP=n) x n / time(TP=1)."""
    e2e_times: dict[int, float]
    reason: str


@dataclass(frozen=True)
class Scaling:
    """TP scaling of a case."""

    optimal_tp_size: int | None
    """The largest TP size at which the sum of the operators measured at every TP size scales."""
    tolerance: float
    results: dict[str, OperatorScaling] = field(default_factory=dict)
    reason: str = ""


def scale(e2e_times: Mapping[int, float], tolerance: float) -> OperatorScaling:
    """Returns how every TP size scales against TP=1. `e2e_times` are microseconds by TP size."""
    times = dict(sorted(e2e_times.items()))
    if 1 not in times:
        return OperatorScaling(None, {}, {}, times, "no TP=1 baseline was measured.")
    ratios = {tp_size: time_us * tp_size / times[1] for tp_size, time_us in times.items()}
    efficient = {tp_size: ratio <= 1 + tolerance + ROUNDING for tp_size, ratio in ratios.items()}
    verdicts = [
        f"{as_us(times[tp])} us at TP={tp}, {ratios[tp]:.2f}x the ideal time ({'' if good else 'not '}efficient)"
        for tp, good in efficient.items()
        if tp > 1
    ]
    reason = "; ".join([f"{as_us(times[1])} us at TP=1", *verdicts]) + "."
    optimal = max(tp_size for tp_size, good in efficient.items() if good)
    return OperatorScaling(optimal, efficient, ratios, times, reason)


def scale_case(choices: Sequence[PassChoice], tolerance: float) -> Scaling:
    """Returns how every operator of a case scales with its chosen settings, forward plus backward.

    The TP=1 time comes from points of that size, or else from the unsharded operator that the other points time too.
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
        return Scaling(None, tolerance, results, "no operator was measured at every TP size.")
    total = scale({tp: sum(measured[operator][tp] for operator in complete) for tp in tp_sizes}, tolerance)
    subject = f"Sum of {', '.join(complete)}" if len(complete) > 1 else complete[0]
    reason = f"{subject}: {total.reason}" if total.optimal_tp_size else total.reason
    return Scaling(total.optimal_tp_size, tolerance, results, reason)


def _tp1_us(choices: Sequence[PassChoice]) -> float | None:
    """Returns the forward plus backward time of the unsharded operator, the median over the TP sizes it was measured
    with; None unless both passes were measured."""
    passes = {name: [c.tp1_us for c in choices if c.pass_name == name and c.tp1_us] for name in space.PASSES}
    return sum(map(statistics.median, passes.values())) if all(passes.values()) else None


def baseline_drift(points: Iterable[Point]) -> dict[str, float]:
    """Returns the drift of the no-overlap time by TP size, operator and pass: its median over the later half of a
    case's points over that of the earlier half, minus 1."""
    none_us: dict[str, list[float]] = defaultdict(list)
    for point in sorted(points, key=lambda point: (point.result and point.result.started) or ""):
        times, config = point.measured_as(OperatorTimes).times, point.config_as(Resolved)
        for name in space.PASSES:
            label = f"{config.operator} {name}, TP={config.tp_size}"
            none_us[label].append(times[name].none.median_us)
    return {label: later_change(times_us) for label, times_us in none_us.items() if len(times_us) > 1}
