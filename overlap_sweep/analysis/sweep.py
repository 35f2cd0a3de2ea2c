"""The whole analysis of a directory, from run directories to answers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overlap_sweep import space
from overlap_sweep.analysis.choice import Candidate, PassChoice, choose_all
from overlap_sweep.analysis.conditions import GpuConditions, gpu_conditions
from overlap_sweep.analysis.copies import CopyAnalysis, analyse_copies, copy_rows
from overlap_sweep.analysis.drift import Drift, baseline_drift
from overlap_sweep.analysis.failures import failures
from overlap_sweep.analysis.frame import Row, table_rows
from overlap_sweep.analysis.kernel_frame import kernel_rows
from overlap_sweep.analysis.kernels import KernelAnalysis, analyse_kernels
from overlap_sweep.analysis.layer_frame import layer_rows
from overlap_sweep.analysis.layers import LayerAnalysis, analyse_layer
from overlap_sweep.analysis.points import Case, Point, Reading, group_cases, read_points
from overlap_sweep.analysis.proof import Outcome, Proof, Unproven, outcomes, standing
from overlap_sweep.analysis.records import Records, read_records
from overlap_sweep.analysis.repeats import Repeats, repeated
from overlap_sweep.analysis.scaling import Scaling, scale_case
from overlap_sweep.analysis.step_communication import read_communication
from overlap_sweep.analysis.switches import Plan, SwitchAdvice, UnmeasuredSlot, plan, unmeasured_slots
from overlap_sweep.analysis.tp_training import TpTrainingAnalysis, analyse_tp_training
from overlap_sweep.analysis.tp_training_frame import tp_training_rows
from overlap_sweep.analysis.traces import read_traces
from overlap_sweep.analysis.training import TrainingAnalysis, analyse_training, is_host_limited
from overlap_sweep.analysis.training_frame import training_rows
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig


@dataclass(frozen=True)
class SlotAnswer:
    """What one slot is to be given."""

    slot: str
    setting: space.Setting | None
    """The best for its pass; None: no overlap."""
    choice: PassChoice
    """The decision about its pass: its times are those of all slots of the pass together."""
    final: Candidate
    """What the pass will run under Megatron-Core's switches: the choice, unless they don't allow it."""

    @property
    def tried(self) -> bool:
        return self.slot in self.choice.tried_slots

    @property
    def final_setting(self) -> space.Setting | None:
        """What goes into the YAML."""
        return self.final.settings.get(self.slot)

    @property
    def phase(self) -> str:
        return self.slot.partition("_")[2]


@dataclass(frozen=True)
class CaseAnalysis:
    """The answers for points that may be compared with each other."""

    case: Case
    points: list[Point]
    plans: dict[int, Plan]
    """By TP size, from 2 on."""
    scaling: Scaling
    drift: list[Drift]
    repeats: list[Repeats]
    conditions: GpuConditions | None
    launch_bound: list[str]
    """Points whose times say nothing about the device."""
    outcomes: dict[int, Outcome]
    """By TP size, of those that a tuner measured: what it proved on the whole layer, or why it proved nothing."""
    superseded: list[Outcome]
    """The other outcomes of TP sizes that were tuned more than once."""

    @property
    def proofs(self) -> dict[int, Proof]:
        """By TP size."""
        return {tp_size: found for tp_size, found in self.outcomes.items() if isinstance(found, Proof)}

    @property
    def unproven(self) -> dict[int, Unproven]:
        """By TP size."""
        return {tp_size: found for tp_size, found in self.outcomes.items() if isinstance(found, Unproven)}

    @property
    def tp_sizes(self) -> list[int]:
        """Those that there is a configuration for, from 2 on."""
        return sorted({*self.plans, *self.proofs})

    def config(self, tp_size: int) -> OverlapConfig:
        """What to train with: what was proven, or where the best of each slot was refuted what is left, or else the
        best of each slot, one by one."""
        return self.decided(tp_size) or self.plans[tp_size].config

    def decided(self, tp_size: int) -> OverlapConfig | None:
        """What the whole layer said; None where it said nothing."""
        if tp_size in self.proofs:
            return self.proofs[tp_size].config
        return self.unproven[tp_size].instead if tp_size in self.unproven else None

    def switches(self, tp_size: int) -> list[SwitchAdvice]:
        """The switches of that configuration that must not keep their defaults."""
        planned = {advice.name: advice for advice in self.plans[tp_size].switches} if tp_size in self.plans else {}
        decided = self.decided(tp_size)
        if decided is None:
            return list(planned.values())
        advices = []
        what = self.proofs[tp_size].recommended if tp_size in self.proofs else "what could be"
        for name, value in decided.switches.items():
            if value != SWITCH_DEFAULTS[name]:
                known = planned.get(name)
                as_proven = SwitchAdvice(name, value, f"as {what} was measured")
                advices.append(known if known and known.value == value else as_proven)
        return advices

    def unmeasured(self, tp_size: int) -> list[UnmeasuredSlot]:
        """The slots that no point of an operator overlapped, and what that configuration makes of them."""
        tried = {answer.slot for answer in self.slots(tp_size) if answer.tried}
        return unmeasured_slots(self.config(tp_size), tried, self.decided(tp_size) is not None)

    def slots(self, tp_size: int) -> list[SlotAnswer]:
        """Every configurable slot of the operators measured at this TP size, tried or not."""
        if tp_size not in self.plans:
            return []
        return [
            SlotAnswer(slot, choice.chosen.settings.get(slot), choice, final)
            for choice, final in zip(self.plans[tp_size].choices, self.plans[tp_size].finals, strict=True)
            for phase in space.PHASES
            if space.PASS_OF_PHASE[phase] == choice.pass_name and space.methods_of(choice.operator, phase)
            for slot in [space.slot(choice.operator, phase)]
        ]


@dataclass(frozen=True)
class Analysis:
    """All that is known about a directory of results."""

    reading: Reading
    config: AnalysisConfig
    rows: list[Row]
    """The tidy table of operators, see frame.COLUMNS."""
    cases: list[CaseAnalysis]
    layer_rows: list[Row]
    """The tidy table of layers, see layer_frame.COLUMNS."""
    layers: list[LayerAnalysis]
    kernel_rows: list[Row]
    """The tidy table of kernels, see kernel_frame.COLUMNS."""
    kernels: list[KernelAnalysis]
    training_rows: list[Row]
    """The tidy table of training runs, see training_frame.COLUMNS."""
    training: list[TrainingAnalysis]
    copy_rows: list[Row]
    """The tidy table of GEMMs beside copies, see copies.COPY_COLUMNS."""
    copies: list[CopyAnalysis]
    tp_training_rows: list[Row]
    """The tidy table of tensor-parallel stacks, see tp_training_frame.COLUMNS."""
    tp_training: list[TpTrainingAnalysis]
    records: Records
    """What the sweeps that searched say of themselves."""
    strays: list[Unproven]
    """What a tuner could not prove because it belongs to none of the cases."""
    problems: list[str]
    """One sentence for each file that is there and cannot be read."""
    warnings: list[str]
    """One sentence for each trace that was read only in part."""

    @property
    def proofs(self) -> list[Proof]:
        """Of all cases and TP sizes."""
        return [proof for case in self.cases for proof in case.proofs.values()]

    @property
    def unproven(self) -> list[Unproven]:
        """Of all cases and TP sizes."""
        return [found for case in self.cases for found in case.unproven.values()] + self.strays

    @property
    def loose_layers(self) -> list[LayerAnalysis]:
        """Those that no tuner measured for one of the cases."""
        found = [outcome for case in self.cases for outcome in (*case.outcomes.values(), *case.superseded)]
        trials = [trial for outcome in found for trial in (outcome.trial, *(t.trial for t in outcome.together))]
        tuned = {trial.point.directory for trial in trials if trial and trial.point}
        return [layer for layer in self.layers if layer.point.directory not in tuned]

    def folder(self, case: CaseAnalysis) -> str:
        """Where a case's files go, below all others: empty for the only one."""
        return case.case.name if len(self.cases) > 1 else ""

    def counts(self) -> dict[str, int]:
        found: Counter[str] = Counter(point.status for point in self.reading.points)
        launch_bound = sum(len(case.launch_bound) for case in self.cases)
        launch_bound += sum(layer.launch_bound for layer in self.layers)
        launch_bound += sum(kernel.launch_bound_points for kernel in self.kernels)
        training = (point.result for of_case in self.training for point in of_case.points)
        launch_bound += sum(is_host_limited(result) for result in training if result)
        launch_bound += sum(row.launch_bound for of_case in self.copies for row in of_case.rows)
        launch_bound += sum(row.host_limits for of_case in self.tp_training for row in of_case.of_points)
        statuses = ("ok", "failed", "timeout", "skipped", "missing")
        return {
            "points": len(self.reading.points) + len(self.reading.problems),
            **{status: found[status] for status in statuses},
            "unreadable": len(self.reading.problems),
            "launch_bound": launch_bound,
        }


