"""Columns and tables. A column is declared once: DataFrame, CSV, Parquet, JSON, terminal, page, `--help` and the docs
come from it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal

from typing_extensions import TypeVar

from overlap_sweep.report.numbers import UNDEFINED, as_us, visible
from overlap_sweep.report.vocabulary import explained, unit
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.points import Point

if TYPE_CHECKING:
    import pandas as pd

R = TypeVar("R", default=Any)
"""Type of a table's rows."""
S = TypeVar("S")
V = TypeVar("V")

Row = dict[str, Any]
"""A row for programs, by column; None for values that are unknown or do not apply."""

Kind = Literal["text", "count", "number", "flag"]
PANDAS: Mapping[Kind, str] = {"text": "string", "count": "Int64", "number": "float64", "flag": "boolean"}


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column of a table of `R`."""

    name: str
    """Name in files and queries, with its unit; empty for a column that is only in tables for people."""
    value: Callable[[R], Scalar]
    """Returns the cell; None or NaN for unknown or undefined values."""
    about: str = ""
    """Sentence that explains the column; default: the vocabulary's for the name."""
    kind: Kind = "number"
    header: str = ""
    """Header in tables for people; empty for a column that is only in files."""
    show: Callable[[Any], str] | None = None
    """Formats the value for people; default: times as `1,234.5`. Not called for unknown or undefined values."""
    words: Callable[[R], str] | None = None
    """Returns the text from the row, instead of `show`; the page sorts by the value."""
    dropped: int = 0
    """Order in which a narrow terminal drops the column, from 1 on; 0: never."""
    page_only: bool = False
    """Whether only the page shows it, no terminal."""
    differing: bool = False
    """Whether it is shown only if rows differ in it."""
    usual: Scalar = None
    """Value that rows usually have: it is shown only if one has another. None: it is always shown."""
    queried: bool = False
    """Whether a query shows it by default although other tables for people do not."""
    high_first: bool = False
    """Whether high numbers are better, so that the page sorts them first."""
    style: str | Callable[[R], str] = ""
    """Class in the page's style sheet, such as `setting` or `reason`."""

    def __post_init__(self) -> None:
        if not self.about:
            object.__setattr__(self, "about", explained(self.name))

    @property
    def unit(self) -> str:
        """Returns the unit of its numbers; for other values their kind."""
        return unit(self.name, self.kind)

    def text(self, row: R) -> str:
        if self.words:
            return self.words(row)
        return self.shown(self.value(row))

    def shown(self, value: Scalar) -> str:
        show: Callable[[Any], str] = self.show or (as_us if self.name.endswith("_us") else str)
        return "" if is_unknown(value) else show(value)

    @property
    def is_number(self) -> bool:
        return self.kind in ("count", "number")


def is_unknown(value: Scalar) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


@dataclass(frozen=True)
class Table(Generic[R]):
    """Ordered columns, and what a row is."""

    name: str
    """The stem of its files: `copies` of copies.csv and copies.parquet."""
    rows: str
    """Meaning of a row for the column reference: `one row per point`."""
    columns: tuple[Column[R], ...]

    @property
    def written(self) -> list[Column[R]]:
        """Returns the columns of files."""
        return [column for column in self.columns if column.name]

    @property
    def shown(self) -> list[Column[R]]:
        """Returns the columns of tables for people."""
        return [column for column in self.columns if column.header]

    @property
    def default_columns(self) -> list[str]:
        """Returns the columns that a query shows by default: those of any terminal, and those marked `queried`."""
        shown = [
            column.name
            for column in self.written
            if column.queried or (column.header and not column.dropped and not column.page_only)
        ]
        return [*(name for name in shown if name != "status"), "status"]

    @property
    def types(self) -> dict[str, str]:
        """Returns the pandas type of each column of files, in order."""
        return {column.name: PANDAS[column.kind] for column in self.written}

    def details(self, row: R) -> dict[str, str]:
        """Returns the cells for people by header, for the row's tooltip in charts."""
        return {column.header: column.text(row) for column in self.shown}

    def records(self, rows: Iterable[R]) -> list[Row]:
        """Returns the rows with every column of files."""
        return [{column.name: column.value(row) for column in self.written} for row in rows]

    def frame(self, rows: Iterable[R]) -> pd.DataFrame:
        """Returns the rows with every column of files as a DataFrame."""
        return to_frame(self.records(rows), self.types)


