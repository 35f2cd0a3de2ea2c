"""What tables, and the sections that hold them, make of their columns, whatever they are of."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from overlap_sweep.overlap.overlap_cfg import without_folders
from overlap_sweep.report.console import print_section
from overlap_sweep.report.numbers import as_percent
from overlap_sweep.report.page import page_table, summary_table
from overlap_sweep.report.section import Answer, Section
from overlap_sweep.report.table import Column, Listing, PointRow, Table

N = Column[tuple[str, int]]
TABLE = Table(
    *("numbers", "one row per number"),
    (
        N("kind", lambda row: row[0], kind="text", header="kind", differing=True),
        N("number", lambda row: row[1], kind="count", header="number"),
        N("square", lambda row: row[1] ** 2, kind="count", dropped=1, header="squared", queried=True),
        N("cube", lambda row: row[1] ** 3, kind="count", dropped=1, header="cubed"),
        N("fourth", lambda row: row[1] ** 4, kind="count"),
    ),
)
ROWS = [("odd", 3), ("odd", 1)]


def test_a_column_is_shown_and_queried_as_it_says() -> None:
    assert [column.header for column in Listing(TABLE, ROWS).columns] == ["number", "squared", "cubed"]
    assert Listing(TABLE, [*ROWS, ("even", 2)]).columns[0].header == "kind"
    assert TABLE.default_columns == ["kind", "number", "square", "status"]
    assert TABLE.records(ROWS)[0] == {"kind": "odd", "number": 3, "square": 9, "cube": 27, "fourth": 81}


def test_a_column_without_a_value_in_any_row_is_not_shown_but_written() -> None:
    unknown = N("share", lambda row: math.nan, header="share", words=lambda row: as_percent(math.nan))
    listing = Listing(replace(TABLE, columns=(*TABLE.columns, unknown)), ROWS)
    assert "share" not in [column.header for column in page_table(listing).columns]
    assert "share" in listing.table.records(ROWS)[0]


def test_the_page_orders_rows_and_links_them_to_answers() -> None:
    listing = Listing(TABLE, ROWS, order=lambda row: row[1], link=lambda row: ROWS.index(row))
    assert [row[0].text for row in page_table(listing).rows] == ["1", "3"]
    assert [row[0].link for row in summary_table(listing, ["first", "second"]).rows] == ["second", "first"]


def section(most_tables: int | None, caution: Callable[[int], str]) -> Section:
    answers = [
        Answer(f"Answer {i}", [f"sentence {i}"], [caution(i)], Listing(TABLE, ROWS), [], brief=f"brief {i}")
        for i in range(3)
    ]
    points: Listing[PointRow[int]] = Listing(Table("points", "one row per point", ()), [])
    decided = Listing(TABLE, ROWS, "What to use.")
    return Section("it", "its", "It", "", answers, points, {}, decided, most_tables=most_tables)


@pytest.mark.parametrize(
    ("most_tables", "whole", "tables"), [(None, False, 3), (3, False, 3), (2, False, 0), (2, True, 3)]
)
def test_of_many_answers_only_what_sums_them_up_is_printed(most_tables: int | None, whole: bool, tables: int) -> None:
    stream = io.StringIO()
    print_section(section(most_tables, lambda i: "beware" if i else "mind"), Console(file=stream, width=80), whole)
    printed = stream.getvalue()
    # The first are the rows that sum up.
    assert (printed.count("number  squared"), printed.count("sentence")) == (1 + tables, tables)
    assert "What to use." in printed
    assert ("brief 1; brief 2: beware" in printed, "brief 0: mind" in printed) == (not tables, not tables)
    assert len(re.findall("^(?:beware|mind)$", printed, re.MULTILINE)) == tables


def test_files_of_one_name_keep_their_folders() -> None:
    assert without_folders(["none", "file:/a/b.yaml", "file:/c/d.yaml"]) == {
        "none": "none",
        "file:/a/b.yaml": "file:b.yaml",
        "file:/c/d.yaml": "file:d.yaml",
    }
    same = ["file:/a/b.yaml", "file:/c/b.yaml"]
    assert without_folders(same) == {name: name for name in same}
