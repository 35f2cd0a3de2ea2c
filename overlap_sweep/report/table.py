"""Columns and tables. A column is declared once: DataFrame, CSV, Parquet, JSON, terminal, page, `--help` and the docs
come from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from overlap_sweep.report.numbers import visible
from overlap_sweep.report.vocabulary import explained, unit
from overlap_sweep.results.points import Point

if TYPE_CHECKING:
    import pandas as pd

R = TypeVar("R")
"""What a row of a table is made of."""
S = TypeVar("S")

Row = dict[str, Any]
"""A row as programs take it: by column; None for what is unknown or does not apply."""

Kind = Literal["text", "count", "number", "flag"]
PANDAS: Mapping[Kind, str] = {"text": "string", "count": "Int64", "number": "float64", "flag": "boolean"}


def as_text(value: Any) -> str:
    return str(value)


@dataclass(frozen=True)
class Column(Generic[R]):
    """One column of a table of `R`."""

    name: str
    """In files and queries, with its unit; empty for a column that only people see."""
    value: Callable[[R], Any]
    """The cell; None or NaN for what is unknown or undefined."""
    about: str = ""
    """A sentence that explains it; without one, what the vocabulary has for the name."""
    kind: Kind = "number"
    header: str = ""
    """In tables for people; empty for a column that is in files alone."""
    show: Callable[[Any], str] = as_text
    """How people read the value. Not called for what is unknown or undefined, which is an empty cell."""
    words: Callable[[R], str] | None = None
    """Instead of `show`, where the text takes more than the value; the value is what the page sorts by."""
    dropped: int = 0
    """In which turn a narrow terminal does without it, from 1 on; 0: it is always there."""
    page_only: bool = False
    """Whether no terminal shows it, however wide."""
    differing: bool = False
    """Shown only where rows differ in it."""
    queried: bool = False
    """A query shows it unasked, though tables for people have it not, or not as a column of its own."""
    high_first: bool = False
    """Whether one looks for its highest numbers first."""
    style: str | Callable[[R], str] = ""
    """A class of the page's style sheet, such as `setting` or `reason`."""

    def __post_init__(self) -> None:
        if not self.about:
            object.__setattr__(self, "about", explained(self.name))

    @property
    def unit(self) -> str:
        """Returns the unit of its numbers; of other values what they are."""
        return unit(self.name, self.kind)

    def text(self, row: R) -> str:
        """Returns the cell for people."""
        if self.words:
            return self.words(row)
        value = self.value(row)
        return "" if is_unknown(value) else self.show(value)

    @property
    def is_number(self) -> bool:
        return self.kind in ("count", "number")


def is_unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


@dataclass(frozen=True)
class Table(Generic[R]):
    """Columns in their order, and what their rows are."""

    name: str
    """The stem of its files: `copies` of copies.csv and copies.parquet."""
    rows: str
    """What they are, for the column reference: `one row per point`."""
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
    def told(self) -> list[str]:
        """Returns the columns of files that a query shows by default: every terminal's, and those that are marked."""
        shown = [
            column.name
            for column in self.written
            if column.queried or (column.header and not column.dropped and not column.page_only)
        ]
        return [*(name for name in shown if name != "status"), "status"]

    @property
    def types(self) -> dict[str, str]:
        """Returns the pandas type of each column of files, in their order."""
        return {column.name: PANDAS[column.kind] for column in self.written}

    def details(self, row: R) -> dict[str, str]:
        """Returns the cells that people see, by header: the row's tooltip in charts."""
        return {column.header: column.text(row) for column in self.shown}

    def records(self, rows: Iterable[R]) -> list[Row]:
        """Returns the rows with every column of files."""
        return [{column.name: column.value(row) for column in self.written} for row in rows]


@dataclass(frozen=True)
class Listing(Generic[R]):
    """Rows of a table, as they are shown to people."""

    table: Table[R]
    rows: Sequence[R]
    caption: str = ""
    """What the rows are, above the table of the page."""
    chosen: Callable[[R], bool] = field(default=lambda row: False)
    """Whether the row is the answer, or one of them."""
    reference: Callable[[R], bool] = field(default=lambda row: False)
    """Whether the row is what gains are told against, which is shown however far down it is."""
    faint: Callable[[R], bool] = field(default=lambda row: False)
    """Whether the row is only there to be compared with."""
    group: Callable[[R], Any] = field(default=lambda row: None)
    """Rows next to each other that differ in it are set apart."""
    most_rows: int | None = None
    """On a terminal; of more the first ones, and the chosen."""
    order: Callable[[R], Any] | None = None
    """What the page sorts the rows by; None: they stay as they are."""
    link: Callable[[R], int] | None = None
    """Of rows that sum up answers: which of them the row is about, from 0 on."""

    @property
    def records(self) -> list[Row]:
        """Returns the rows as programs take them."""
        return self.table.records(self.rows)

    @property
    def columns(self) -> list[Column[R]]:
        """Returns the shown columns that have a text in any row."""
        return [column for column in self.table.shown if self._tells(column)]

    def _tells(self, column: Column[R]) -> bool:
        if column.differing:
            return len({column.text(row) for row in self.rows}) > 1
        return any(column.text(row) for row in self.rows)


