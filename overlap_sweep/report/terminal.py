"""Prints the answers to a terminal of any width, a pipe, or summary.txt."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from overlap_sweep.report.console import console_for, print_lines, print_table
from overlap_sweep.report.numbers import counted, some_of
from overlap_sweep.report.searches import knob_searches, pass_searches, print_titled
from overlap_sweep.report.section import Analysis, Answer, Card, Exhibit, Section
from overlap_sweep.report.table import Listing
from overlap_sweep.results.points import Point
from overlap_sweep.results.provenance import launch_commands

R = TypeVar("R")

SUMMARY_FILE = "summary.txt"


def summary_text(analysis: Analysis) -> str:
    """Returns the content of summary.txt."""
    stream, reading = io.StringIO(), analysis.sources.reading
    console = console_for(stream)
    print_answers(analysis, console, whole=True)
    for answer in (answer for section in analysis.sections for answer in section.answers if answer.details):
        _print_block(f"Details of {answer.title}", answer.details, console)
    print_titled(pass_searches(analysis.sources.records, reading.root), console)
    if commands := launch_commands(reading.points):
        _print_block("Commands", commands, console)
    return stream.getvalue()


def print_answers(analysis: Analysis, console: Console, whole: bool = False) -> None:
    """Prints each workload's answers, then the points that are not ok; `whole`: all tables with all rows."""
    reading = analysis.sources.reading
    print_titled(knob_searches(analysis.sources.records.knobs, reading.root), console)
    for section in analysis.sections:
        print_section(section, console, whole)
    counts = {name: count for name, count in analysis.counts.items() if count}
    points = counts.pop("points")
    by_status = ", ".join(f"{count} {name}" for name, count in counts.items())
    console.print(f"\n{counted(points, 'point')}: {by_status}")
    _print_not_ok(reading.points, console)


def print_headlines(analysis: Analysis, console: Console) -> None:
    """Prints the headline of each answer, then the lines to copy."""
    for answer in (answer for section in analysis.sections for answer in section.answers):
        console.print(f"\n{answer.title}", style="bold")
        print_lines(answer.sentences if answer.cards else [], console)
        for card in answer.shown_cards:
            title = f"{card.title}: " if answer.cards else ""
            print_lines([f"{title}{card.headline}{f', {card.file}' if card.file else ''}"], console)
    print_uses(analysis, console)


def print_uses(analysis: Analysis, console: Console) -> None:
    """Prints what to give to the program that is to run with each answer, to be copied."""
    answers = [answer for section in analysis.sections for answer in section.answers]
    for card in (card for answer in answers for card in answer.shown_cards if card.use):
        console.print(f"\n{card.title}, to copy:", style="bold")
        print_lines([card.limits] if card.limits else [], console)
        print_lines(card.use, console)


def print_written(paths: Sequence[Path], console: Console, sections: Sequence[Section] = ()) -> None:
    """Prints the directory, then the names of the files; for files of one kind their number."""
    root = paths[0].parent
    kind_of = {file.name: file.kind for section in sections for file in section.files if file.kind}
    names = [str(path.relative_to(root)) for path in paths if path.parent == root or path.name not in kind_of]
    kinds = Counter(kind_of[path.name] for path in paths if path.parent != root and path.name in kind_of)
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
        print_lines([f"{status}: {some_of(names, 1)}: {reason}"], console)


def print_section(section: Section, console: Console, whole: bool = False) -> None:
    """Prints the summary of all answers, then each answer with its table; of very many answers only the cautions.
    `whole`: all answers with all rows."""
    if section.summary:
        print_listing(section.summary, console, section.file, whole, section.summary.caption)
    if not whole and section.most_tables is not None and len(section.answers) > section.most_tables:
        print_lines(_cautions_of_all(section.answers), console, indent=0)
        where = "summary.txt and report.html have the reasons and all compared settings."
        print_lines([where], console, indent=0)
        return
    for answer in section.answers:
        print_answer(answer, console, section.file, whole)
    for exhibit in section.more:
        print_exhibit(exhibit, console, whole)


def _cautions_of_all(answers: Sequence[Answer]) -> list[str]:
    """Returns each caution once, with the answers that it applies to."""
    found: dict[str, list[str]] = {}
    for answer in answers:
        for caution in answer.cautions:
            found.setdefault(caution, []).append(answer.brief)
    return [f"{some_of(briefs, separator='; ')}: {caution}" for caution, briefs in found.items()]


def print_answer(answer: Answer, console: Console, file: str, whole: bool = False) -> None:
    """Prints the answer, then the compared settings, then the cautions."""
    console.print(f"\n{answer.title}", style="bold")
    print_lines(answer.sentences, console)
    print_lines(filter(None, [answer.later() if answer.later else ""]), console)
    for card in answer.cards:
        _print_card(card, console)
    print_listing(answer.compared, console, file, whole)
    print_lines([answer.legend] if answer.legend else [], console, indent=0)
    for exhibit in answer.more:
        print_exhibit(exhibit, console, whole)
    if answer.more and answer.cautions:
        console.print()
    print_lines(answer.cautions, console, indent=0)


def _print_card(card: Card, console: Console) -> None:
    where = f": {card.file}" if card.file else ""
    print_lines([f"{card.title}: {card.headline}{where}"], console)
    print_lines([*card.sentences, *card.basis], console, indent=4)
    if card.to_set:
        print_lines(["What to set:"], console, indent=4)
        print_lines(card.to_set, console, indent=6)


def print_exhibit(exhibit: Exhibit, console: Console, whole: bool) -> None:
    """Prints the exhibit's table and notes, if it has any; charts are only on the page."""
    if not (exhibit.listing or exhibit.notes):
        return
    if exhibit.heading:
        console.print(f"\n{exhibit.heading}", style="bold")
    if exhibit.listing:
        print_listing(exhibit.listing, console, "report.html", whole)
    print_lines([*([exhibit.explained] if exhibit.explained else []), *exhibit.notes], console, indent=0)


def print_listing(listing: Listing[R], console: Console, file: str, whole: bool = False, title: str = "") -> None:
    """Prints the rows below their headers; one below the other where the terminal is too narrow. Of more than
    `most_rows` only the first, the chosen and the reference, unless `whole`; `file` has all."""
    most = None if whole else listing.most_rows
    rows = [
        row
        for i, row in enumerate(listing.rows)
        if most is None or i < most or listing.chosen(row) or listing.reference(row)
    ]
    if not rows:
        return

    def style(row: R) -> str:
        return "green" if listing.chosen(row) else "dim" if listing.faint(row) else ""

    columns = [column for column in listing.columns if not column.page_only]
    print_table(title, columns, rows, console, style=style, group=listing.group)
    if len(rows) < len(listing.rows):
        print_lines([f"... and {len(listing.rows) - len(rows)} more, all in {file}"], console, indent=0)
