from __future__ import annotations

from enum import StrEnum
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overlap_sweep.commands import output
from overlap_sweep.commands.frames import diagnosed_rows, read_runs_of_nodes
from overlap_sweep.diagnosis.causes import CAUSES
from overlap_sweep.report.console import print_table
from overlap_sweep.report.diagnosis import TABLES, print_diagnosis, warnings_of
from overlap_sweep.report.table import Listing

if TYPE_CHECKING:
    from rich.console import Console


class Rows(StrEnum):
    finding = "finding"
    group = "group"
    step = "step"


GROUPED_BY = {Rows.group: "process_group", Rows.step: "rank"}
"""Column whose values a blank line separates in tables."""


class Command(output.with_columns(lambda: TABLES)):  # type: ignore[misc]
    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        causes = "\n".join(f"  {name:<11}  {cause.meaning}" for name, cause in CAUSES.items())
        self.help: str = self.help.replace("{causes}", causes)
        super().format_help_text(ctx, formatter)


def diagnose(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|DIR",
            help="Traces of all ranks: Kineto's, .json or .json.gz; Nsight Systems' .sqlite or .nsys-rep; or their "
            "directories.",
        ),
    ],
    by: Annotated[
        Rows,
        typer.Option(help="One row per finding; per process group and collective; or per step: what each rank lost."),
    ] = Rows.finding,
    format: output.FormatOption = output.TableFormat.table,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Ranks on each node; for the traces of points it is known.")
    ] = None,
    fail_expressions: Annotated[
        list[str] | None, output.fail_if_option('cause == "straggler" and share > 0.05')
    ] = None,
) -> None:
    """Say why communication is exposed in traces, and which setting to try.

    Give the traces of all ranks: without them, waiting for another rank looks like slow communication. All traces at or
    below a directory are read; those whose names differ only in the rank are one run. Times are in microseconds per
    step, medians over the steps. First steps that are clearly slower than the others are left out.

    \b
    Causes, of which several can hold at once:
    {causes}

    --fail-if checks the printed rows. JSON is a list of objects, of each run the most worthwhile first.

    \b
    Examples:
      python analyze.py diagnose trace_rank0.json.gz trace_rank1.json.gz
      python analyze.py diagnose traces/ --format json
      python analyze.py diagnose traces/ --by group
      python analyze.py diagnose traces/ --by group --ranks-per-node 8
      python analyze.py diagnose traces/ --fail-if 'cause == "straggler" and share > 0.05'
      python analyze.py diagnose traces/ --fail-if 'cause != "none"'

    Exit status: 0 success, 1 error, 2 wrong usage, 3 a --fail-if condition holds.
    """
    # Imported here, because numpy is only needed to read traces.
    from overlap_sweep.predict.predictions import in_words

    runs, problems, warnings = read_runs_of_nodes(paths, ranks_per_node)
    for warning in (*warnings, *warnings_of(runs)):
        output.print_warning(warning)
    table, rows, mends = diagnosed_rows(runs, by)
    diagnoses = [(run.name, run.found) for run in runs if run.found]
    frame = cache(partial(table.frame, rows))

    def show(console: Console) -> None:
        if by is Rows.finding:
            for name, found in diagnoses:
                mend = mends[name]
                predicted = [
                    f"Predicted for the whole step: {in_words(one)}." if one else "" for one in mend.of_findings
                ]
                tries = [row["try"] for row in rows if row["run"] == name]
                print_diagnosis(found, console, tries, predicted, mend.best_in_words)
            return
        for run, same in groupby(rows, key=itemgetter("run")):
            own = list(same)
            print_table(run, Listing(table, own).columns, own, console, group=itemgetter(GROUPED_BY[by]))

    if fail_expressions:
        output.check_fail_if(fail_expressions, frame())
    if diagnoses:
        output.print_rows(frame, format, show)
    output.fail_for(problems)
    if fail_expressions:
        output.fail_if(fail_expressions, frame())
