"""All that operators say: from their points, and from what a tuner proved, to the answers of each case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.frame import Row
from overlap_sweep.report.section import Sources
from overlap_sweep.results.points import Case, Reading, group_cases
from overlap_sweep.results.provenance import gpu_conditions
from overlap_sweep.results.records import Records
from overlap_sweep.results.traces import read_traces
from overlap_sweep.workloads.operator.cases import CaseAnalysis
from overlap_sweep.workloads.operator.choice import choose_all
from overlap_sweep.workloads.operator.drift import baseline_drift
from overlap_sweep.workloads.operator.failures import failures
from overlap_sweep.workloads.operator.frame import table_rows
from overlap_sweep.workloads.operator.proof import Outcome, Proof, Unproven, outcomes, standing
from overlap_sweep.workloads.operator.repeats import repeated
from overlap_sweep.workloads.operator.scaling import scale_case
from overlap_sweep.workloads.operator.switches import plan


@dataclass(frozen=True)
class OperatorAnalysis:
    """The answers for all operators of a directory."""

    reading: Reading
    records: Records
    config: AnalysisConfig
    rows: list[Row]
    """The tidy table, see frame.COLUMNS."""
    cases: list[CaseAnalysis]
    strays: list[Unproven]
    """What a tuner could not prove because it belongs to none of the cases."""
    problems: list[str]
    """One sentence for each trace that cannot be read."""
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

    def folder(self, case: CaseAnalysis) -> str:
        """Where a case's files go, below all others: empty for the only one."""
        return case.case.name if len(self.cases) > 1 else ""


def analyse_operators(sources: Sources) -> OperatorAnalysis:
    """Returns what is best for each slot of each case, and what was proven of it."""
    reading, records, config = sources.reading, sources.records, sources.config
    traces = read_traces(sources.points("operator"))
    grouped = group_cases(reading.points, "operator")
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
    return OperatorAnalysis(
        reading=reading,
        records=records,
        config=config,
        rows=table_rows(reading, traces),
        cases=cases,
        strays=[one for one in found if isinstance(one, Unproven) and one.case is None],
        problems=[problem for of_point in traces.values() for problem in of_point.problems],
        warnings=[warning for of_point in traces.values() for warning in of_point.warnings],
    )


def _standing(found: Sequence[Outcome], case: Case) -> dict[int, Outcome]:
    """By TP size, what to report of this case."""
    by_size = defaultdict(list)
    for one in found:
        if one.case == case:
            by_size[one.tp_size].append(one)
    return {tp_size: standing(by_size[tp_size]) for tp_size in sorted(by_size)}
