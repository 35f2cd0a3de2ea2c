"""The answer for people: on the terminal, in a pipe, and in summary.txt."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from overlap_sweep.report.console import console_for, print_lines
from overlap_sweep.report.searches import knob_searches, pass_searches, print_titled
from overlap_sweep.report.section import Analysis, Section
from overlap_sweep.report.terminal import print_exhibit, print_section
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import launch_commands

FILE_NAME = "summary.txt"


def summary_text(analysis: Analysis) -> str:
    """Returns the content of summary.txt."""
    stream, reading = io.StringIO(), analysis.sources.reading
    console = console_for(stream)
    print_answers(analysis, console, whole=True)
    for answer in (answer for section in analysis.sections for answer in section.answers if answer.details):
        _print_block(f"Details of {answer.title}", answer.details, console)
        for exhibit in (exhibit for exhibit in answer.more if exhibit.is_detail):
            print_exhibit(exhibit, console, whole=True)
    print_titled(pass_searches(analysis.sources.records, reading.root), console)
    if commands := launch_commands(reading.points):
        _print_block("Commands", commands, console)
    return stream.getvalue()


def print_answers(analysis: Analysis, console: Console, whole: bool = False) -> None:
    """Prints what each workload says, then what was left out; `whole`: every table, with all its rows."""
    reading = analysis.sources.reading
    print_titled(knob_searches(analysis.sources.records.knobs, reading.root), console)
    for section in analysis.sections:
        print_section(section, console, whole)
    counts = {name: count for name, count in analysis.counts.items() if count}
    points = counts.pop("points")
    console.print(
        f"\n{points} point{'s' if points > 1 else ''}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items())
    )
    _print_not_ok(reading.points, console)


def print_written(paths: Sequence[Path], console: Console, sections: Sequence[Section] = ()) -> None:
    """Prints where the files are: the directory once, then names; of those of one kind, how many."""
    root = paths[0].parent
    of_kind = {file.name: file.kind for section in sections for file in section.files if file.kind}
    names = [str(path.relative_to(root)) for path in paths if path.parent == root or path.name not in of_kind]
    kinds = Counter(of_kind[path.name] for path in paths if path.parent != root and path.name in of_kind)
    names += [f"{kind} of {number} run directories" for kind, number in kinds.items()]
    console.print(f"\nWritten to {root}: {', '.join(names)}")


def _print_block(heading: str, lines: Sequence[str], console: Console) -> None:
    console.print(f"\n{heading}", style="bold")
    print_lines(lines, console)


def _print_not_ok(points: Sequence[Point], console: Console) -> None:
    reasons: dict[tuple[str, str], list[str]] = {}
    for point in points:
        if point.status != "ok":
            reasons.setdefault((point.status, point.why_not_ok), []).append(point.name)
    for (status, reason), names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print_lines([f"{status}: {names[0]}{more}: {reason}"], console)
