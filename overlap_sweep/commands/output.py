"""Output that all commands share: rows with `--format` and `--fail-if`, columns in the help, errors and warnings on
stderr, exit statuses."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from overlap_sweep.commands.expressions import condition
from overlap_sweep.errors import UserError
from overlap_sweep.report.numbers import as_us, visible, visible_json
from overlap_sweep.report.table import Column, Kind, Row, Table, csv_of, item

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

FAILED_IF = 3
HELP_WIDTH = 116


def fail_for(problems: Sequence[str], *, answered: bool = False) -> None:
    """Prints problems: as warnings if there are answers; else as errors, and exits with status 1 if there are any."""
    for problem in problems:
        print_warning(problem) if answered else print_error(problem)
    if problems and not answered:
        raise typer.Exit(1)


def print_error(message: str) -> None:
    print_aside(f"error: {message}")


def print_warning(message: str) -> None:
    print_aside(f"warning: {message}")


def print_aside(sentence: str) -> None:
    """Prints the sentence to stderr in one line."""
    print(visible(sentence).replace("\n", r"\n"), file=sys.stderr)


class TableFormat(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"


def refuse_on_terminal(format: TableFormat) -> TableFormat:
    """Returns the format. UserError where a binary one would go to a terminal."""
    if format is TableFormat.parquet and sys.stdout.isatty():
        raise UserError("parquet is binary and stdout is a terminal; redirect it to a file, as in > rows.parquet.")
    return format


FormatOption = Annotated[
    TableFormat,
    typer.Option("--format", callback=refuse_on_terminal, help="Format of the rows; parquet needs a file or pipe."),
]


def fail_if_option(example: str, matches: str = "any row") -> OptionInfo:
    """Returns the option `--fail-if` with an example in its help. `matches`: what is compared with it."""
    help = f"Exit with status 3 if {matches} matches, such as '{example}'. Repeatable."
    return typer.Option("--fail-if", metavar="EXPRESSION", help=help)


def print_rows(frame: Callable[[], pd.DataFrame], format: TableFormat, print_table: Callable[[Console], None]) -> None:
    """Prints the rows to stdout, and nothing else: as `print_table` does, or in another format. Only that asks for the
    frame: pandas takes longer to import than all else."""
    if format is TableFormat.csv:
        sys.stdout.write(csv_of(frame()))
    elif format is TableFormat.json:
        sys.stdout.write(as_json(frame()) + "\n")
    elif format is TableFormat.parquet:
        content = io.BytesIO()
        frame().to_parquet(content, index=False)
        sys.stdout.buffer.write(content.getvalue())
        sys.stdout.buffer.flush()
    else:
        from overlap_sweep.report.console import console_for

        print_table(console_for(sys.stdout))


def as_json(frame: pd.DataFrame) -> str:
    """Returns a JSON list of objects; null for missing values, NaN and infinities."""
    rows = [{str(name): plain(value) for name, value in row.items()} for row in frame.to_dict("records")]
    return visible_json(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())


def columns_of(frame: pd.DataFrame) -> list[Column[Row]]:
    """Returns a printable column for each column of the frame."""
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    def shown(name: str) -> Column[Row]:
        is_number = is_numeric_dtype(frame[name]) and not is_bool_dtype(frame[name])
        kind: Kind = "number" if is_number else "text"
        return item(name, header=name, kind=kind, words=lambda row: cell(name, row[name]))

    return [shown(str(name)) for name in frame.columns]


def cell(column: str, value: object) -> str:
    """Returns the value as text for a table; its unit is in the column's name."""
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return as_us(value) if column.endswith("_us") else f"{value:.4g}"
    return str(next(iter(str(value).splitlines()), ""))


def plain(value: Any) -> object:
    """Returns the value as a Python object; None if it is missing."""
    import pandas as pd

    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else value


def check_fail_if(expressions: Sequence[str] | None, frame: pd.DataFrame) -> None:
    """Raises UserError if an expression is wrong, before anything is written or printed."""
    for expression in expressions or []:
        condition(frame, expression)


def fail_if(expressions: Sequence[str] | None, frame: pd.DataFrame, rows: str = "rows") -> None:
    """Exits with status 3 if any row matches any expression, and prints each. `rows`: word for the rows, in plural.

    UserError where an expression is wrong, or could never match because a column has no value in any row.
    """
    failed = []
    for expression in expressions or []:
        wanted = condition(frame, expression)
        if frame.empty:
            raise UserError(f"--fail-if {wanted.text} could never fail: there are no {rows} to check.")
        for column in wanted.needed:
            if frame[column].isna().all():
                raise UserError(
                    f"--fail-if {wanted.text} could never fail: {column} has no value in any of the {rows}; "
                    "choose another column."
                )
        matching = frame[wanted.mask]
        if len(matching):
            first = _described(matching.iloc[0], wanted.columns)
            failed.append(f"fail-if: {wanted.text} holds for {len(matching)} of {len(frame)} {rows}; first: {first}")
    for sentence in failed:
        print_aside(sentence)
    if failed:
        raise typer.Exit(FAILED_IF)


NAMING = (
    "model dataset run file point variant rank iteration tp_size slot phase setting name quantity kernel m "
    "implementation"
)
"""The columns that identify a row that failed."""


def _described(row: pd.Series[Any], columns: Sequence[str]) -> str:
    naming = {name: plain(row[name]) for name in NAMING.split() if name in row}
    known = {name: value for name, value in naming.items() if value is not None}
    names = [value if isinstance(value, str) else f"{name} {value}" for name, value in known.items()]
    values = [f"{name} {cell(name, row[name])}" for name in columns]
    return f"{' '.join(names)} ({', '.join(values)})".strip()


def with_columns(tables: Callable[[], Mapping[str, Table]]) -> type[TyperCommand]:
    """Returns a command class whose help ends with the tables' columns under their headings; tables are imported only
    for the help."""

    class WithColumns(TyperCommand):
        def headed(self, ctx: typer.Context) -> Mapping[str, Table]:
            """Returns the tables to list for this command line, by heading."""
            return tables()

        def format_epilog(self, ctx: Any, formatter: Any) -> None:
            paragraphs = []
            for heading, table in self.headed(ctx).items():
                names = textwrap.wrap(" ".join(table.types), HELP_WIDTH, break_on_hyphens=False)
                paragraphs.append("\b\n" + "\n  ".join([f"Columns {heading}, {table.rows}:", *names]))
            self.epilog = "\n\n".join(paragraphs)
            super().format_epilog(ctx, formatter)

    return WithColumns
