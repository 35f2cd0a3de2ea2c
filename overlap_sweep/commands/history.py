from pathlib import Path
from typing import Annotated

import typer

from overlap_sweep.commands import output
from overlap_sweep.commands.expressions import condition
from overlap_sweep.compare.history import ROWS, print_history
from overlap_sweep.compare.history import history as history_of
from overlap_sweep.store import read_store

TABLES = {"of a history": ROWS}
Command = output.with_columns(lambda: TABLES)


def history(
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="The store given to launch.py as store=, or a copy of it.")
    ],
    expression: Annotated[
        str | None, typer.Argument(metavar="EXPRESSION", help="Condition that selects rows; default: all rows.")
    ] = None,
    format: output.FormatOption = output.TableFormat.table,
    fail_expressions: Annotated[list[str] | None, output.fail_if_option("ratio > 1.05")] = None,
) -> None:
    """Show how each point's time moved from one version of driver and libraries to the next.

    The store is only read. There is one row per point and environment on the same kind of machine, in order of first
    measurement; layers have rows per variant, kernels per implementation. Times are medians over the measurements: of
    the measured passes of an operator, of a step of a training run or tensor-parallel stack, of GEMMs and copies
    running together. Each is compared with the previous environment; "same" means within the noise of both, or within
    0.5%. The points that changed most come first. Failed and launch-bound measurements have no time and are only
    counted. `query --help` explains EXPRESSION.

    \b
    Examples:
      python analyze.py history measurements
      python analyze.py history measurements "tp_size == 4 and verdict != 'same'"
      python analyze.py history measurements "torch == '2.13.0'" --fail-if "verdict == 'slower'"
      python analyze.py history measurements "operator == 'fc1'" --format csv > fc1.csv

    Exit status: 0 success (also if no row matches), 1 error, 2 wrong usage, 3 a --fail-if condition holds.
    """
    reading = read_store(store)
    found = history_of(reading.measurements)
    rows = found.rows
    table = ROWS.frame(rows)
    matching = table[condition(table, expression).mask] if expression is not None else table
    output.check_fail_if(fail_expressions, matching)
    if matching.empty and format is output.TableFormat.table:
        output.print_aside(f"None of the {len(table)} rows matches.")
    else:
        shown = [rows[i] for i in matching.index]
        output.print_rows(lambda: matching, format, lambda console: print_history(shown, found.left_out, console))
    output.fail_for(reading.problems)
    output.fail_if(fail_expressions, matching, "matching rows" if expression else "rows")
