"""All charts of a case, in the order of the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from overlap_sweep.overlap.overlap_cfg import NONE, TUNED, named
from overlap_sweep.report.charts.figures import Figure, figure
from overlap_sweep.report.iterations import Timeline
from overlap_sweep.workloads.layer.section import layer_bars, layer_timeline
from overlap_sweep.workloads.operator import charts
from overlap_sweep.workloads.operator.analysis import OperatorAnalysis
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.num_sm import num_sm_lines
from overlap_sweep.workloads.operator.proof import Outcome, Proof


@dataclass(frozen=True)
class Timelines:
    """Of one operator, or of the whole layer, at one TP size."""

    tp_size: int
    what: str
    figures: list[Figure]
    notes: list[str]


@dataclass(frozen=True)
class CaseFigures:
    hidden: list[Figure]
    """One for each TP size."""
    beyond_floor: bool
    """Whether something in them takes less than the GEMMs alone."""
    layers: list[Figure]
    """One for each TP size that a tuner proved, or tried to prove."""
    num_sm: dict[int, list[Figure]]
    """By TP size one for each pass."""
    scaling: list[Figure]
    """One for each operator."""
    timelines: list[Timelines]
    without_timeline: list[str]
    """`fc1 at TP=2`, where no trace shows what was chosen."""

    @property
    def num_sm_rows(self) -> list[list[Figure]]:
        """What belongs together: the panels of a TP size, or where each has but one, all of them."""
        by_size = [panels for panels in self.num_sm.values() if panels]
        alone = all(len(panels) == 1 for panels in by_size)
        return [[panel for panels in by_size for panel in panels]] if alone and by_size else by_size


def case_figures(case: CaseAnalysis, analysis: OperatorAnalysis, prefix: str) -> CaseFigures:
    """`prefix` keeps the names of several cases apart."""
    timelines = [*_layer_timelines(case, analysis, prefix), *_operator_timelines(case, prefix)]
    drawn = {(timelines_of.tp_size, timelines_of.what) for timelines_of in timelines}
    wanted = [(tp, choice.operator) for tp, plan in case.plans.items() for choice in plan.choices if choice.tried_slots]
    hidden = charts.hidden_bars(case)
    return CaseFigures(
        beyond_floor=any(map(charts.beyond_floor, hidden.values())),
        hidden=[figure(f"{prefix}hidden_fraction_tp{tp_size}", bars) for tp_size, bars in hidden.items()],
        layers=list(_layers(case, prefix)),
        num_sm={
            tp_size: [
                figure(f"{prefix}num_sm_tp{tp_size}_{choice.operator}_{choice.pass_name}", lines)
                for choice, lines in num_sm_lines(case, tp_size)
            ]
            for tp_size in case.plans
        },
        scaling=[
            figure(f"{prefix}tp_scaling_{operator}", lines) for operator, lines in charts.scaling_lines(case).items()
        ],
        timelines=timelines,
        without_timeline=list(dict.fromkeys(f"{what} at TP={tp}" for tp, what in wanted if (tp, what) not in drawn)),
    )


def _layers(case: CaseAnalysis, prefix: str) -> Iterator[Figure]:
    for tp_size, outcome in case.outcomes.items():
        if outcome.trial and outcome.trial.layer:
            best = outcome.recommended if isinstance(outcome, Proof) else None
            bars = layer_bars(f"The whole layer, TP={tp_size}", outcome.trial.layer, best)
            yield figure(f"{prefix}layer_tp{tp_size}", bars)


def _layer_timelines(case: CaseAnalysis, analysis: OperatorAnalysis, prefix: str) -> Iterator[Timelines]:
    for tp_size, outcome in case.outcomes.items():
        trial = outcome.trial
        if not trial or not trial.point or not isinstance(outcome, Proof):
            continue
        names = _names_in_point(outcome, analysis)
        best = TUNED if outcome.recommended == NONE else outcome.recommended
        if NONE not in names or best not in names:
            continue
        title, backend = f"The whole layer, TP={tp_size}", outcome.case.backend
        shown = layer_timeline(title, trial.point, ("no overlap", names[NONE]), (named(best, backend), names[best]))
        if shown:
            drawn = figure(f"{prefix}timeline_tp{tp_size}_layer", shown.chart)
            yield Timelines(tp_size, "the whole layer", [drawn], shown.notes)


def _names_in_point(outcome: Outcome, analysis: OperatorAnalysis) -> dict[str, str]:
    """By label the name of the variant in the layer's result."""
    assert outcome.trial
    record = analysis.records.tuners[outcome.directory]
    return next(dict(trial.variants) for trial in record.proofs if trial.point == outcome.trial.name)


def _operator_timelines(case: CaseAnalysis, prefix: str) -> Iterator[Timelines]:
    for tp_size in case.plans:
        of_operator: dict[str, list[tuple[str, Timeline]]] = {}
        for choice, shown in charts.pass_timelines(case, tp_size):
            of_operator.setdefault(choice.operator, []).append((choice.pass_name, shown))
        for operator, of_passes in of_operator.items():
            figures = [
                figure(f"{prefix}timeline_tp{tp_size}_{operator}_{name}", shown.chart) for name, shown in of_passes
            ]
            notes = list(dict.fromkeys(note for _, shown in of_passes for note in shown.notes))
            yield Timelines(tp_size, operator, figures, notes)
