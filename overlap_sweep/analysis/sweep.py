"""The whole analysis of a directory, from run directories to answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from overlap_sweep import space
from overlap_sweep.analysis.choice import Candidate, PassChoice, choose_all
from overlap_sweep.analysis.conditions import GpuConditions, gpu_conditions
from overlap_sweep.analysis.drift import Drift, baseline_drift
from overlap_sweep.analysis.frame import Row, table_rows
from overlap_sweep.analysis.layer_frame import layer_rows
from overlap_sweep.analysis.layers import LayerAnalysis, analyse_layer
from overlap_sweep.analysis.points import Case, Point, Reading, group_cases, read_points
from overlap_sweep.analysis.repeats import Repeats, repeated
from overlap_sweep.analysis.scaling import Scaling, scale_case
from overlap_sweep.analysis.switches import Plan, plan
from overlap_sweep.analysis.traces import read_traces
from overlap_sweep.config import AnalysisConfig


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

    def slots(self, tp_size: int) -> list[SlotAnswer]:
        """Every configurable slot of the operators measured at this TP size, tried or not."""
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
    problems: list[str]
    """One sentence for each file that is there and cannot be read."""

    def counts(self) -> dict[str, int]:
        found: Counter[str] = Counter(point.status for point in self.reading.points)
        launch_bound = sum(len(case.launch_bound) for case in self.cases)
        launch_bound += sum(layer.launch_bound for layer in self.layers)
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
    traces = read_traces(point for point in reading.points if not point.is_layer)
    cases = []
    for case, points in group_cases(reading.points).items():
        choices = choose_all(points, traces, config.objective)
        tp_sizes = sorted({choice.tp_size for choice in choices if choice.tp_size > 1})
        plans = {tp_size: plan([choice for choice in choices if choice.tp_size == tp_size]) for tp_size in tp_sizes}
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
            )
        )
    layers = [analyse_layer(point) for point in reading.points if point.is_layer and point.status == "ok"]
    return Analysis(
        reading=reading,
        config=config,
        rows=table_rows(reading, traces),
        cases=cases,
        layer_rows=layer_rows(reading.points, layers, root),
        layers=layers,
        problems=reading.problems + [problem for found in traces.values() for problem in found.problems],
    )