def to_frame(rows: Sequence[Row], types: Mapping[str, str]) -> pd.DataFrame:
    """Returns the rows as a DataFrame. `types`: the pandas type of each column."""
    import pandas as pd

    return pd.DataFrame(rows, columns=list(types)).astype(dict(types))


_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet would compute instead of showing it."""


def csv_of(frame: pd.DataFrame) -> str:
    """Returns CSV that may be opened with anything: Parquet and JSON have the texts as they are."""
    texts = frame.select_dtypes(["object", "string"]).columns
    shown = frame.assign(**{name: frame[name].map(csv_cell, na_action="ignore") for name in texts})
    return shown.to_csv(index=False, lineterminator="\n")


def csv_cell(value: Any) -> Any:
    """Returns the value; of a text what can be shown, with an apostrophe before what would be a formula."""
    if not isinstance(value, str):
        return value
    return visible(f"'{value}" if value.startswith(_FORMULA) else value)


@dataclass(frozen=True)
class PointRow(Generic[R]):
    """One point of a sweep, whatever became of it, or one of the parts that it measured."""

    point: Point
    root: Path
    """The directory that was analysed."""
    measured: R | None
    """What a point that is ok measured."""
    part: str = ""
    """What the row is about, of a point that has several rows: a phase."""

    @property
    def directory(self) -> str:
        return self.point.directory.relative_to(self.root).as_posix()

    @property
    def why_not_ok(self) -> str:
        """Returns the reason in one line; empty where the point is ok."""
        return "" if self.point.status == "ok" else self.point.why_not_ok

    @property
    def is_launch_bound(self) -> bool:
        return bool(self.measured is not None and getattr(self.measured, "launch_bound", False))


def _status(row: PointRow[Any]) -> str:
    return f"{row.point.status}, launch-bound" if row.is_launch_bound else row.point.status


def _error(row: PointRow[Any]) -> str | None:
    if row.point.result:
        return row.point.result.error
    return "no result.json: the point was given up, or is still running"


POINT: Column[PointRow[Any]] = Column("point", lambda row: row.point.name, kind="text")
DIRECTORY: Column[PointRow[Any]] = Column("directory", lambda row: row.directory, kind="text")
MODEL: Column[PointRow[Any]] = Column("model", lambda row: row.point.case.model, kind="text", header="model")
BACKEND: Column[PointRow[Any]] = Column("backend", lambda row: row.point.case.backend, kind="text", header="backend")
DEVICE: Column[PointRow[Any]] = Column("device", lambda row: row.point.case.device, kind="text")
PRECISION: Column[PointRow[Any]] = Column(
    "precision", lambda row: row.point.case.precision, kind="text", header="precision"
)
STATUS: Column[PointRow[Any]] = Column(
    *("status", lambda row: row.point.status),
    kind="text",
    header="status",
    words=_status,
    style=lambda row: "doubtful" if row.is_launch_bound else row.point.status,
)
ERROR: Column[PointRow[Any]] = Column("error", _error, kind="text")


def attribute(name: str, about: str = "", kind: Kind = "number", read: str = "", **more: Any) -> Column[Any]:
    """Returns the column of the row's attribute `read`, by default the one of the column's name."""
    return Column(name, attrgetter(read or name), about, kind, **more)


def asked(name: str, *path: str, **more: Any) -> Column[PointRow[Any]]:
    """Returns a column of the point's configuration, at `path` (by default at its own name)."""

    def value(row: PointRow[Any]) -> Any:
        found: Any = row.point.config
        for key in path or (name,):
            found = found[key]
        return found

    return Column(name, value, **more)


def through(column: Column[R], get: Callable[[S], R | None], **changes: Any) -> Column[S]:
    """Returns the same column of rows that `get` takes an R from; empty where it takes None."""

    def of(call: Callable[[R], Any], nothing: Any) -> Callable[[S], Any]:
        def found(row: S) -> Any:
            inner = get(row)
            return nothing if inner is None else call(inner)

        return found

    style = column.style
    lifted: dict[str, Any] = {
        "value": of(column.value, None),
        "words": of(column.words, "") if column.words else None,
        "style": style if isinstance(style, str) else of(style, ""),
    }
    return replace(column, **lifted, **changes)  # type: ignore[return-value]


def of_measured(column: Column[R]) -> Column[PointRow[R]]:
    """Returns the same column of points: empty for those that measured nothing."""
    return through(column, lambda row: row.measured)


def points_table(
    name: str, rows: str, of_point: Iterable[Column[PointRow[R]]], measured: Iterable[Column[R]]
) -> Table[PointRow[R]]:
    """Returns the table of all points of a workload: what is known of each, then what was measured."""
    return Table(name, rows, (*of_point, *map(of_measured, measured)))
