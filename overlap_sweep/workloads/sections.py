"""The report of all workloads on a directory of results. Separate from the registry because workers import that."""

import os
from collections.abc import Sequence
from pathlib import Path

from overlap_sweep import workloads
from overlap_sweep.config import AnalysisConfig
from overlap_sweep.report.section import Analysis, Section, Sources
from overlap_sweep.results.points import Point, Reading, read_points
from overlap_sweep.results.records import Records, read_records


def read_sources(root: Path, config: AnalysisConfig, command: str = "") -> Sources:
    """Reads everything at or below `root`; `command` is the user's command line. UserError if there is nothing."""
    return Sources(read_points(root), read_records(root), config, command)


def analyse(root: Path, config: AnalysisConfig, command: str = "") -> Analysis:
    """Reads and judges everything at or below `root`. UserError if there is nothing."""
    sources = read_sources(root, config, command)
    return Analysis(sources, sections_of(sources))


def sections_of(sources: Sources) -> list[Section]:
    """Returns the section of each workload that has points."""
    found = (workloads.section_module(name).section(sources) for name in workloads.names())
    return [section for section in found if section]


def sections_of_points(points: Sequence[Point]) -> list[Section]:
    """Returns the sections of the workloads of these points alone."""
    root = Path(os.path.commonpath([point.directory for point in points]))
    records = Records(tuners={}, searches={}, knobs={}, problems=[])
    return sections_of(Sources(Reading(root, list(points), problems=[]), records, AnalysisConfig()))
