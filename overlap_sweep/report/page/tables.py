"""Tables of the page, which can be sorted and filtered: cells with what they sort by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from overlap_sweep.report.table import Column, Listing, PointRow, is_unknown


@dataclass(frozen=True)
class Cell:
    text: str
    order: float | str | None = None
    """What it sorts by, where that is not its text."""
    kind: str = ""
    """`number`, or what a style sheet tells apart."""
    link: str = ""
    """An address of the page."""


@dataclass(frozen=True)
class PageTable:
    columns: list[str]
    rows: list[list[Cell]]
    numeric: frozenset[str]
    high_first: frozenset[str]
    """The columns whose highest numbers one looks for."""
    caption: str = ""


BEYOND = 1e300
"""Sorts below everything that is measured."""


def page_table(listing: Listing[Any]) -> PageTable:
    """Returns the listing's rows with the columns that people see."""
    columns = listing.columns
    rows = [[_cell(column, row, listing.chosen(row)) for column in columns] for row in _in_order(listing)]
    return _table(columns, rows, listing.caption)


def summary_table(listing: Listing[Any], addresses: Sequence[str]) -> PageTable:
    """Returns rows that sum up answers, each with a link to its answer at one of the `addresses`."""
    table = page_table(listing)
    if listing.link is None:
        return table
    linked = [
        [replace(first, link=addresses[listing.link(row)]), *others]
        for row, (first, *others) in zip(_in_order(listing), table.rows, strict=True)
    ]
    return replace(table, rows=linked)


def _in_order(listing: Listing[Any]) -> Sequence[Any]:
    return sorted(listing.rows, key=listing.order) if listing.order else listing.rows


def points_table(listing: Listing[PointRow[Any]]) -> PageTable:
    """Returns all points, with a note on each, which of one that is not ok is the reason, and where it lies."""
    columns = [column for column in listing.columns if column.header != "note"]
    before, behind = ([one for one in columns if one.behind_note == is_behind] for is_behind in (False, True))
    rows = [
        [
            *(_cell(column, row, chosen=False) for column in before),
            _note(listing, row),
            *(_cell(column, row, chosen=False) for column in behind),
            Cell(row.directory),
        ]
        for row in _in_order(listing)
    ]
    table = _table(columns, rows, listing.caption)
    headers = [*(column.header for column in before), "note", *(column.header for column in behind), "point"]
    return replace(table, columns=headers)


def _table(columns: list[Column[Any]], rows: list[list[Cell]], caption: str) -> PageTable:
    return PageTable(
        [column.header for column in columns],
        rows,
        numeric=frozenset(column.header for column in columns if column.is_number),
        high_first=frozenset(column.header for column in columns if column.high_first),
        caption=caption,
    )


def _cell(column: Column[Any], row: Any, chosen: bool) -> Cell:
    value, kind = column.value(row), column.style if isinstance(column.style, str) else column.style(row)
    if not column.is_number:
        return Cell(column.text(row), kind="chosen" if chosen and kind == "reason" else kind)
    if is_unknown(value):
        return Cell(column.text(row), -BEYOND if column.high_first else BEYOND, "number")
    return Cell(column.text(row), round(value, 6), "number")


def _note(listing: Listing[PointRow[Any]], row: PointRow[Any]) -> Cell:
    if row.status != "ok":
        return Cell(row.why_not_ok, kind="reason")
    notes = [column.text(row) for column in listing.table.shown if column.header == "note"]
    return Cell(notes[0] if notes else "", kind="chosen" if listing.chosen(row) else "reason")
