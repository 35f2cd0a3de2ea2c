from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_sweep.commands import output
from overlap_sweep.commands.expressions import Condition, condition, names_in, nearest_columns
from overlap_sweep.commands.frames import Rows, point_rows, tables
from overlap_sweep.errors import UsageError, UserError
from overlap_sweep.report import causes
from overlap_sweep.report.console import print_table
from overlap_sweep.report.diagnosis import NODE_TIMES
from overlap_sweep.report.numbers import counted
from overlap_sweep.report.predictions import PREDICTIONS
from overlap_sweep.report.table import Row, Table, to_frame

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

ALL = "all"
ADDED_TYPES = causes.OF_POINT.types | NODE_TIMES.types
"""Types of the columns that are added if they are named: what costs most in the traces of each point, and what its
communication between nodes costs. Reading the traces of all points may take minutes."""
CASE = ("model", "backend", "device", "precision", "tokens")
_FLAGS = "overlap_sweep.tables"


def flags_of_tables() -> dict[str, str]:
    """Returns the names of the tables of points, and of predictions, by their flag."""
    return {f"--{name.replace('_', '-')}": name for name in (*tables(), PREDICTIONS.name)}


def headed() -> dict[str, Table]:
    """Returns the tables by heading, and the columns that can be added to any of points."""
    known = tables() | {PREDICTIONS.name: PREDICTIONS}
    own = {f"with {flag}": known[name] for flag, name in flags_of_tables().items()}
    return own | {"added if named": causes.OF_POINT, "of points on several nodes, added if named": NODE_TIMES}


class Command(output.with_columns(headed)):  # type: ignore[misc]
    """Has a flag for the rows of each workload, including those of other packages. With a flag, the help lists only the
    columns of that table."""

    def headed(self, ctx: typer.Context) -> dict[str, Table]:
        flags = [f"with {flag}" for flag in flags_of_tables() if flag not in ctx.meta[_FLAGS]]
        found = headed()
        return {name: table for name, table in found.items() if not ctx.meta[_FLAGS] or name not in flags}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = flags_of_tables()
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_FLAGS] = [flag for flag in flags if flag in args[:end]]
        # Help for one table is asked for by its flag.
        parsed: list[str] = super().parse_args(ctx, [*(arg for arg in args[:end] if arg not in flags), *args[end:]])
        return parsed


def query(
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of a date, a sweep or a point, or one with points.parquet.")
    ],
    expression: Annotated[
        str | None, typer.Argument(metavar="EXPRESSION", help="Condition that selects rows; default: all rows.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME", help=f"Columns to print, or `{ALL}`. Default: the main ones in a table, else all."
        ),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="NAME,-NAME", help="Columns to sort by; - for descending.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Print at most this many rows.")] = None,
    format: output.FormatOption = output.TableFormat.table,
    fail_expressions: Annotated[list[str] | None, output.fail_if_option("hidden_fraction < 0.3")] = None,
) -> None:
    """Print the measured points that match a condition; --fail-if checks these rows.

    Results are only read. The rows are those of the first table below that has any, or of the table whose flag is
    given; with a flag, --help lists only its columns. --predictions are what changes would gain, from all traces at
    or below the directory (docs/predict.md). docs/columns.md explains the columns. An operator's times are
    those of its pass, fwd or bwd, because dgrad and wgrad cannot be timed separately. Columns from traces are from
    one iteration of the slowest rank (docs/traces.md); not_profiled_because says why a point has none. Why
    communication is exposed (docs/diagnosis.md) is found only if one of its columns is named, because the traces of
    all ranks are read for it.

    \b
    A condition compares columns: == != < <= > >=, in [1, 2], and, or, not, + - * / // %, parentheses,
    .isna() .notna(), and for text .str.contains('x') .str.startswith('x') .str.endswith('x').
    Missing values never match. Put text in quotes, and the column `pass` in backticks.

    \b
    Examples:
      python analyze.py query multirun/2026-11-20 'num_sm > 8 and tp_size == 8'
      python analyze.py query multirun/2026-11-20 "status != 'ok'" --columns config_id,error
      python analyze.py query multirun/2026-11-20 'speedup > 1' --sort slot,-speedup --limit 10
      python analyze.py query multirun/2026-11-20 "slot == 'fc1_dgrad'" --format csv > fc1_dgrad.csv
      python analyze.py query multirun/2026-11-20 --layers 'ratio < 1' --fail-if 'ratio_high >= 1'
      python analyze.py query multirun/2026-11-20 --kernels 'm == 8192 and not independent' --sort kernel,time_us
      python analyze.py query multirun/2026-11-20 --training 'forward_prefetch > 0' --sort=-samples_per_s
      python analyze.py query multirun/2026-11-20 --copies "direction == 'device_to_host' and hidden_fraction < 0.5"
      python analyze.py query multirun/2026-11-20 --tp-training 'tp_size == 4' --sort=-tokens_per_s_per_gpu
      python analyze.py query multirun/2026-11-20 --predictions 'gain_us > 0.05 * step_us' --sort=-gain_us
      python analyze.py query multirun/2026-11-20 --training 'cause == "straggler"' --columns point,cause_try

    Exit status: 0 success (also if no row matches), 1 error, 2 wrong usage, 3 a --fail-if condition holds.
    """
    flags = context.meta[_FLAGS]
    if len(flags) > 1:
        raise typer.BadParameter(f"{' and '.join(flags)}: give only one.")
    chosen = select(
        directory, flags_of_tables()[flags[0]] if flags else None, expression, columns, sort, fail_expressions or ()
    )
    found, matching = chosen.found, chosen.matching
    for warning in found.warnings:
        output.print_warning(warning)
    output.check_fail_if(fail_expressions, matching)
    shown = matching.head(limit) if limit else matching
    names = chosen.names
    if format is output.TableFormat.table and columns is None:
        names = chosen.main_columns(shown) or names
    if found.frame.empty:
        output.print_aside(_empty(found.table.name, found.points_by_table))
    elif matching.empty and format is output.TableFormat.table:
        output.print_aside(f"None of the {len(found.frame)} rows matches.")
    if not matching.empty or format is not output.TableFormat.table:
        printed = shown[names]

        def show(console: Console) -> None:
            rows: list[Row] = printed.to_dict("records")  # type: ignore[assignment]
            print_table("", output.columns_of(printed), rows, console)
            number = counted(len(matching), "row")
            console.print(f"{len(shown)} of {number}" if len(shown) < len(matching) else number, style="dim")

        output.print_rows(lambda: printed, format, show)
    output.fail_for(found.problems, answered=not found.frame.empty)
    output.fail_if(fail_expressions, matching, "matching rows" if expression else "rows")


