"""Sections on a terminal of any width, in a pipe, and in summary.txt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from rich.console import Console

from overlap_sweep.report.console import print_lines
from overlap_sweep.report.numbers import some_names
from overlap_sweep.report.plain_table import PlainRow, print_table
from overlap_sweep.report.section import Answer, Card, Exhibit, Section
from overlap_sweep.report.table import Column, Listing

R = TypeVar("R")


def print_section(section: Section, console: Console, whole: bool = False) -> None:
    """Prints what sums all answers up, then each with the table that it comes from, of very many only what to know
    before believing them; `whole`: all of them, with all rows of each."""
    if section.summary:
        console.print(f"\n{section.summary.caption}", style="bold")
        print_listing(section.summary, console, section.file, whole)
    if not whole and section.most_tables is not None and len(section.answers) > section.most_tables:
        print_lines(_cautions_of_all(section.answers), console, indent=0)
        where = "Reasons, and all that was compared, are in summary.txt and report.html."
        print_lines([where], console, indent=0)
        return
    for answer in section.answers:
        print_answer(answer, console, section.file, whole)
    for exhibit in section.more:
        print_exhibit(exhibit, console, whole)


def _cautions_of_all(answers: Sequence[Answer]) -> list[str]:
    """Returns each once, with the answers that it is about."""
    found: dict[str, list[str]] = {}
    for answer in answers:
        for caution in answer.cautions:
            found.setdefault(caution, []).append(answer.brief)
    return [f"{some_names(briefs)}: {caution}" for caution, briefs in found.items()]


def print_answer(answer: Answer, console: Console, file: str, whole: bool = False) -> None:
    """Prints the answer first, then what was compared, then what to know before believing it."""
    console.print(f"\n{answer.title}", style="bold")
    print_lines(answer.sentences, console)
    for card in answer.cards:
        _print_card(card, console)
    print_listing(answer.compared, console, file, whole)
    print_lines([answer.legend] if answer.legend else [], console, indent=0)
    for exhibit in answer.more:
        if not exhibit.is_detail:
            print_exhibit(exhibit, console, whole)
    if answer.more and answer.cautions:
        console.print()
    print_lines(answer.cautions, console, indent=0)


def _print_card(card: Card, console: Console) -> None:
    where = f" ({card.file})" if card.file else ""
    print_lines([f"{card.title}: {card.headline}{where}"], console)
    print_lines([*card.sentences, *card.confidence], console, indent=4)
    if card.to_set:
        print_lines(["What to set:"], console, indent=4)
        print_lines(card.to_set, console, indent=6)


def print_exhibit(exhibit: Exhibit, console: Console, whole: bool) -> None:
    """Prints its table and notes, if it has any: charts are the page's."""
    if not (exhibit.listing or exhibit.notes):
        return
    if exhibit.heading:
        console.print(f"\n{exhibit.heading}", style="bold")
    if exhibit.listing:
        print_listing(exhibit.listing, console, "report.html", whole)
    print_lines([*([exhibit.explained] if exhibit.explained else []), *exhibit.notes], console, indent=0)


def print_listing(listing: Listing[R], console: Console, file: str, whole: bool = False) -> None:
    """Prints the rows below their headers; one below the other where the terminal is too narrow. Of more than
    `most_rows` the first, the chosen and the reference, unless the `whole` table is wanted: `file` has all."""
    most = None if whole else listing.most_rows
    rows = [
        row
        for i, row in enumerate(listing.rows)
        if most is None or i < most or listing.chosen(row) or listing.reference(row)
    ]
    if not rows:
        return
    columns = [column for column in listing.columns if not column.page_only]
    groups = [listing.group(row) for row in rows]
    table = [
        PlainRow(
            [column.text(row) for column in columns],
            "green" if listing.chosen(row) else "dim" if listing.faint(row) else "",
            ends_section=i + 1 < len(rows) and groups[i + 1] != groups[i],
        )
        for i, row in enumerate(rows)
    ]
    left = [column.header for column in columns if not column.is_number]
    droppable = sorted((column for column in columns if column.dropped), key=lambda column: column.dropped)
    headers = [column.header for column in columns]
    if not print_table(headers, table, left, console, [column.header for column in droppable]):
        _print_stacked(columns, rows, console)
    if len(rows) < len(listing.rows):
        print_lines([f"... and {len(listing.rows) - len(rows)} more, all in {file}"], console, indent=0)


def _print_stacked(columns: Sequence[Column[Any]], rows: Sequence[Any], console: Console) -> None:
    """Prints each row as lines: its texts first, then its numbers by their headers."""
    for row in rows:
        texts = [column.text(row) for column in columns if not column.is_number and column.header != "note"]
        notes = [column.text(row) for column in columns if column.header == "note"]
        told = f" ({notes[0]})" if any(notes) else ""
        print_lines([f"{', '.join(filter(None, texts))}{told}"], console)
        numbers = [(column.header, column.text(row)) for column in columns if column.is_number]
        print_lines([", ".join(f"{header} {text}" for header, text in numbers if text)], console, indent=4)
