"""Writes reports next to the results, each file atomically; the launcher's files are not changed."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from overlap_sweep.errors import UserError, in_words, is_of_users_system
from overlap_sweep.report.console import SUMMARY_FILE, summary_text
from overlap_sweep.report.page import page_files
from overlap_sweep.report.section import Analysis
from overlap_sweep.report.table import table_files
from overlap_sweep.results.provenance import launch_commands
from overlap_sweep.results.run_directory import now, write_atomically
from overlap_sweep.trace.disk import is_below

REPORT_FILE = "tuning_report.json"
SCHEMA = 1


def write_reports(analysis: Analysis, directory: Path, *, with_plots: bool = False) -> list[Path]:
    """Writes all files into `directory`, which is created if needed, and returns the paths, summary first."""
    try:
        written: list[Path] = []

        def write(name: str, content: bytes) -> None:
            path = directory / name
            if not is_below(path.parent, directory):
                raise UserError(f"{path.parent} is a link that leads out of {directory}; use another --output.")
            path.parent.mkdir(parents=True, exist_ok=True)
            written.append(write_atomically(path, content))

        in_place = directory.resolve() == analysis.sources.reading.root.resolve()
        for name, content in _contents(analysis, in_place=in_place):
            write(name, content)
        other_files = [path.relative_to(directory).as_posix() for path in written]
        for name, content in page_files(analysis, other_files, with_plots=with_plots):
            write(name, content)
        return written
    except OSError as error:
        if is_of_users_system(error):
            raise UserError(in_words(error)) from None
        raise UserError(f"{directory} cannot be written to ({error.strerror}); give another with --output.") from None


def _contents(analysis: Analysis, *, in_place: bool) -> Iterator[tuple[str, bytes]]:
    """Yields paths below the report's directory with their contents; `in_place`: that has the run directories."""
    yield SUMMARY_FILE, summary_text(analysis).encode()
    yield REPORT_FILE, msgspec.json.format(msgspec.json.encode(_report(analysis)), indent=2) + b"\n"
    for section in analysis.sections:
        yield from table_files(section.points.table.name, section.frame).items()
        for file in section.files:
            if in_place and file.by_launch:
                continue
            yield (file.directory.relative_to(analysis.sources.reading.root) / file.name).as_posix(), file.content()


def _report(analysis: Analysis) -> dict[str, object]:
    """Returns the content of tuning_report.json: times in microseconds, NaN, which is written as null, if undefined.
    Measurements have the keys of their section's `report`."""
    reading, config = analysis.sources.reading, analysis.sources.config
    return {
        "schema": SCHEMA,
        "directory": str(reading.root),
        "analysed": now(),
        "objective": config.objective,
        "overlap_threshold": config.overlap_threshold,
        "unmeasured": config.unmeasured,
        "counts": analysis.counts,
        "problems": analysis.problems,
        "commands": launch_commands(reading.points),
        **{name: content for section in analysis.sections for name, content in section.report.items()},
    }
