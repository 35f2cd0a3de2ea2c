"""The whole analysis of a directory, from run directories to answers."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.frame import Row
from overlap_sweep.report.section import Section, Sources
from overlap_sweep.results.conditions import gpu_conditions
from overlap_sweep.results.points import Case, Point, Reading, group_cases, read_points
from overlap_sweep.results.records import Records, read_records
from overlap_sweep.results.traces import read_traces
from overlap_sweep.workloads.fsdp.answer import TrainingAnalysis, analyse_training, is_host_limited
from overlap_sweep.workloads.fsdp.frame import training_rows
from overlap_sweep.workloads.kernel.answer import KernelAnalysis, analyse_kernels
from overlap_sweep.workloads.kernel.frame import kernel_rows
from overlap_sweep.workloads.layer.answer import LayerAnalysis, analyse_layer
from overlap_sweep.workloads.layer.frame import layer_rows
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import choose_all
from overlap_sweep.workloads.operator.drift import baseline_drift
from overlap_sweep.workloads.operator.failures import failures
from overlap_sweep.workloads.operator.frame import table_rows
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Unproven, outcomes, standing
from overlap_sweep.workloads.operator.repeats import repeated
from overlap_sweep.workloads.operator.scaling import scale_case
from overlap_sweep.workloads.operator.switches import plan
from overlap_sweep.workloads.tp_training.answer import TpTrainingAnalysis, analyse_tp_training
from overlap_sweep.workloads.tp_training.frame import tp_training_rows
from overlap_sweep.workloads.tp_training.step_communication import read_communication


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
    sections: list[Section]
    """What workloads say that say it all themselves."""
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
        launch_bound += sum(section.launch_bound for section in self.sections)
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
    training = analyse_training(reading.points, records.knobs)
    sections = sections_of(Sources(reading, records, config))
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
        sections=sections,
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
            *(problem for section in sections for problem in section.problems),
        ],
        warnings=[
            *(warning for of_point in traces.values() for warning in of_point.warnings),
            *communication.warnings,
            *(warning for section in sections for warning in section.warnings),
        ],
    )


def sections_of(sources: Sources) -> list[Section]:
    """Returns what each workload that has points says."""
    found = (module.section(sources) for module in workloads.section_modules())
    return [section for section in found if section]


def sections_of_points(points: Sequence[Point]) -> list[Section]:
    """Returns what the workloads of these points alone say."""
    root = Path(os.path.commonpath([point.directory for point in points]))
    records = Records(tuners={}, searches={}, knobs={}, problems=[])
    return sections_of(Sources(Reading(root, list(points), problems=[]), records, AnalysisConfig()))


def _standing(found: Sequence[Outcome], case: Case) -> dict[int, Outcome]:
    """By TP size, what to report of this case."""
    by_size = defaultdict(list)
    for one in found:
        if one.case == case:
            by_size[one.tp_size].append(one)
    return {tp_size: standing(by_size[tp_size]) for tp_size in sorted(by_size)}