def analyse(root: Path, config: AnalysisConfig) -> Analysis:
    """Read and judge everything at or below `root`. UserError when there is nothing."""
    reading = read_points(root)
    traces = read_traces(point for point in reading.points if point.is_operator)
    records = read_records(root)
    grouped = group_cases(reading.points)
    found = outcomes(records.tuners, reading.points, grouped)
    failed = failures(reading.points)
    cases = []
    for case, points in grouped.items():
        choices = choose_all(points, traces, config.objective, failed)
        stands = _standing(found, case)
        tp_sizes = sorted({choice.tp_size for choice in choices if choice.tp_size > 1})
        plans = {
            tp_size: plan([choice for choice in choices if choice.tp_size == tp_size], config.unmeasured)
            for tp_size in tp_sizes
        }
        cases.append(
            CaseAnalysis(
                case=case,
                points=points,
                plans=plans,
                scaling=scale_case(choices, config.tp_scaling_tolerance),
                drift=baseline_drift(points),
                repeats=repeated(points),
                conditions=gpu_conditions(points),
                launch_bound=[point.name for point in points if point.result and point.result.launch_bound],
                outcomes=stands,
                superseded=[one for one in found if one.case == case and one is not stands[one.tp_size]],
            )
        )
    layers = [analyse_layer(point) for point in reading.points if point.is_layer and point.status == "ok"]
    kernels = analyse_kernels(reading.points)
    training, copies = analyse_training(reading.points, records.knobs), analyse_copies(reading.points)
    communication = read_communication(p for p in reading.points if p.is_tp_training and p.status == "ok")
    tp_training = analyse_tp_training(reading.points, communication.of_point)
    return Analysis(
        reading=reading,
        config=config,
        rows=table_rows(reading, traces),
        cases=cases,
        layer_rows=layer_rows(reading.points, layers, root),
        layers=layers,
        kernel_rows=kernel_rows(reading.points, kernels, root),
        kernels=kernels,
        training_rows=training_rows(reading.points, training, root),
        training=training,
        copy_rows=copy_rows(reading.points, root),
        copies=copies,
        tp_training_rows=tp_training_rows(reading.points, tp_training, root),
        tp_training=tp_training,
        records=records,
        strays=[one for one in found if isinstance(one, Unproven) and one.case is None],
        problems=[
            *reading.problems,
            *reading.trace_problems,
            *records.problems,
            *(problem for of_point in traces.values() for problem in of_point.problems),
            *communication.problems,
        ],
        warnings=[
            *(warning for of_point in traces.values() for warning in of_point.warnings),
            *communication.warnings,
        ],
    )


def _standing(found: Sequence[Outcome], case: Case) -> dict[int, Outcome]:
    """By TP size, what to report of this case."""
    by_size = defaultdict(list)
    for one in found:
        if one.case == case:
            by_size[one.tp_size].append(one)
    return {tp_size: standing(by_size[tp_size]) for tp_size in sorted(by_size)}
