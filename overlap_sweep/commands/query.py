from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_sweep.commands.expressions import condition, nearest_columns
from overlap_sweep.commands.frames import point_rows, tables
from overlap_sweep.commands.output import (
    FormatOption,
    TableFormat,
    check_fail_if,
    columns_of,
    fail_for,
    fail_if,
    fail_if_option,
    print_aside,
    print_rows,
    print_warning,
    with_columns,
)
from overlap_sweep.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from overlap_sweep.report.table import Row, Table

ALL = "all"
CASE = ("model", "backend", "device", "precision", "tokens")
_ASKED = "overlap_sweep.tables"


def flags_of_tables() -> dict[str, str]:
    """Returns the names of the tables of points by the flag that asks for their rows."""
    return {f"--{name.replace('_', '-')}": name for name in tables()}


def headed() -> dict[str, Table[Any]]:
    """Returns the same tables by heading."""
    return {f"with {flag}": tables()[name] for flag, name in flags_of_tables().items()}


class QueryCommand(with_columns(headed)):  # type: ignore[misc]
    """Has a flag for each workload's rows, of whatever package."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = flags_of_tables()
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_ASKED] = [flag for flag in flags if flag in args[:end]]
        parsed: list[str] = super().parse_args(ctx, [*(arg for arg in args[:end] if arg not in flags), *args[end:]])
        return parsed


def query(
    context: typer.Context,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A date's, a sweep's or one point's directory, or one with points.parquet."),
    ],
    expression: Annotated[
        str | None, typer.Argument(metavar="EXPRESSION", help="Which rows; all of them without it.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME", help=f"What to print, or `{ALL}`. A table shows a few, else all are printed."
        ),
    ] = None,
    sort: Annotated[str | None, typer.Option(metavar="NAME,-NAME", help="Sort by these; - from high to low.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Print no more rows than these.")] = None,
    format: FormatOption = TableFormat.table,
    fail_expressions: Annotated[list[str] | None, fail_if_option("hidden_fraction < 0.3")] = None,
) -> None:
    """Print the measured points that a condition holds for; --fail-if looks at these.

    Results are read, never written. The rows are those of the first of the tables below that has any; the flag in its
    heading asks for another one. docs/columns.md explains the columns. An operator's times are those of the phase's
    pass, fwd or bwd: dgrad and wgrad can only be timed together. What comes from traces is all of one iteration of the
    slowest rank (docs/traces.md); of points that were not profiled not_profiled_because says why.

    \b
    A condition compares columns: == != < <= > >=, in [1, 2], and, or, not, + - * / // %, parentheses,
    .isna() .notna(), and of text .str.contains('x') .str.startswith('x') .str.endswith('x').
    A missing value makes no condition true. Text needs quotes, and the column `pass` backticks.

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

    COLUMNS

    Exit status: 0 fine, also where no row matches, 1 an error, 2 wrong usage, 3 a --fail-if holds.
    """
    from overlap_sweep.report.console import print_table
    from overlap_sweep.report.numbers import counted

    flags = context.meta[_ASKED]
    if len(flags) > 1:
        raise typer.BadParameter(f"{' and '.join(flags)}: give only one.")
    found = point_rows(directory, flags_of_tables()[flags[0]] if flags else None)
    frame, table, problems = found.frame, found.table, found.problems
    for warning in found.warnings:
        print_warning(warning)
    wanted = condition(frame, expression) if expression is not None else None
    matching = frame[wanted.mask] if wanted else frame
    check_fail_if(fail_expressions, matching)
    if sort is not None:
        keys = _columns(sort, frame)
        # What is missing comes last either way.
        ascending = [not key.startswith("-") for key in keys]
        matching = matching.sort_values([key.removeprefix("-") for key in keys], ascending=ascending, kind="stable")
    shown = matching.head(limit) if limit else matching
    asked = list(frame) if columns in (None, ALL) else _columns(columns, frame)
    if format is TableFormat.table and columns is None:
        asked = _telling(shown, table, wanted.columns if wanted else []) or asked
    if matching.empty and format is TableFormat.table:
        print_aside(f"No row matches, of {len(frame)}.")
    else:
        chosen = shown[asked]

        def show(console: Console) -> None:
            rows: list[Row] = chosen.to_dict("records")  # type: ignore[assignment]
            print_table("", columns_of(chosen), rows, console)
            found = counted(len(matching), "row")
            console.print(f"{len(shown)} of {found}" if len(shown) < len(matching) else found, style="dim")

        print_rows(chosen, format, show)
    fail_for(problems, answered=not frame.empty)
    fail_if(fail_expressions, matching, "matching rows" if expression else "rows")


def _columns(listed: str, frame: pd.DataFrame) -> list[str]:
    """Returns the names, which may begin with `-`. UserError where one is no column."""
    names = [name.strip() for name in listed.split(",")]
    for name in names:
        if name.removeprefix("-") not in frame:
            raise UserError(f"{name or 'An empty name'} is no column; the nearest are {nearest_columns(name, frame)}.")
    return list(dict.fromkeys(names))


def _telling(rows: pd.DataFrame, table: Table[Any], mentioned: Sequence[str]) -> list[str]:
    """Returns the columns to show: the case where there are several, those with a value in any row, and those that were
    asked about."""
    cases = [name for name in CASE if name in rows and rows[name].nunique() > 1]
    usual = [name for name in table.told if name in rows and name not in CASE and rows[name].notna().any()]
    return list(dict.fromkeys([*cases, *usual, *mentioned]))
