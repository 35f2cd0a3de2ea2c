"""The whole analysis of a directory, from run directories to answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.frame import Row
from overlap_sweep.report.section import Section, Sources
from overlap_sweep.results.points import Point, Reading, read_points
from overlap_sweep.results.records import Records, read_records
from overlap_sweep.workloads.kernel.answer import KernelAnalysis, analyse_kernels
from overlap_sweep.workloads.kernel.frame import kernel_rows
from overlap_sweep.workloads.layer.answer import LayerAnalysis, analyse_layer
from overlap_sweep.workloads.layer.frame import layer_rows
from overlap_sweep.workloads.operator.analysis import OperatorAnalysis, analyse_operators
from overlap_sweep.workloads.tp_training.answer import TpTrainingAnalysis, analyse_tp_training
from overlap_sweep.workloads.tp_training.frame import tp_training_rows
from overlap_sweep.workloads.tp_training.step_communication import read_communication


@dataclass(frozen=True)
class Analysis:
    """All that is known about a directory of results."""

    reading: Reading
    config: AnalysisConfig
    operators: OperatorAnalysis
    layer_rows: list[Row]
    """The tidy table of layers, see layer_frame.COLUMNS."""
    layers: list[LayerAnalysis]
    kernel_rows: list[Row]
    """The tidy table of kernels, see kernel_frame.COLUMNS."""
    kernels: list[KernelAnalysis]
    sections: list[Section]
    """What workloads say that say it all themselves."""
    tp_training_rows: list[Row]
    """The tidy table of tensor-parallel stacks, see tp_training_frame.COLUMNS."""
    tp_training: list[TpTrainingAnalysis]
    records: Records
    """What the sweeps that searched say of themselves."""
    problems: list[str]
    """One sentence for each file that is there and cannot be read."""
    warnings: list[str]
    """One sentence for each trace that was read only in part."""

    def counts(self) -> dict[str, int]:
        found: Counter[str] = Counter(point.status for point in self.reading.points)
        launch_bound = sum(len(case.launch_bound) for case in self.operators.cases)
        launch_bound += sum(layer.launch_bound for layer in self.layers)
        launch_bound += sum(kernel.launch_bound_points for kernel in self.kernels)
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
    records = read_records(root)
    sources = Sources(reading, records, config)
    operators = analyse_operators(sources)
    layers = [analyse_layer(point) for point in reading.points if point.is_layer and point.status == "ok"]
    kernels = analyse_kernels(reading.points)
    sections = sections_of(sources)
    communication = read_communication(p for p in reading.points if p.is_tp_training and p.status == "ok")
    tp_training = analyse_tp_training(reading.points, communication.of_point)
    return Analysis(
        reading=reading,
        config=config,
        operators=operators,
        layer_rows=layer_rows(reading.points, layers, root),
        layers=layers,
        kernel_rows=kernel_rows(reading.points, kernels, root),
        kernels=kernels,
        sections=sections,
        tp_training_rows=tp_training_rows(reading.points, tp_training, root),
        tp_training=tp_training,
        records=records,
        problems=[
            *reading.problems,
            *reading.trace_problems,
            *records.problems,
            *operators.problems,
            *communication.problems,
            *(problem for section in sections for problem in section.problems),
        ],
        warnings=[
            *operators.warnings,
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
