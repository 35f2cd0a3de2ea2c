"""The progress of a sweep: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from overlap_sweep.runtime.outcome import Outcome, Outcomes


@contextmanager
def progress(total: int, outcomes: Outcomes, console: Console | None = None) -> Iterator[None]:
    """Show every outcome that is added inside the block."""
    console = console or Console()
    show = _bar if console.is_terminal else _lines
    with show(total, outcomes, console):
        yield


@contextmanager
def _bar(total: int, outcomes: Outcomes, console: Console) -> Iterator[None]:
    columns = (
        BarColumn(bar_width=10),
        TextColumn("{task.completed}/{task.total} {task.fields[counts]}"),
        TimeElapsedColumn(Column(min_width=7)),
        TextColumn("[dim]left"),
        TimeRemainingColumn(table_column=Column(min_width=7)),
        # What gives way on a narrow terminal.
        TextColumn("{task.fields[best]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("points", total=total, counts=outcomes.counts_line(), best="")

        def heard(outcome: Outcome) -> None:
            console.print(str(outcome), highlight=False, markup=False, soft_wrap=True)
            best = outcomes.best()
            shown = f"best {best.speedup:.3f}x {best.name}" if best else ""
            bar.update(task, advance=1, counts=outcomes.counts_line(), best=shown)

        def say(text: str) -> None:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        with _listening(outcomes, heard, say):
            yield


@contextmanager
def _lines(total: int, outcomes: Outcomes, console: Console) -> Iterator[None]:
    start, before = time.monotonic(), len(outcomes.all)

    def heard(outcome: Outcome) -> None:
        done, elapsed_s = len(outcomes.all) - before, time.monotonic() - start
        left_s = elapsed_s / done * (total - done)
        times = f"elapsed {elapsed_s:.0f} s, left {left_s:.0f} s"
        print(f"[{done:>{len(str(total))}}/{total}] {outcome}  ({times})", file=console.file, flush=True)

    with _listening(outcomes, heard, lambda text: print(text, file=console.file, flush=True)):
        yield
    best = outcomes.best()
    if best and not outcomes.searching:
        print(f"best    {best.name}  {best.compared}", file=console.file, flush=True)


@contextmanager
def _listening(outcomes: Outcomes, listener: Callable[[Outcome], None], say: Callable[[str], None]) -> Iterator[None]:
    before = outcomes.listener, outcomes.say
    outcomes.listener, outcomes.say = listener, say
    try:
        yield
    finally:
        outcomes.listener, outcomes.say = before
