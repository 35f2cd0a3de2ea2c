"""The whole analysis of a directory, from run directories to answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.section import Section, Sources
from overlap_sweep.results.points import Point, Reading, read_points
from overlap_sweep.results.records import Records, read_records
from overlap_sweep.workloads.operator.analysis import OperatorAnalysis, analyse_operators


@dataclass(frozen=True)
class Analysis:
    """All that is known about a directory of results."""

    reading: Reading
    config: AnalysisConfig
    operators: OperatorAnalysis
    sections: list[Section]
    """What workloads say that say it all themselves."""
    records: Records
    """What the sweeps that searched say of themselves."""
    problems: list[str]
    """One sentence for each file that is there and cannot be read."""
    warnings: list[str]
    """One sentence for each trace that was read only in part."""

    def counts(self) -> dict[str, int]:
        found: Counter[str] = Counter(point.status for point in self.reading.points)
        launch_bound = sum(len(case.launch_bound) for case in self.operators.cases)
        launch_bound += sum(section.launch_bound for section in self.sections)
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
    sections = sections_of(sources)
    return Analysis(
        reading=reading,
        config=config,
        operators=operators,
        sections=sections,
        records=records,
        problems=[
            *reading.problems,
            *reading.trace_problems,
            *records.problems,
            *operators.problems,
            *(problem for section in sections for problem in section.problems),
        ],
        warnings=[
            *operators.warnings,
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