@dataclass(frozen=True)
class Selection:
    """The rows that a query selects."""

    found: Rows
    """All rows of the table."""
    matching: pd.DataFrame
    """Those that match the condition, sorted."""
    names: list[str]
    """The columns that were asked for; all, if none were."""
    condition: Condition | None
    added: list[str]
    """Those of ADDED_TYPES that were named."""

    def main_columns(self, rows: pd.DataFrame) -> list[str]:
        """Returns the columns to show of these rows if none were asked for."""
        mentioned = [*(self.condition.columns if self.condition else ()), *self.added]
        return _main_columns(rows, self.found.table, mentioned)


def select(
    directory: Path,
    table: str | None,
    expression: str | None,
    columns: str | None,
    sort: str | None,
    others: Sequence[str] = (),
) -> Selection:
    """Returns the rows that match the expression. `others`: further expressions, which may name columns."""
    found = point_rows(directory, table)
    frame = _with_added(found.frame, None)
    named = _added([expression, *others], [columns, sort])
    in_condition = _added([expression], [])
    if in_condition:
        frame = _with_added(frame, found, directory)
    wanted = condition(frame, expression) if expression is not None else None
    matching = frame[wanted.mask] if wanted else frame
    if named and not in_condition:
        matching = _with_added(matching, found, directory)
    if sort is not None:
        keys = _columns(sort, frame)
        # Missing values come last in both directions.
        ascending = [not key.startswith("-") for key in keys]
        matching = matching.sort_values([key.removeprefix("-") for key in keys], ascending=ascending, kind="stable")
    names = [*found.frame, *named] if columns in (None, ALL) else _columns(columns, frame)
    return Selection(found, matching, names, wanted, named)


def _with_added(frame: pd.DataFrame, rows: Rows | None, directory: Path | None = None) -> pd.DataFrame:
    """Returns the frame, some of the rows, with the added columns; without `rows` they are empty. UserError where there
    are no traces."""
    if rows is None or frame.empty:
        return frame.assign(**to_frame([{}] * len(frame), ADDED_TYPES))
    if not rows.points:
        names = ", ".join(ADDED_TYPES)
        if rows.table is PREDICTIONS:
            raise UserError(f"{names} are columns of points; leave out --predictions.")
        raise UserError(f"{directory} has no traces, from which {names} are found; give the directory of the sweep.")
    values = to_frame(causes.cause_rows([rows.points[place] for place in frame.index]), ADDED_TYPES)
    return frame.assign(**values.set_index(frame.index))


def _added(expressions: Iterable[str | None], lists: Iterable[str | None]) -> list[str]:
    """Returns the added columns that the expressions mention, or the comma-separated lists of names."""
    named = {name for expression in expressions if expression for name in names_in(expression)}
    named |= {name.strip().removeprefix("-") for listed in lists if listed for name in listed.split(",")}
    return [name for name in ADDED_TYPES if name in named]


def _empty(name: str, points_by_table: Mapping[str, int]) -> str:
    """Returns which tables there are, and which have points; of rows from a file that is unknown."""
    if not points_by_table:
        return f"The table {name} has no rows."
    named = flags_of_tables().items()
    flags = {flag: points_by_table[table] for flag, table in named if table in points_by_table}
    there = ", ".join(f"{flag} ({counted(number, 'point')})" for flag, number in flags.items() if number)
    others = ", ".join(flag for flag, number in flags.items() if not number)
    return f"The table {name} has no rows. With points: {there or 'none'}; empty: {others}."


def _columns(listed: str, frame: pd.DataFrame) -> list[str]:
    """Returns the column names, which may begin with `-`. UsageError where one is unknown."""
    names = [name.strip() for name in listed.split(",")]
    for name in names:
        if name.removeprefix("-") not in frame:
            unknown = f"Unknown column '{name.removeprefix('-')}'." if name else "A column's name is empty."
            raise UsageError(f"{unknown} Did you mean {nearest_columns(name, frame)}?")
    return list(dict.fromkeys(names))


def _main_columns(rows: pd.DataFrame, table: Table, mentioned: Sequence[str]) -> list[str]:
    """Returns the columns to show: those of the case where there are several, the usual ones that have a value in any
    row, and those of the condition."""
    cases = [name for name in CASE if name in rows and rows[name].nunique() > 1]
    same = {column.name: column.usual for column in table.written if column.usual is not None}
    usual = [
        name
        for name in table.default_columns
        if name in rows
        and name not in CASE
        and rows[name].notna().any()
        and not (name in same and rows[name].dropna().eq(same[name]).all())
    ]
    return list(dict.fromkeys([*cases, *usual, *mentioned]))