@dataclass(frozen=True)
class RowText:
    """The sentences about a row of a table on the page."""

    heading: str
    """Heading of the row and of its neighbours with the same heading."""
    about: Sequence[str]
    """Sentences below the heading."""
    sentences: Sequence[str]
    """Sentences below the row."""


@dataclass(frozen=True)
class Listing(Generic[R]):
    """Rows of a table and how to show them to people."""

    table: Table[R]
    rows: Sequence[R]
    caption: str = ""
    """Caption of the table on the page."""
    chosen: Callable[[R], bool] = field(default=lambda row: False)
    """Returns whether the row is an answer."""
    reference: Callable[[R], bool] = field(default=lambda row: False)
    """Returns whether the row is the reference of gains, which is always shown."""
    faint: Callable[[R], bool] = field(default=lambda row: False)
    """Returns whether the row is only a baseline."""
    group: Callable[[R], object] = field(default=lambda row: None)
    """Returns the row's group; a blank line separates groups."""
    most_rows: int | None = None
    """Most rows on a terminal: the first ones, the chosen and the reference; None: all."""
    order: Callable[[R], tuple[object, ...]] | None = None
    """Sort key of the rows on the page; None: not sorted."""
    text: Callable[[R], RowText] | None = None
    """Returns the sentences of a row on the page, where the table then cannot be sorted; None: there are none."""
    link: Callable[[R], int] | None = None
    """Index of the answer that a row of a summary is about."""

    @property
    def frame(self) -> pd.DataFrame:
        """Returns the rows for programs."""
        return self.table.frame(self.rows)

    @property
    def columns(self) -> list[Column[R]]:
        """Returns the shown columns with a value in any row."""
        return [column for column in self.table.shown if self._is_needed(column)]

    def _is_needed(self, column: Column[R]) -> bool:
        if column.usual is not None and all(column.value(row) in (None, column.usual) for row in self.rows):
            return False
        if column.differing:
            return len({column.text(row) for row in self.rows}) > 1
        return any(column.text(row) not in ("", UNDEFINED) for row in self.rows)


def to_frame(rows: Sequence[Row], types: Mapping[str, str]) -> pd.DataFrame:
    """Returns the rows as a DataFrame. `types`: the pandas type of each column."""
    import pandas as pd

    return pd.DataFrame(rows, columns=list(types)).astype(dict(types))


def table_files(name: str, frame: pd.DataFrame) -> dict[str, bytes]:
    parquet = io.BytesIO()
    frame.to_parquet(parquet, index=False)
    return {f"{name}.csv": csv_of(frame).encode(), f"{name}.parquet": parquet.getvalue()}


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of cells that a spreadsheet would compute as formulas."""


def csv_of(frame: pd.DataFrame) -> str:
    """Returns CSV that is safe to open in a spreadsheet; Parquet and JSON have the original texts."""
    texts = frame.select_dtypes(["object", "string"]).columns
    shown = frame.assign(**{name: frame[name].map(csv_cell, na_action="ignore") for name in texts})
    return shown.to_csv(index=False, lineterminator="\n")


def csv_cell(value: Scalar) -> Scalar:
    """Returns the value; in texts, invisible characters are escaped and formulas get a leading apostrophe."""
    if not isinstance(value, str):
        return value
    return visible(f"'{value}" if value.startswith(_FORMULA) else value)


@dataclass(frozen=True)
class PointRow(Generic[R]):
    """One point of a sweep, of any status, or one of its measured parts."""

    point: Point
    root: Path
    """The directory that was analysed."""
    measured: R | None
    """Measurements of an ok point; None for others."""
    part: str = ""
    """Part that the row is about if the point has several rows, such as a phase."""
    variant: str = ""
    """Variant in the names of its traces; empty: the point's own."""
    pass_name: str = ""
    """Pass that its times are of; empty: all."""

    @property
    def directory(self) -> str:
        return self.point.directory.relative_to(self.root).as_posix()

    @property
    def why_not_ok(self) -> str:
        """Returns the reason in one line; empty if the point is ok."""
        return "" if self.point.status == "ok" else self.point.why_not_ok

    @property
    def is_launch_bound(self) -> bool:
        return bool(self.measured is not None and getattr(self.measured, "launch_bound", False))


