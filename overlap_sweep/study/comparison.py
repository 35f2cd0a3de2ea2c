"""A study's settings in comparisons and histories: their times, by keys that are the same for all sweeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from overlap_sweep.report.comparison import Comparing
from overlap_sweep.results.comparable import Comparable, KeyedTime
from overlap_sweep.results.points import Point
from overlap_sweep.results.records import Records
from overlap_sweep.study import C, CaseAnalysis, R, Study
from overlap_sweep.study.analysis import analyse


def comparing(study: Study[C, R]) -> Comparing:
    """Returns how the study takes part in comparisons and histories."""

    def measured(points: Sequence[Point], records: Records) -> Comparable:
        analyses = analyse(study, points)
        briefs = Counter(analysis.case.brief for analysis in analyses)
        return Comparable(
            [
                _time(study, analysis, row, several=briefs[analysis.case.brief] > 1)
                for analysis in analyses
                for row in analysis.rows
            ]
        )

    return Comparing(measured, study.samples, matched=study.matched, changes_nothing=study.changes_nothing)


def _time(study: Study[C, R], analysis: CaseAnalysis[C, R], row: R, *, several: bool) -> KeyedTime:
    """Returns the row's time. `several`: whether the dataset has other cases with the same brief name, so that the key
    must tell them apart; else a sweep can be compared with one of a changed command."""
    key = study.key(analysis, row)
    key = key._replace(device=analysis.case.device, nodes=analysis.case.nodes, setting=key.setting or row.whole_setting)
    if several and (more := analysis.title.removeprefix(str(analysis.case)).removeprefix(", ")):
        key = key._replace(operator=f"{key.operator}: {more}")
    return KeyedTime(key, row.step, row.none_us, row.floor_us, tuple(point.name for point in row.points))
