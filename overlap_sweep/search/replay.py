"""Run the search against recorded response surfaces: what it would have cost, and what it would have found.

python -m overlap_sweep.search.replay FILE... [--format table|json] [--start usual|model]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from overlap_sweep.errors import UserError
from overlap_sweep.search.bisect import Effort, bisect
from overlap_sweep.search.cell import Candidate
from overlap_sweep.search.recording import RecordedCell, read
from overlap_sweep.search.start import STARTS, Start, usual
from overlap_sweep.search.trail import Measured, Trail


@dataclass(frozen=True)
class Row:
    """One search."""

    model: str
    tp_size: int
    operator: str
    phase: str
    """`fwd` or `bwd`: what a recording has times of. Backward, dgrad and wgrad are chosen together."""
    evaluations: int
    """Measurements that the search asked for, repeated ones too. `none` is not among them: it is measured beside
    every one."""
    exhaustive: int
    """Different settings that were recorded, `none` apart."""
    regret: float
    """Recorded time of what was chosen over that of the best recorded, `none` included, minus 1."""
    chosen: str
    settings: dict[str, dict[str, Any]]
    """What was chosen, by slot; empty for none."""
    time_us: float
    best: str
    best_us: float


def replay(recorded: RecordedCell, effort: Effort, start: Start = usual) -> Trail:
    """Search one recorded cell to the end. A candidate is measured at most as often as it was recorded."""
    trail = Trail(recorded.cell, recorded.baselines, most_samples=lambda candidate: len(recorded.samples[candidate]))
    search = bisect(trail, effort, start)
    try:
        wanted = next(search)
        while True:
            wanted = search.send({candidate: _next_sample(candidate, trail, recorded) for candidate in wanted})
    except StopIteration as stop:
        trail.stopped = stop.value
    return trail


def _next_sample(candidate: Candidate, trail: Trail, recorded: RecordedCell) -> Measured:
    return recorded.samples[candidate][len(trail.samples.get(candidate, ()))]


def row(recorded: RecordedCell, trail: Trail) -> Row:
    chosen_us, best_us = recorded.time_us(trail.best), recorded.time_us(recorded.best)
    return Row(
        model=recorded.model,
        tp_size=recorded.tp_size,
        operator=recorded.operator,
        phase=recorded.pass_name,
        evaluations=trail.evaluations,
        exhaustive=len(recorded.cell.candidates),
        regret=chosen_us / best_us - 1,
        chosen=str(trail.best),
        settings=trail.best.settings,
        time_us=chosen_us,
        best=str(recorded.best),
        best_us=best_us,
    )


def totals(rows: Sequence[Row]) -> str:
    used, of = sum(row.evaluations for row in rows), sum(row.exhaustive for row in rows)
    regrets = [row.regret for row in rows]
    return (
        f"{len(rows)} searches: {used} of {of} evaluations ({used / of:.1%}); regret: median "
        f"{statistics.median(regrets):.2%}, mean {statistics.mean(regrets):.2%}, worst {max(regrets):.2%}"
    )


class Format(StrEnum):
    table = "table"
    json = "json"


class StartName(StrEnum):
    usual = "usual"
    model = "model"


def main(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Recorded surfaces, one JSON object a line.")],
    format: Annotated[Format, typer.Option(help="How to print the rows; totals of json go to stderr.")] = Format.table,
    start: Annotated[StartName, typer.Option(help="Which num_sm is tried first.")] = StartName.usual,
) -> None:
    """Run the search of hydra/sweeper=bisect against recorded response surfaces.

    Prints for each model, operator and phase what the search would have measured and chosen. regret is the recorded
    time of what was chosen over that of the best that was recorded, minus 1.
    """
    recorded = [cell for path in files for cell in read(path)]
    by_start = {name: [row(c, replay(c, Effort(), STARTS[name])) for c in recorded] for name in STARTS}
    rows = by_start.pop(start.value)
    saved = [_saved(name, others, rows) for name, others in by_start.items()]
    if format is Format.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        print("\n".join([totals(rows), *saved]), file=sys.stderr)
        return
    _print_table(rows)
    print("\n".join([totals(rows), *saved]))


def _saved(name: str, others: Sequence[Row], rows: Sequence[Row]) -> str:
    used, instead = sum(row.evaluations for row in rows), sum(row.evaluations for row in others)
    return f"with --start {name}: {instead} evaluations, {abs(used - instead)} {'fewer' if instead < used else 'more'}"


def _print_table(rows: Sequence[Row]) -> None:
    from rich import box
    from rich.table import Table

    from overlap_sweep.report.console import console_for

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("model", "TP", "operator", "phase", "evaluations", "share", "regret", "chosen", "best recorded"):
        left = header in ("model", "operator", "phase", "chosen", "best recorded")
        table.add_column(header, justify="left" if left else "right", no_wrap=left)
    for r in rows:
        counts = f"{r.evaluations} of {r.exhaustive}", f"{r.evaluations / r.exhaustive:.0%}"
        best = "" if r.best == r.chosen else r.best
        table.add_row(r.model, str(r.tp_size), r.operator, r.phase, *counts, f"{r.regret:.2%}", r.chosen, best)
    console_for(sys.stdout).print(table)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(main)
    try:
        app(prog_name="python -m overlap_sweep.search.replay")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