def attribute(name: str, about: str = "", kind: Kind = "number", read: str = "", **more: Any) -> Column:
    """Returns the column of the row's attribute `read`; default: the attribute of the column's name."""
    return Column(name, attrgetter(read or name), about, kind, **more)


def item(name: str, about: str = "", header: str = "", kind: Kind = "number", **more: Any) -> Column[Row]:
    """Returns the column of the value of its name, for rows that are dicts."""
    return Column(name, itemgetter(name), about, kind, header, **more)


def _status(row: PointRow) -> str:
    reused = row.point.result and row.point.result.reused_from
    return f"{row.point.status}{', launch-bound' if row.is_launch_bound else ''}{', reused' if reused else ''}"


def _error(row: PointRow) -> str | None:
    if row.point.result:
        return row.point.result.error
    return "no result.json: the point is still running or its launcher was stopped"


POINT: Column[PointRow] = attribute("point", kind="text", read="point.name")
DIRECTORY: Column[PointRow] = attribute("directory", kind="text")
MODEL: Column[PointRow] = attribute("model", kind="text", read="point.case.model", header="model")
BACKEND: Column[PointRow] = attribute("backend", kind="text", read="point.case.backend", header="backend")
DEVICE: Column[PointRow] = attribute("device", kind="text", read="point.case.device")
PROCESS_WIDE: Column[PointRow] = Column(
    "process_wide", lambda row: row.point.case.process_wide or None, kind="text", header="process", differing=True
)
PRECISION: Column[PointRow] = attribute("precision", kind="text", read="point.case.precision", header="precision")
STATUS: Column[PointRow] = attribute(
    "status",
    kind="text",
    read="point.status",
    header="status",
    words=_status,
    style=lambda row: "doubtful" if row.is_launch_bound else row.point.status,
)
ERROR: Column[PointRow] = Column("error", _error, kind="text")
ORIGIN: tuple[Column[PointRow], ...] = (
    Column(
        "started",
        lambda row: row.point.result.started if row.point.result else None,
        "Start of the measurement, UTC; earlier than the sweep for points of the sweep that it continues.",
        "text",
    ),
    Column(
        "reused_from",
        lambda row: row.point.result.reused_from if row.point.result else None,
        "The store that the result is from, and where and when it was measured; empty if it was measured here.",
        "text",
    ),
)


def asked(name: str, *path: str, **more: Any) -> Column[PointRow]:
    """Returns a column of the point's configuration at `path` (default: the column's name)."""

    *groups, option = path or (name,)

    def value(row: PointRow) -> Scalar:
        found: object = row.point.config
        for group in groups:
            found = getattr(found, group, None)
        return getattr(found, option, None)

    return Column(name, value, **more)


def through(column: Column[R], get: Callable[[S], R | None], header: str | None = None) -> Column[S]:
    """Returns the column for rows from which `get` returns an R; empty where it returns None. `header`: another one."""

    def lifted(call: Callable[[R], V], empty: V) -> Callable[[S], V]:
        return lambda row: empty if (inner := get(row)) is None else call(inner)

    words, style = column.words, column.style
    other_rows: Any = column
    return replace(
        other_rows,
        value=lifted(column.value, None),
        words=words and lifted(words, ""),
        style=style if isinstance(style, str) else lifted(style, ""),
        header=column.header if header is None else header,
    )


def measured_column(column: Column[R]) -> Column[PointRow[R]]:
    """Returns the column for points; empty for points without measurements."""
    return through(column, lambda row: row.measured)


def points_table(
    name: str,
    rows: str,
    point_columns: Iterable[Column[PointRow[R]]],
    measured: Iterable[Column[R]],
    point: Column[PointRow] = POINT,
) -> Table[PointRow[R]]:
    """Returns the table of all points of a workload: columns of the point, with those that all workloads have, then of
    its measurements."""
    all_have = STATUS, ERROR, *ORIGIN
    return Table(name, rows, (point, DIRECTORY, *point_columns, *all_have, *map(measured_column, measured)))
